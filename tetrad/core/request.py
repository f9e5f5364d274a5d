"""What a client asks for, and what the engine sends back, as plain data.

A request has *known* tokens (prompt and what was generated) and *computed* tokens (those whose
keys are in the cache); there are no phases. Text never enters the engine: the server tokenises,
detokenises and looks for stop strings.

They are structs, which are made, and read from a message, in a fraction of the time that frozen
dataclasses take.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "abort", "error"]
GrammarKind = Literal["json_schema", "regex", "ebnf", "lark", "structural_tag"]

MAX_GRAMMAR_BYTES = 128 * 1024
"""Longest schema, expression or grammar."""
TOKEN_BYTES = array("i").itemsize


def packed(token_ids: Iterable[int]) -> bytes:
    """Token ids as `Request.prompt`: thousands of them are read, checked and copied at once."""
    return array("i", token_ids).tobytes()


class Grammar(msgspec.Struct, frozen=True):
    """What the text of an answer must match, and from where on."""

    kind: GrammarKind
    text: str
    """A JSON schema, a regular expression, EBNF as of GBNF, Lark, or a structural tag of xgrammar;
    at most MAX_GRAMMAR_BYTES."""
    field: str = "grammar"
    """What the client calls it."""
    close_id: int | None = None
    """Token that ends the reasoning: nothing before it is constrained. None: the answer is
    constrained from its start."""
    open_id: int | None = None
    """Token that may begin the answer instead, to open the reasoning. None: it is open already."""
    call_id: int | None = None
    """Token that ends the reasoning as well, and is the first that the grammar reads."""


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How to choose the next token. Defaults are the neutral element of each rule."""

    max_new_tokens: int = 128
    """At most this many tokens are generated (>= 1)."""
    min_new_tokens: int = 0
    """End tokens are not sampled before this many tokens were generated."""
    temperature: float = 1.0
    """0 is greedy (lowest token id on ties)."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this; in (0, 1]."""
    top_k: int = 0
    """Keep this many tokens; 0 keeps all."""
    min_p: float = 0.0
    """Keep tokens of at least this share of the best token's probability; in [0, 1]."""
    repetition_penalty: float = 1.0
    """Divide positive (multiply negative) logits of every token seen in prompt or output; in
    [0.01, 100]."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token that was generated; in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted once per occurrence from the logit of each generated token; in [-2, 2]."""
    logit_bias: dict[int, float] = {}
    """Added to the logits of these token ids before anything else."""
    seed: int | None = None
    """Same seed, same prompt, same text, whatever is in the batch. None: the engine draws one."""
    stop_token_ids: tuple[int, ...] = ()
    """Generation ends after one of these; the token is not part of the text."""
    ignore_eos: bool = False
    """Do not end at the model's end tokens (stop_token_ids still end it)."""
    num_logprobs: int | None = None
    """None: no logprobs. 0: of the sampled token. n: also of the n most probable tokens."""
    grammar: Grammar | None = None
    """Tokens that it does not allow are not sampled; where it ends, only end tokens are."""


class Request(msgspec.Struct, frozen=True, omit_defaults=True):
    """One sequence to generate. `rid` is unique among live requests."""

    rid: str
    prompt: bytes
    """Token ids, at least one, as int32 of this machine: see `packed`."""
    sampling: SamplingParams
    priority: int = 0
    """Higher goes first."""
    key_name: str = ""
    """Of the API key it came with: keys take turns when requests wait."""
    request_id: str = ""
    """Of the HTTP request, under which it may be aborted besides its own."""
    answer_id: str = ""
    """Of the answer whose choices are several requests, which may be aborted together."""
    client_rid: str = ""
    """The rid that its client knows, where the engine has another."""
    number: int = 0
    """Its own among the live requests of its API process, below 2**32: short for the rid."""
    worker: int = 0
    """The API process that it came from, see `core/messages.py`."""
    page_names: tuple[bytes, ...] = ()
    """Of the prompt's full pages, see `engine/prefix.py`; the engine finds those that it lacks."""

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt) // TOKEN_BYTES

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The prompt's token ids one by one."""
        return tuple(array("i", self.prompt))

    @property
    def own_rid(self) -> str:
        """As its client knows it; no two that run have the same."""
        return self.client_rid or self.rid

    def is_named(self, rid: str) -> bool:
        """Does somebody who aborts this rid mean this request?"""
        return rid != "" and rid in (self.own_rid, self.request_id, self.answer_id)


class TokenLogprob(msgspec.Struct, frozen=True):
    """Log-probabilities (natural log, of the unmodified model distribution) at one position."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob) of the most probable tokens, best first."""


class Finish(msgspec.Struct, frozen=True):
    """Why a request ended."""

    reason: FinishReason
    matched_token: int | None = None
    """The end token that matched, for reason "stop"."""
    message: str = ""
    """For "error" and "abort": one sentence for the client."""


class RequestOutput(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one step added to one request. There are thousands a second: what is as ever is not
    sent."""

    rid: str
    token_ids: tuple[int, ...]
    """New tokens of this step, end token included."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One per new token when asked for, else empty."""
    finish: Finish | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache."""
    num_preemptions: int = 0
    queue_s: float = 0.0
    """With the first token: how long the request waited before it first ran."""
