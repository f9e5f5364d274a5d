"""One stream: what the engine gives one request, as what a reader of its text gets.

    RequestOutput → characters → stop strings → reasoning → tool calls → Delta

Each stage holds back only what it cannot decide yet. A session does no input or output and knows
no clock: streaming sends its deltas, not streaming joins them, so both give the same answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from msgspec.structs import replace

from tetrad.core.errors import TetradError
from tetrad.core.request import Finish, RequestOutput, TokenLogprob
from tetrad.server.parsers.reasoning import Piece, ReasoningParser
from tetrad.server.parsers.tools.events import Event, ToolDelta, ToolParser
from tetrad.server.text.logprobs import TokenEntry
from tetrad.server.text.stops import StopMatcher
from tetrad.server.text.tokenizer import Detokenizer, Tokenizer

WHY_ABORTED = "The server's operator ended this request."


class GenerationError(TetradError):
    """The engine gave up on one request; the text is its sentence."""


@dataclass(frozen=True, slots=True)
class ChoiceFinish:
    """Why a choice ended, in OpenAI's words."""

    reason: Literal["stop", "length", "tool_calls", "abort"]
    matched: int | str | None = None
    """The end token or stop string that matched."""


@dataclass(slots=True)
class Delta:
    """What one engine step adds to one choice."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolDelta] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    """The new tokens themselves, end token and tokens of a stop string included."""
    logprobs: Sequence[TokenLogprob] = ()
    """Of each of `token_ids`, if asked for."""
    entries: list[TokenEntry] = field(default_factory=list)
    """Log-probabilities whose text is certain, for readers of text."""
    finish: ChoiceFinish | None = None

    @property
    def is_visible(self) -> bool:
        """Whether there is anything to send to a reader of text."""
        return bool(
            self.content or self.reasoning or self.tool_calls or self.entries or self.finish
        )

    @property
    def is_plain(self) -> bool:
        """Whether content or reasoning, but not both, is all there is to send."""
        return bool(self.content) != bool(self.reasoning) and not (
            self.tool_calls or self.entries or self.finish
        )


class AnswerReader:
    """Sorts text into reasoning, content and tool calls; either parser may be absent."""

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolParser | None) -> None:
        self._reasoning = reasoning
        self._tools = tools

    @property
    def is_reasoning(self) -> bool:
        """Whether the text read so far ends within the reasoning."""
        return self._reasoning is not None and self._reasoning.inside

    @property
    def num_calls(self) -> int:
        return self._tools.num_calls if self._tools is not None else 0

    def feed(self, text: str, delta: Delta) -> None:
        """Add what `text` makes certain to `delta`."""
        if self._reasoning is None:
            self._content(text, delta)
        else:
            self._pieces(self._reasoning.feed(text), delta)

    def finish(self, delta: Delta) -> None:
        """The text ended: add what was held back."""
        if self._reasoning is not None:
            self._pieces(self._reasoning.finish(), delta)
        if self._tools is not None:
            self._events(self._tools.finish(), delta)

    def _pieces(self, pieces: Sequence[Piece], delta: Delta) -> None:
        for kind, text in pieces:
            if kind == "reasoning":
                delta.reasoning += text
            else:
                self._content(text, delta)

    def _content(self, text: str, delta: Delta) -> None:
        if self._tools is None:
            delta.content += text
        else:
            self._events(self._tools.feed(text), delta)

    @staticmethod
    def _events(events: Sequence[Event], delta: Delta) -> None:
        for event in events:
            if isinstance(event, str):
                delta.content += event
            else:
                delta.tool_calls.append(event)


class Session:
    """State of one choice. Feed every RequestOutput; the last Delta has `finish`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stops: Sequence[str] = (),
        keep_stop: bool = False,
        min_new_tokens: int = 0,
        hidden_ids: frozenset[int] = frozenset(),
        reasoning: ReasoningParser | None = None,
        tools: ToolParser | None = None,
        is_mute: bool = False,
    ) -> None:
        """Without `reasoning` and `tools` everything is content. Stop strings are looked for once
        `min_new_tokens` tokens were generated; with `keep_stop` the one found stays in the text.
        Tokens in `hidden_ids` leave no text. If it `is_mute`, the one token is passed over that an
        engine computes at least."""
        self._detokenizer = Detokenizer(tokenizer, hidden_ids)
        self._stops = StopMatcher(stops, keep=keep_stop)
        self._min_new_tokens = min_new_tokens
        self._answer = AnswerReader(reasoning, tools)
        self.is_plain = not stops and reasoning is None and tools is None
        """Whether `plain_text` may stand for `feed_token`."""
        self._is_mute = is_mute
        self._waiting: list[TokenEntry] = []
        self._num_characters = 0
        self._num_released = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.completion_tokens = 0
        """Generated tokens, end token included."""
        self.reasoning_tokens = 0
        self.num_preemptions = 0

    def feed(self, output: RequestOutput) -> Delta:
        """Take one step's tokens. Raises GenerationError when it has failed."""
        self.prompt_tokens = output.prompt_tokens
        self.cached_tokens = output.cached_tokens
        self.num_preemptions = output.num_preemptions
        if self._is_mute:
            output = _without_token(output)
        delta = Delta()
        self._take(output, delta)
        delta.logprobs = output.logprobs[: len(delta.token_ids)]
        return delta

    def feed_token(self, token_id: int) -> Delta:
        """Take one token of which nothing else is new."""
        delta = Delta()
        self._token(token_id, delta)
        if self._stops.matched is not None:
            self._close(delta, "stop", self._stops.matched)
        else:
            self._report(delta)
        return delta

    def plain_text(self, token_id: int) -> str:
        """The content that `feed_token` would give, where it can give nothing else."""
        self.completion_tokens += 1
        text = self._detokenizer.feed(token_id)
        self._num_characters += len(text)
        self._num_released += len(text)
        return text

    def _take(self, output: RequestOutput, delta: Delta) -> None:
        for position, token_id in enumerate(_text_tokens(output)):
            if output.logprobs:
                self._waiting.append(TokenEntry(output.logprobs[position], self._num_characters))
            self._token(token_id, delta)
            if self._stops.matched is not None:
                self._close(delta, "stop", self._stops.matched)
                return
        if output.finish is not None:
            self._finished(output.finish, delta)
        else:
            self._report(delta)

    def _token(self, token_id: int, delta: Delta) -> None:
        self.completion_tokens += 1
        self.reasoning_tokens += self._answer.is_reasoning
        delta.token_ids.append(token_id)
        text = self._detokenizer.feed(token_id)
        self._num_characters += len(text)
        if self.completion_tokens > self._min_new_tokens:
            text = self._stops.feed(text)
        self._read(text, delta)

    def _read(self, text: str, delta: Delta) -> None:
        if text:
            self._num_released += len(text)
            self._answer.feed(text, delta)

    def _finished(self, finish: Finish, delta: Delta) -> None:
        if finish.matched_token is not None:
            self.completion_tokens += 1
            delta.token_ids.append(finish.matched_token)
        text = self._detokenizer.flush()
        self._num_characters += len(text)
        self._read(self._stops.feed(text), delta)
        self._read(self._stops.flush(), delta)
        assert finish.reason != "error"
        self._close(delta, finish.reason, finish.matched_token)

    def _close(
        self, delta: Delta, reason: Literal["stop", "length", "abort"], matched: int | str | None
    ) -> None:
        self._answer.finish(delta)
        self._report(delta)
        called = reason == "stop" and self._answer.num_calls > 0
        delta.finish = ChoiceFinish("tool_calls" if called else reason, matched)

    def _report(self, delta: Delta) -> None:
        """Hand out the log-probabilities of released text; those of a stop string never are."""
        if not self._waiting:
            return
        end = self._num_released
        if end == self._num_characters:
            delta.entries, self._waiting = self._waiting, []
        else:
            delta.entries = [entry for entry in self._waiting if entry.text_offset < end]
            self._waiting = self._waiting[len(delta.entries) :]


def _without_token(output: RequestOutput) -> RequestOutput:
    finish = output.finish
    if finish is not None and finish.reason in ("stop", "length"):
        finish = Finish("length")
    return replace(output, token_ids=(), logprobs=(), finish=finish)


def _text_tokens(output: RequestOutput) -> Sequence[int]:
    """New tokens without the end token; failures are raised here."""
    finish = output.finish
    if finish is None:
        return output.token_ids
    if finish.reason == "error":
        raise GenerationError(finish.message or "The engine failed on this request.")
    return output.token_ids[:-1] if finish.matched_token is not None else output.token_ids
