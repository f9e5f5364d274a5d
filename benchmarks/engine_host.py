"""What the engine process's own Python takes of a step, by part, beside a model that takes nothing.

    python benchmarks/engine_host.py --running 64,512,2048

No GPU is needed: the scheduler, the inputs, the sampler's columns and the messages are the real
ones, the model and the ops of the sampler do nothing, and recorded steps are replayed by a
stand-in. Steps are overlapped as when serving, and messages go to four API processes. Microseconds,
the median over the steps; a processor that is busy with other work makes them longer.

Two loads: `long` answers, of which none ends, so that all steps are decodes and a page in 64 is
full; and `short` ones, prompts of 128 tokens and answers of 128, so that at 2048 some 16 requests
end in each step and 16 begin. Its `mixed` steps let prompts in, which run without a graph.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor

from tetrad.core.collector import calm_collector
from tetrad.core.limits import Limits
from tetrad.core.messages import AddRequests
from tetrad.core.request import Request, SamplingParams, packed
from tetrad.core.step import PAGE_TOKENS
from tetrad.engine.engine import Engine
from tetrad.engine.graphs import GraphPlan
from tetrad.engine.prefix import names_of
from tetrad.engine.runner import Runner
from tetrad.engine.scheduler import Scheduler
from tetrad.engine.shares import Shares
from tetrad.engine.wire import decode, encode
from tetrad.layers.batch import ForwardBatch

PROMPT, ANSWER, LONG = 128, 128, 3500
CONTEXT = 4096
VOCAB = 154_880
CPU = torch.device("cpu")
TOKENS = {"greedy": 0.0, "sampled": 0.7}
WORKERS = frozenset(range(4))
PARTS = ("schedule", "launch", "wait", "apply", "rest of the step", "messages", "arrivals")


class Ops:
    """The sampler's ops, which choose token 5 for all."""

    def finite_rows(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return logits, torch.ones(len(logits), dtype=torch.bool)

    def sample(self, logits: Tensor, *_columns: Any) -> Tensor:
        return torch.full((len(logits),), 5)


class Replayed:
    """Replays nothing."""

    def record(self, step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        return lambda: None, step()

    def free_bytes(self) -> int:
        return 1 << 40


class Clock:
    """Adds up how long the parts of one step take."""

    def __init__(self) -> None:
        self.spent_s: dict[str, float] = defaultdict(float)

    def watched(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began_at = time.perf_counter()
            try:
                return call(*args)
            finally:
                self.spent_s[part] += time.perf_counter() - began_at

        return timed


class Load:
    """An engine that runs `running` requests, a new one for each that ends."""

    def __init__(self, name: str, running: int, temperature: float) -> None:
        pages = running * (CONTEXT // 64)
        limits = Limits(pages, running, 8192, CONTEXT, VOCAB, (VOCAB - 1,))
        logits = torch.zeros(max(running, 1), 1)

        def model(batch: ForwardBatch, _cache: object) -> Tensor:
            return logits[: len(batch.logit_rows)]

        runner = Runner(model, None, Ops(), CPU)  # type: ignore[arg-type]
        plan = GraphPlan((running,), 2048, CONTEXT, scratch_page=pages)
        runner.record_graphs(plan, Replayed(), lambda _line: None)
        scheduler = Scheduler(limits, draw_seed=lambda n: n)
        self.engine = Engine(scheduler, runner)
        self.shares = Shares()
        self.clock = Clock()
        self.temperature = temperature
        self.num_asked = 0
        self.num_prompts = 0
        self._watch(scheduler, runner)
        for number in range(running):
            share = 1 + number * ANSWER // running
            self.take(self.asked(LONG if name == "long" else share, number % PAGE_TOKENS))

    def _watch(self, scheduler: Scheduler, runner: Runner) -> None:
        launch = self.clock.watched("launch", runner.launch)

        def launched(plan: Any, *masks: Any) -> Any:
            self.num_prompts += bool(plan.sequences)
            draws = launch(plan, *masks)
            draws.wait = self.clock.watched("wait", draws.wait)
            return draws

        runner.launch = launched  # type: ignore[method-assign]
        for name in ("schedule", "apply"):
            setattr(scheduler, name, self.clock.watched(name, getattr(scheduler, name)))

    def asked(self, num_tokens: int, num_more: int = 0) -> list[bytes]:
        """The message of a new request, its prompt so much longer."""
        number = self.num_asked = self.num_asked + 1
        prompt = packed((number * 31 + place * 7) % VOCAB for place in range(PROMPT + num_more))
        sampling = SamplingParams(num_tokens, temperature=self.temperature, top_p=0.9)
        worker = number % len(WORKERS)
        rid = f"{worker}.{number}.request"
        its = {"number": number, "worker": worker, "page_names": names_of(prompt)}
        return encode(AddRequests([Request(rid, prompt, sampling, **its)]))

    def take(self, frames: list[bytes]) -> None:
        message = decode(frames)
        assert isinstance(message, AddRequests)
        for request in message.requests:
            self.engine.add(request, is_checked=True)
            self.shares.begin(request)

    def step(self) -> tuple[str, dict[str, float]]:
        """One step: its kind, and seconds by part. New requests come between steps."""
        self.clock.spent_s.clear()
        self.num_prompts = 0
        began_at = time.perf_counter()
        gains = self.engine.step()
        stepped_at = time.perf_counter()
        stats = self.engine.stats()
        for gain in gains.steps:
            for _, message in self.shares.messages(gain, WORKERS, stats):
                encode(message)
        sent_at = time.perf_counter()
        spent = dict(self.clock.spent_s)
        spent["rest of the step"] = stepped_at - began_at - sum(spent.values())
        spent["messages"] = sent_at - stepped_at
        frames = [
            self.asked(ANSWER) for gain in gains.steps for output in gain.outputs if output.finish
        ]
        asked_at = time.perf_counter()
        for each in frames:
            self.take(each)
        spent["arrivals"] = time.perf_counter() - asked_at
        return "mixed" if self.num_prompts else "decode", spent


def measured(
    name: str, running: int, temperature: float, num_steps: int
) -> dict[str, dict[str, float]]:
    """Kind of step → part → median microseconds."""
    load = Load(name, running, temperature)
    for _ in range(ANSWER):
        load.step()
    steps: dict[str, list[dict[str, float]]] = {"mixed": [], "decode": []}
    for _ in range(num_steps):
        kind, spent = load.step()
        steps[kind].append(spent)
    return {
        kind: {
            "steps": len(each),
            **{part: 1e6 * statistics.median(s.get(part, 0.0) for s in each) for part in PARTS},
            "all": 1e6 * statistics.median(sum(s.values()) for s in each),
        }
        for kind, each in steps.items()
        if each
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--running", default="64,512,2048", help="running requests, several")
    parser.add_argument("--steps", type=int, default=256)
    args = parser.parse_args()
    torch.set_num_threads(1)
    calm_collector()
    head = ("running", "answers", "tokens", "step", "steps", *PARTS, "all")
    print(" | ".join(f"{name:>8}" for name in head))
    for running in map(int, args.running.split(",")):
        for name, (tokens, temperature) in product(("long", "short"), TOKENS.items()):
            for kind, row in measured(name, running, temperature, args.steps).items():
                figures = [f"{value:.0f}" for value in row.values()]
                cells = zip([str(running), name, tokens, kind, *figures], head, strict=True)
                print(" | ".join(f"{cell:>{max(8, len(at))}}" for cell, at in cells), flush=True)


if __name__ == "__main__":
    main()
    gc.unfreeze()  # else libraries report what was frozen as leaked when the process ends
