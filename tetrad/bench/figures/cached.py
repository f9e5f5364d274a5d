"""Whether runs whose prompts should have been new found them in the server's prefix cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tetrad.bench.workload.datasets import FILES
from tetrad.core.records import BenchRun

MUCH = 0.05
"""Share of the prompt tokens. Below it are beginnings that chat templates give all prompts."""


def note(runs: Iterable[tuple[str, BenchRun]]) -> Iterator[str]:
    """A line where named runs measured the cache; none for datasets that share beginnings on
    purpose."""
    named = list(runs)
    shares = {name: share(run) for name, run in named if share(run) > MUCH}
    datasets = {run.workload.dataset for _, run in named}
    if not shares or datasets & {"generated-shared-prefix", "mooncake"}:
        return
    most = max(shares, key=lambda name: shares[name])
    cure = "--cache-bust begins each differently" if datasets & {*FILES} else "leave --seed out"
    yield (
        f"{len(shares)} of {len(named)} runs found their prompts in the server's prefix cache, "
        f"{most} {shares[most]:.1%} of the tokens: they are faster than with new prompts; "
        f"--flush-cache empties it before each run, or {cure}."
    )


def share(run: BenchRun) -> float:
    """Of the prompt tokens: as the answers tell, else as the server's totals do; 0 if none does."""
    seen = None if run.telemetry is None else run.telemetry.server
    if run.cached_tokens is None and seen is not None:
        return seen.cache_hit_share or 0.0
    return run.cache_hit_share
