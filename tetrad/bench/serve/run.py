"""One run of the load generator, from the first look at the server to the record."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import json
from collections.abc import Callable

from tetrad.bench.figures import measure
from tetrad.bench.figures.measure import Answer, CountTokens
from tetrad.bench.load import target
from tetrad.bench.load.backends import Reading, protocol, write_body
from tetrad.bench.load.client import Client, Load
from tetrad.bench.load.judge import verdict
from tetrad.bench.load.processes import Job, Outcome, perform
from tetrad.bench.load.wire import Trace
from tetrad.bench.options.serve import BenchServeConfig
from tetrad.bench.serve.plan import Plan, prepare
from tetrad.bench.serve.summary import record
from tetrad.bench.serve.watch import Watch
from tetrad.bench.telemetry.run import sampling
from tetrad.bench.workload import datasets
from tetrad.bench.workload.requests import Prompt
from tetrad.core.errors import BenchFailure
from tetrad.core.records import BenchRun

WARM_ROUNDS = 10
STEADY_CHANGE = 0.05
WARM_SEED = 1_000_003
"""Apart from the seeds of repetitions, so that no round has the prompts of a measured run."""


async def bench_repeats(config: BenchServeConfig, watch: Watch) -> list[BenchRun]:
    """Measure the server `config.repeat` times, with fresh prompts each; fewer after an interrupt.
    Raises what `bench_serve` raises."""
    runs: list[BenchRun] = []
    for repetition in range(config.repeat):
        if config.repeat > 1:
            watch.say(f"run {repetition + 1} of {config.repeat}")
        runs.append(await bench_serve(config, watch, repetition))
        if runs[-1].interrupted:
            break
    return runs


async def bench_serve(
    config: BenchServeConfig, watch: Watch, repetition: int = 0, setting: str = ""
) -> BenchRun:
    """Measure the server once, with prompts that no other `repetition` and no other `setting` of a
    sweep has. Cancelling the task ends the load and returns what was measured so
    far.

    Raises BenchFailure when no server answers or no warm-up request succeeds, ConfigError when the
    workload cannot be sent, CancelledError when it is cancelled before the measured load.
    """
    client = Client(config.url, config.headers, config.request_timeout_sec)
    try:
        plan = await prepare(config, client, watch, repetition, setting)
        await warm_up(plan, client, watch)
        if config.warmup_until_steady and repetition == 0:
            await warm_until_steady(plan, client, watch)
        if config.flush_cache:
            await target.flush_cache(client, config.flush_cache_timeout)
            watch.say("prefix cache flushed")
        return await measured(plan, client, watch)
    finally:
        await client.close()


async def warm_up(plan: Plan, client: Client, watch: Watch) -> None:
    """Short requests like the measured ones."""
    config = plan.config
    if config.warmup_requests:
        requests = (
            "1 request" if config.warmup_requests == 1 else f"{config.warmup_requests} requests"
        )
        watch.say_once(f"warm-up: {requests}")
        prompts = datasets.warmup(config, plan.prompts, plan.seeds, plan.vocabulary)
        await _warm_requests(plan, client, prompts)


async def warm_until_steady(plan: Plan, client: Client, watch: Watch) -> None:
    """Rounds of whole requests at the run's concurrency until their throughput stands still."""
    before = 0.0
    for round_number in range(1, WARM_ROUNDS + 1):
        rate = await warm_round(plan, client, len(plan.prompts), round_number)
        watch.say(f"warm-up round {round_number}: {rate:.2f} output tok/s")
        if abs(rate - before) < STEADY_CHANGE * before:
            return
        before = rate
    watch.say(f"warm-up: not steady after {WARM_ROUNDS} rounds")


async def warm_round(plan: Plan, client: Client, most: int, round_number: int = 1) -> float:
    """As many requests as run at once, `most` at most, each as long as one of the run's; their
    output tokens per second."""
    number = min(plan.config.max_concurrency or most, most, len(plan.prompts))
    config = plan.config.model_copy(update={"warmup_requests": number})
    seeds = dataclasses.replace(plan.seeds, content=plan.seeds.content + WARM_SEED * round_number)
    drawn = datasets.warmup(config, plan.prompts, seeds, plan.vocabulary)
    whole = [
        dataclasses.replace(prompt, output_tokens=like.output_tokens)
        for prompt, like in zip(drawn, plan.prompts, strict=False)
    ]
    return await _warm_requests(plan, client, whole)


async def _warm_requests(plan: Plan, client: Client, prompts: list[Prompt]) -> float:
    """Output tokens per second of them."""
    bodies = [write_body(plan.config, plan.model, prompt) for prompt in prompts]
    due_s = [0.0] * len(prompts)
    warm_plan = dataclasses.replace(plan, prompts=prompts, bodies=bodies, due_s=due_s)
    load, answers = await loaded(warm_plan, client, lambda _: None)
    if load.interrupted:
        raise asyncio.CancelledError
    failures = measure.count_failures((a.record.index, a.record.failure) for a in answers)
    if sum(failure.count for failure in failures) == len(prompts):
        raise BenchFailure(
            f"No warm-up request succeeded ({failures[0].kind}): {failures[0].example}"
        )
    return sum(answer.record.output_tokens for answer in answers) / load.duration_s


async def measured(plan: Plan, client: Client, watch: Watch) -> BenchRun:
    """The run itself."""
    started_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    async with sampling(plan.config, client.headers) as sampler:
        watch.begin(len(plan.prompts))
        try:
            load, answers = await loaded(plan, client, watch.finished)
        finally:
            watch.end()
        seen = None if sampler is None else await sampler.seen()
    info = None if load.interrupted else await target.server_info(client)
    return record(plan, load, answers, started_at=started_at, server_info=info, seen=seen)


async def loaded(
    plan: Plan, client: Client, on_finished: Callable[[bool], None]
) -> tuple[Outcome, list[Answer]]:
    """Send the plan's bodies; every request that finished is judged."""
    config = plan.config
    load = Load(
        path=protocol(config.backend).path,
        bodies=[json.dumps(body).encode() for body in plan.bodies],
        due_s=plan.due_s,
        after=[prompt.after for prompt in plan.prompts],
        max_concurrency=config.max_concurrency,
        most_tokens=max(plan.most_tokens(index) for index in range(len(plan.bodies))),
    )
    stream = not config.disable_stream
    job = Job(client.url, client.headers, client.timeout_s, config.backend, stream, load)
    outcome = await perform(job, config.workers, on_finished)
    count = plan.vocabulary.count if plan.vocabulary is not None else None
    return outcome, [
        judged(plan, trace, outcome.readings[trace.index], count)
        for trace in outcome.traces
        if trace.is_finished
    ]


def judged(plan: Plan, trace: Trace, reading: Reading, count: CountTokens | None) -> Answer:
    """The verdict on one answer, and its figures."""
    stream = not plan.config.disable_stream
    prompt = plan.prompts[trace.index]
    failure = verdict(
        reading,
        wanted=prompt.output_tokens,
        most=plan.most_tokens(trace.index),
        ignore_eos=plan.ignore_eos,
        stream=stream,
    )
    return measure.answer(trace, reading, prompt, failure, count, stream=stream)
