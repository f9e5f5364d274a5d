"""The record of a run, and what its reader must know."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from tetrad import __version__
from tetrad.bench.figures import measure, series
from tetrad.bench.figures.goodput import goodput, parse_objectives
from tetrad.bench.figures.measure import Answer, TokenSource
from tetrad.bench.figures.selfcheck import check
from tetrad.bench.figures.window import further, steady
from tetrad.bench.load.processes import Outcome
from tetrad.bench.options.target import without_credentials
from tetrad.bench.serve.plan import Plan
from tetrad.bench.telemetry.run import Seen, telemetry
from tetrad.bench.workload.arrivals import in_words, offered_rate
from tetrad.bench.workload.datasets import FILES
from tetrad.core.records import BenchRun, RequestRecord, Workload
from tetrad.core.spread import Spread

DISAGREEMENT_SHARE = 0.02
RANDOM_DISAGREEMENT_SHARE = 0.5
"""Of output that continues random prompts. Its tokens need not be those that the tokenizer would
choose for the same text, and special ones among them have no text at all."""
LUMPY_SHARE = 0.005
"""Events that bring this much more or less than one token each are worth a word."""


def record(
    plan: Plan,
    load: Outcome,
    answers: Sequence[Answer],
    *,
    started_at: str,
    server_info: dict[str, Any] | None,
    seen: Seen | None = None,
) -> BenchRun:
    """All figures of a run."""
    config, stream = plan.config, not plan.config.disable_stream
    records = [answer.record for answer in answers]
    good = [r for r in records if r.failure is None]
    times = measure.latencies(good, stream=stream)
    run = BenchRun(
        tetrad_version=__version__,
        started_at=started_at,
        backend=config.backend,
        url=without_credentials(config.url),
        model=plan.model,
        server_info=server_info,
        workload=described(plan),
        asked=config.asked,
        duration_s=load.duration_s,
        completed=len(good),
        failed=len(records) - len(good),
        unfinished=len(plan.prompts) - len(records),
        interrupted=load.interrupted,
        failures=measure.count_failures((r.index, r.failure) for r in records),
        input_tokens=sum(r.prompt_tokens for r in good),
        output_tokens=sum(r.output_tokens for r in good),
        output_tokens_retokenized=retokenized(plan, good),
        output_tokens_of_failures=sum(r.output_tokens for r in records if r.failure is not None),
        cached_tokens=cached_tokens(good),
        token_source=source_of(answers),
        latencies=times,
        peak_output_tokens_per_s=measure.peak_tokens_per_s(good_stamps(answers))
        if stream
        else None,
        peak_concurrency=measure.peak_in_flight(records),
        concurrency=times.e2e_ms.mean * len(good) / 1e3 / load.duration_s,
        goodput=goodput(parse_objectives(config.goodput), records, load.duration_s)
        if config.goodput
        else None,
        further=further(answers, load.duration_s, stream=stream),
        steady=steady(answers) if stream else None,
        client=check(load, answers, has_cap=config.max_concurrency is not None, stream=stream),
        timeline=series.timeline(records, good_stamps(answers) if stream else (), load.duration_s),
        telemetry=telemetry(
            seen,
            origin=next((trace.origin for trace in load.traces), 0.0),
            duration_s=load.duration_s,
            output_tokens=sum(r.output_tokens for r in good),
            period_s=config.telemetry_period_sec,
        ),
        itl_histogram=series.histogram(
            [gap for r in good for gap in r.itls_ms], times.itl_ms or Spread()
        ),
        requests=records if config.keeps_requests else [],
    )
    return run.model_copy(update={"notes": list(notes(plan, run, answers))})


def described(plan: Plan) -> Workload:
    """The workload as it really was."""
    config = plan.config
    is_random = config.dataset_name.startswith("random")
    rate = offered_rate(config, plan.due_s)
    return Workload(
        dataset=config.dataset_name,
        num_prompts=len(plan.prompts),
        random_input_len=config.random_input_len if is_random else None,
        random_output_len=config.random_output_len if is_random else None,
        random_range_ratio=config.random_range_ratio if is_random else None,
        prompt_tokens=Spread.of([p.num_tokens for p in plan.prompts if p.num_tokens is not None]),
        wanted_tokens=Spread.of([p.output_tokens for p in plan.prompts]),
        seed=plan.seeds.shape,
        content_seed=plan.seeds.content,
        request_rate="inf" if math.isinf(rate) else rate,
        arrivals=in_words(config),
        max_concurrency=config.max_concurrency,
        stream=not config.disable_stream,
        ignore_eos=plan.ignore_eos,
    )


def good_stamps(answers: Sequence[Answer]) -> list[measure.Stamp]:
    """When the tokens of the successful requests came."""
    return [stamp for a in answers if a.record.failure is None for stamp in a.stamps]


def retokenized(plan: Plan, good: Sequence[RequestRecord]) -> int | None:
    """Tokens of the texts that came, by the client's tokenizer; None without one."""
    if plan.vocabulary is None:
        return None
    return sum(plan.vocabulary.count(r.text) for r in good)


