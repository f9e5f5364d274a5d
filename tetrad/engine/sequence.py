"""One request while it lives in the engine."""

from __future__ import annotations

import time
from array import array
from copy import copy
from dataclasses import dataclass, field

from tetrad.core.request import Request, SamplingParams
from tetrad.core.step import PAGE_TOKENS, SampleWork
from tetrad.engine.prefix import extend_names

NO_ROW = -1
NEVER = 1 << 60
SEED_MASK = (1 << 64) - 1
CLIP_TOKENS = 4096
"""Nobody is expected to generate more, whatever the limit: it may be the whole context."""
MIN_TEMPERATURE = 1e-5
"""Below this a request is greedy: dividing by less overflows float32."""
MIN_TOP_P = 1e-6
"""A smaller one keeps only the best token as well, but in float32 it may be 0, which keeps none."""

Numbers = memoryview | list[int]
KNOWN, TOTAL, COMPUTED = range(3)


def sampling_rules(params: SamplingParams) -> tuple[float, float, float, int]:
    """Temperature, 0 for greedy; top_p; min_p; top_k: as the op `sample` takes them."""
    temperature = params.temperature if params.temperature >= MIN_TEMPERATURE else 0.0
    return temperature, max(params.top_p, MIN_TOP_P), params.min_p, params.top_k


