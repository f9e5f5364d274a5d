"""What a comparison is going to send, and how long that will take.

It is said before anything is sent, again from the rate of the warm-up, and from then on as measured
runs show.
"""

from __future__ import annotations

from tetrad.bench.compare.options import BenchCompareConfig
from tetrad.bench.load.client import Client
from tetrad.bench.serve.plan import Plan, prepare
from tetrad.bench.serve.run import warm_round
from tetrad.bench.serve.watch import Watch

WARM_REQUESTS = 64
"""Of each server, whole ones, before what is counted: enough to meet what is slow once, and few
enough to have a rate soon."""


async def first_look(config: BenchCompareConfig, watch: Watch) -> dict[str, float]:
    """Say what will be sent, and warm both servers up as far as whole requests do. Returns by
    address how many seconds a run will take, where a warm-up tells. Raises what `bench_serve`
    raises."""
    run_s: dict[str, float] = {}
    for turn, url in enumerate((config.a, config.b)):
        asked = config.model_copy(update={"base_url": url})
        client = Client(asked.url, asked.headers, asked.request_timeout_sec)
        try:
            plan = await prepare(asked, client, watch, 2 * config.pairs + turn)
            if turn == 0:
                watch.say(sent(plan, config.pairs))
            if config.warmup_requests:
                watch.say(f"warm-up, not counted: {url}")
                rate = await warm_round(plan, client, WARM_REQUESTS)
                watch.say(f"warm-up: {rate:.2f} output tok/s")
                run_s[url] = at_rate(plan, rate)
        finally:
            await client.close()
    return run_s


def sent(plan: Plan, pairs: int) -> str:
    """All that is counted, in a line."""
    runs, prompts = 2 * pairs, len(plan.prompts)
    return (
        f"to send: {runs} runs, {pairs} to each server, of {prompts} prompts; {runs * prompts} "
        f"prompts and {runs * _output_tokens(plan)} output tokens in all"
    )


def at_rate(plan: Plan, tokens_per_s: float) -> float:
    """Seconds that a run will take; its last request cannot end before it is due."""
    return max(_output_tokens(plan) / max(tokens_per_s, 1e-3), *plan.due_s)


def _output_tokens(plan: Plan) -> int:
    return sum(prompt.output_tokens for prompt in plan.prompts)


def left(run_s: dict[str, float], urls: list[str]) -> str:
    """The time that runs of these servers will take, to end a line with; empty before a run of any
    is known."""
    if not run_s:
        return ""
    other_s = max(run_s.values())
    return f", about {in_words(sum(run_s.get(url, other_s) for url in urls))} left"


def in_words(seconds: float) -> str:
    """40 s, 12 min, 3 h 20 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