def cached_tokens(good: Sequence[RequestRecord]) -> int | None:
    """Prompt tokens the server took from its cache, where it says."""
    said = [r.cached_tokens for r in good if r.cached_tokens is not None]
    return sum(said) if said else None


def source_of(answers: Sequence[Answer]) -> TokenSource:
    """The least trustworthy way in which tokens were counted."""
    sources = {answer.source for answer in answers}
    trust: tuple[TokenSource, ...] = ("events", "tokenizer", "server")
    return next((source for source in trust if source in sources), "server")


def notes(plan: Plan, run: BenchRun, answers: Sequence[Answer]) -> Iterator[str]:
    """What a reader must know before believing a figure."""
    if plan.config.disable_stream:
        yield (
            "TTFT, TPOT, ITL and peak throughput are left out: without streaming an answer has one "
            "time stamp."
        )
    if not plan.config.disable_ignore_eos and not plan.ignore_eos:
        yield (
            f"backend {run.backend} knows no ignore_eos, so answers may be shorter than asked and "
            "that is not counted as a failure; sglang-oai and vllm send it."
        )
    yield from _counting_notes(run, answers)
    yield from disagreement(run)


def disagreement(run: BenchRun) -> Iterator[str]:
    """Output tokens by the server against the tokenizer of the client, where they differ by more
    than the prompts explain."""
    again = run.output_tokens_retokenized
    if again is None or run.token_source != "server" or not run.output_tokens:
        return
    share = abs(again - run.output_tokens) / run.output_tokens
    is_random = run.workload.dataset not in FILES
    if share > (RANDOM_DISAGREEMENT_SHARE if is_random else DISAGREEMENT_SHARE):
        yield (
            f"the server counts {run.output_tokens} output tokens, the client's tokenizer {again} "
            f"for the same text, {share:.1%} apart; unless the output has special tokens, "
            "--tokenizer is not the server's or the server miscounts."
        )


def _counting_notes(run: BenchRun, answers: Sequence[Answer]) -> Iterator[str]:
    good = [answer for answer in answers if answer.record.failure is None]
    num_events = sum(len(a.stamps) for a in good if not a.counts_tokens)
    num_tokens = sum(a.record.output_tokens for a in good if not a.counts_tokens)
    is_lumpy = num_events > 0 and abs(num_tokens / num_events - 1) >= LUMPY_SHARE
    if run.latencies.itl_ms is not None and is_lumpy:
        yield (
            f"ITL is between events, which bring {num_tokens / num_events:.2f} tokens each on "
            "average."
        )
    if run.token_source != "server":
        how = "the client's tokenizer" if run.token_source == "tokenizer" else "one per event"
        yield f"the server reports no usage; output tokens are counted by {how}."
    both = [
        (a.sent_prompt_tokens, a.server_prompt_tokens)
        for a in good
        if a.sent_prompt_tokens is not None and a.server_prompt_tokens is not None
    ]
    sent, counted = sum(pair[0] for pair in both), sum(pair[1] for pair in both)
    if sent != counted:
        yield f"the server counts {counted} prompt tokens where {sent} were sent."
    if run.cached_tokens and run.input_tokens:
        share = run.cached_tokens / run.input_tokens
        yield f"{share:.1%} of the prompt tokens came from the server's prefix cache."