@dataclass(slots=True, eq=False)
class Sequence:
    """Known tokens are prompt and output; computed tokens are those whose keys are in the cache.
    Pending ones planned steps sample and the host does not know yet; they follow the known ones.

    While it runs, its counts and its newest tokens are views of its row in `rows.py`, where steps
    change them for all sequences at once.
    """

    request: Request
    seed: int
    arrival: int
    """Place in the order of arrival."""
    end_ids: frozenset[int]
    """Tokens that end it: the model's end tokens unless ignored, and its own stop tokens."""
    place: tuple[int, int, int] = (0, 0, 0)
    """Place in the order of service, see `line.py`; lower goes first."""
    added_at: float = field(default_factory=time.monotonic)
    queue_s: float | None = None
    """How long it waited before it first ran; None before."""
    row: int = NO_ROW
    """In `rows.py` while it runs."""
    counts: Numbers = field(init=False)
    """[3]: known tokens, these and pending ones, and computed ones, those of planned steps, too."""
    pages: tuple[int, ...] = ()
    page_names: list[bytes] = field(init=False)
    """Of its first full pages, as far as they came with its request or were needed."""
    num_kept: int = 0
    """Pages offered to the prefix cache, or taken from it."""
    num_shared: int = 0
    """Pages taken from the prefix cache when it was admitted."""
    num_cached_prompt: int | None = None
    """Prompt tokens taken from the prefix cache when it first ran; None before."""
    num_preemptions: int = 0
    num_retries: int = 0
    """How often it began anew since its logits were not finite."""
    needs_history: bool = field(init=False)
    plain_from: int = field(init=False)
    """With so many known and pending tokens and more there is nothing to say of its next one but
    what `Decodes` says; NEVER if there always is."""
    num_prompt: int = field(init=False)
    most_tokens: int = field(init=False)
    """Prompt and output at its limit."""
    asked: int = field(init=False)
    """Tokens it may generate, clipped; 0 if it ends at its limit only."""
    _listed: array[int] = field(init=False)
    """int32: known tokens as far as somebody has asked."""
    _recent: memoryview | None = None
    """[PAGE_TOKENS] that of its row, with all known tokens that are not listed."""

    def __post_init__(self) -> None:
        sampling = self.request.sampling
        self._listed = array("i", self.request.prompt)
        self.page_names = [*self.request.page_names]
        self.num_prompt = len(self._listed)
        self.counts = [self.num_prompt, self.num_prompt, 0]
        self.most_tokens = self.num_prompt + sampling.max_new_tokens
        self.asked = min(sampling.max_new_tokens, CLIP_TOKENS) if self.end_ids else 0
        self.needs_history = (
            sampling.repetition_penalty != 1.0
            or sampling.presence_penalty != 0.0
            or sampling.frequency_penalty != 0.0
        )
        is_special = self.needs_history or sampling.logit_bias or sampling.grammar
        early = sampling.min_new_tokens if self.end_ids else 0
        is_plain = not is_special and sampling.num_logprobs is None
        self.plain_from = self.num_prompt + early if is_plain else NEVER

    @property
    def rid(self) -> str:
        """Of its request."""
        return self.request.rid

    @property
    def token_ids(self) -> array[int]:
        """Known tokens; of one that has ended those that somebody has asked for before."""
        self.list_tokens()
        return self._listed

    def list_tokens(self) -> None:
        """Before its row, which has room for a page of them, keeps newer ones in their place."""
        listed, recent = self._listed, self._recent
        num_new = self.counts[KNOWN] - len(listed)
        if num_new and recent is not None:
            assert num_new <= PAGE_TOKENS
            first = len(listed) % PAGE_TOKENS
            beyond = first + num_new - PAGE_TOKENS
            listed.frombytes(recent[first : first + num_new].tobytes())
            if beyond > 0:
                listed.frombytes(recent[:beyond].tobytes())

    def names(self, num_pages: int) -> list[bytes]:
        """Of its first full pages, at least so many of them."""
        if len(self.page_names) < num_pages:
            extend_names(self.page_names, self.token_ids, num_pages * PAGE_TOKENS)
        return self.page_names

    @property
    def num_known(self) -> int:
        return self.counts[KNOWN]

    @property
    def num_pending(self) -> int:
        return self.counts[TOTAL] - self.counts[KNOWN]

    @property
    def num_computed(self) -> int:
        return self.counts[COMPUTED]

    @property
    def num_generated(self) -> int:
        return self.num_known - self.num_prompt

    @property
    def num_total(self) -> int:
        """Known tokens and pending ones."""
        return self.counts[TOTAL]

    def add_token(self, token_id: int) -> None:
        """One that was pending is known."""
        known = self.token_ids
        known.append(token_id)
        self.counts[KNOWN] = len(known)
        if self._recent is not None:
            self._recent[(len(known) - 1) % PAGE_TOKENS] = token_id

    def drop_token(self) -> None:
        """One that was pending will never be known."""
        self.counts[TOTAL] -= 1

    def compute(self, num_tokens: int) -> None:
        """Planned steps compute it so far."""
        self.counts[COMPUTED] = num_tokens

    def settle(self, counts: memoryview, recent: memoryview) -> None:
        """Keep counts and newest tokens there, where the former are already."""
        self.counts, self._recent = counts, recent
        recent[(len(self._listed) - 1) % PAGE_TOKENS] = self._listed[-1]

    def set_back(self) -> None:
        """It is about to give up its row, and will begin anew with the tokens it has."""
        self._listed = self.token_ids
        self.compute(0)

    def unsettle(self) -> None:
        """Give up its row."""
        self.counts, self._recent, self.row = [*self.counts], None, NO_ROW
        self.pages = ()

    def expect(self) -> SampleWork:
        """One more is pending: what the sampler needs for it."""
        sampling, total = self.request.sampling, self.num_total
        assert not (self.needs_history and total > self.num_known), "penalties need every token"
        num_generated = total - self.num_prompt
        is_early = num_generated < sampling.min_new_tokens
        self.counts[TOTAL] = total + 1
        return SampleWork(
            params=sampling,
            seed=self.seed,
            num_generated=num_generated,
            history_ids=tuple(self.token_ids) if self.needs_history else (),
            num_prompt=self.num_prompt,
            banned_ids=tuple(sorted(self.end_ids)) if is_early else (),
        )

    def renewed(self) -> Sequence:
        """Of one that waits: another with the same known tokens and no part in steps in flight."""
        assert self.row == NO_ROW
        other = copy(self)
        other._listed = self._listed[:]
        other.counts = [self.num_known, self.num_known, 0]
        other.num_kept = 0
        other.num_retries += 1
        return other
