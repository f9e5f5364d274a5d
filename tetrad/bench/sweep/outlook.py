"""How long a sweep will take, from a warm-up's rate and from then on as measured points show.

Between concurrencies throughput is taken to grow with the root of their ratio: less than requests
that run side by side for nothing, more than a server that is full.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tetrad.bench.compare.outlook import WARM_REQUESTS, in_words
from tetrad.bench.load.client import Client
from tetrad.bench.options.serve import BenchServeConfig
from tetrad.bench.serve.plan import prepare
from tetrad.bench.serve.run import warm_round
from tetrad.bench.serve.watch import Watch
from tetrad.bench.sweep.run import Todo
from tetrad.bench.workload.datasets import num_random
from tetrad.bench.workload.requests import random_lengths
from tetrad.core.errors import BenchFailure
from tetrad.core.records import BenchRun


@dataclass(frozen=True, slots=True)
class Pace:
    """A load that was seen: how much it sends, and how fast it went."""

    prompts: int
    output_tokens: int
    in_flight: int
    tokens_per_s: float

    @classmethod
    def of(cls, run: BenchRun) -> Pace | None:
        """None where nothing came."""
        sent = run.workload
        tokens = round(sent.wanted_tokens.mean * sent.num_prompts)
        in_flight = min(sent.max_concurrency or sent.num_prompts, sent.num_prompts)
        rate = run.output_throughput
        return cls(sent.num_prompts, tokens, in_flight, rate) if rate > 0 else None

    def seconds(self, config: BenchServeConfig) -> float:
        """Of another point of the same sweep; its last request cannot end before it is due."""
        prompts, tokens = self.prompts, self.output_tokens
        if config.dataset_name.startswith("random"):
            prompts = num_random(config)
            tokens = sum(output for _, output in random_lengths(config, prompts, 0))
        in_flight = min(config.max_concurrency or prompts, prompts)
        rate = self.tokens_per_s * math.sqrt(in_flight / self.in_flight)
        return max(tokens / rate, prompts / config.request_rate)


async def first_look(todo: Sequence[Todo], watch: Watch) -> Pace | None:
    """The pace of a warm-up of whole requests like the first point's; None without a warm-up, for
    a single point, and where no request succeeds, which the points will tell."""
    asked = todo[0].config if len(todo) > 1 else None
    if asked is None or not asked.warmup_requests:
        return None
    client = Client(asked.url, asked.headers, asked.request_timeout_sec)
    try:
        plan = await prepare(asked, client, watch, setting="outlook")
        watch.say("warm-up, not counted")
        rate = await warm_round(plan, client, WARM_REQUESTS)
    except BenchFailure:
        return None
    finally:
        await client.close()
    number = len(plan.prompts)
    tokens = sum(prompt.output_tokens for prompt in plan.prompts)
    in_flight = min(asked.max_concurrency or number, number, WARM_REQUESTS)
    return Pace(number, tokens, in_flight, rate) if rate > 0 else None


def left(pace: Pace | None, last: BenchRun | None, todo: Sequence[Todo]) -> str:
    """The time that points will take at the pace of the `last` run, else at the one before it, to
    end a line with; empty where there is none."""
    pace = (Pace.of(last) if last is not None else None) or pace
    if pace is None:
        return ""
    return f", about {in_words(sum(pace.seconds(each.config) for each in todo))} left"
