"""From answers to figures: every number of the result block is defined here, once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from tetrad.bench.load.backends import Reading
from tetrad.bench.load.wire import Trace
from tetrad.bench.workload.requests import Prompt
from tetrad.core.records import Failure, FailureCount, Latencies, RequestRecord
from tetrad.core.spread import Spread

TokenSource = Literal["server", "tokenizer", "events"]
CountTokens = Callable[[str], int]
Stamp = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Answer:
    """One finished request: its record, and when its tokens came."""

    record: RequestRecord
    stamps: tuple[Stamp, ...]
    """(seconds since the start of the run, tokens), ascending; the tokens add up to the output."""
    counts_tokens: bool
    """The server says how many tokens each event brings."""
    source: TokenSource
    sent_prompt_tokens: int | None
    server_prompt_tokens: int | None


def answer(
    trace: Trace,
    reading: Reading,
    prompt: Prompt,
    failure: Failure | None,
    count: CountTokens | None,
    *,
    stream: bool,
) -> Answer:
    """Turn what was read into a record. `count` counts tokens where the server does not."""
    output_tokens, source = _output_tokens(reading, count)
    last_s = reading.stamps[-1][0] if reading.stamps else trace.ended_s
    first_s = reading.stamps[0][0] if reading.stamps and stream else None
    e2e_ms = (last_s - trace.sent_s) * 1e3
    ttft_ms = None if first_s is None else (first_s - trace.sent_s) * 1e3
    tpot_ms = None
    if ttft_ms is not None and output_tokens > 1:
        tpot_ms = (e2e_ms - ttft_ms) / (output_tokens - 1)
    record = RequestRecord(
        index=trace.index,
        prompt_tokens=_first_known(reading.prompt_tokens, prompt.num_tokens),
        output_tokens=output_tokens,
        due_s=trace.due_s,
        sent_s=trace.sent_s,
        ended_s=last_s if failure is None else trace.ended_s,
        ttft_ms=ttft_ms,
        tpot_ms=tpot_ms,
        # One gap for each token: not for a failure, which may claim any number of them.
        itls_ms=inter_token_ms(reading.stamps) if stream and failure is None else [],
        ttat_ms=(reading.answer_s - trace.sent_s) * 1e3
        if stream and reading.answer_s is not None
        else None,
        cached_tokens=reading.cached_tokens,
        text=reading.text,
        failure=failure,
    )
    return Answer(
        record=record,
        stamps=_weighted(reading.stamps, output_tokens),
        counts_tokens=reading.counts_tokens,
        source=source,
        sent_prompt_tokens=prompt.num_tokens,
        server_prompt_tokens=reading.prompt_tokens,
    )


def _output_tokens(reading: Reading, count: CountTokens | None) -> tuple[int, TokenSource]:
    if reading.output_tokens is not None:
        return reading.output_tokens, "server"
    if count is not None:
        return count(reading.text), "tokenizer"
    return sum(tokens for _, tokens in reading.stamps), "events"


def _first_known(*counts: int | None) -> int:
    return next((count for count in counts if count is not None), 0)


def _weighted(stamps: Sequence[tuple[float, int]], output_tokens: int) -> tuple[Stamp, ...]:
    """Share the output evenly over events where the server does not say what each brought."""
    total = sum(tokens for _, tokens in stamps)
    share = output_tokens / total if total else 0.0
    return tuple((time_s, tokens * share) for time_s, tokens in stamps)


def inter_token_ms(stamps: Sequence[tuple[float, int]]) -> list[float]:
    """The gap before each event, once for every token it brought and divided by their number."""
    gaps: list[float] = []
    for (before_s, _), (now_s, tokens) in pairwise(stamps):
        gaps += [(now_s - before_s) * 1e3 / tokens] * tokens
    return gaps


def latencies(good: Sequence[RequestRecord], *, stream: bool) -> Latencies:
    """Summaries over the successful requests."""
    e2e = [(r.ended_s - r.sent_s) * 1e3 for r in good]
    queue = Spread.of([(r.sent_s - r.due_s) * 1e3 for r in good])
    if not stream:
        return Latencies(e2e_ms=Spread.of(e2e), queue_ms=queue)
    return Latencies(
        e2e_ms=Spread.of(e2e),
        ttft_ms=Spread.of([r.ttft_ms for r in good if r.ttft_ms is not None]),
        tpot_ms=Spread.of([r.tpot_ms for r in good if r.tpot_ms is not None]),
        itl_ms=Spread.of([gap for r in good for gap in r.itls_ms]),
        queue_ms=queue,
    )


def peak_tokens_per_s(stamps: Sequence[Stamp]) -> float:
    """Most tokens that came in one of the run's seconds [0, 1), [1, 2), ..."""
    buckets: Counter[int] = Counter()
    for time_s, tokens in stamps:
        buckets[int(time_s)] += tokens  # type: ignore[assignment]  # a Counter adds floats as well
    return max(buckets.values(), default=0.0)


def peak_in_flight(records: Sequence[RequestRecord]) -> int:
    """Most requests under way at one instant; one that ends as another begins is not both."""
    changes = [(r.sent_s, 1) for r in records] + [(r.ended_s, -1) for r in records]
    most = now = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most


def count_failures(outcomes: Iterable[tuple[int, Failure | None]]) -> list[FailureCount]:
    """Each kind of failure with its number and first example, most frequent first. `outcomes` are
    (index of the request, its failure)."""
    examples: dict[str, FailureCount] = {}
    for index, failure in outcomes:
        if failure is not None:
            known = examples.get(failure.kind)
            examples[failure.kind] = FailureCount(
                kind=failure.kind,
                count=1 if known is None else known.count + 1,
                example=failure.message if known is None else known.example,
                example_request=index if known is None else known.example_request,
            )
    return sorted(examples.values(), key=lambda count: -count.count)
