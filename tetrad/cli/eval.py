"""`tetrad eval`: exact match on held-out problems."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tetrad.cli.child import server
from tetrad.cli.flags import verb
from tetrad.cli.narrator import Narrator
from tetrad.cli.options import EvalConfig
from tetrad.core.errors import BenchFailure

if TYPE_CHECKING:
    from tetrad.core.eval_records import EvalRun


def _evaluate(config: EvalConfig) -> int:
    """Ask, mark, print. Too few right answers or answers at all are a BenchFailure."""
    from tetrad.bench.eval.run import Exam, evaluate

    exam = Exam(
        kinds=config.kinds,
        num_problems=config.num_problems,
        seed=config.seed,
        max_tokens=config.max_tokens,
        max_concurrency=config.max_concurrency,
    )
    headers = {} if config.api_key is None else {"Authorization": f"Bearer {config.api_key}"}
    narrator = Narrator(show_bar=True)
    with server(config, narrator) as url:
        narrator.begin(len(exam.kinds) * exam.num_problems)
        try:
            run = asyncio.run(
                evaluate(
                    url,
                    headers,
                    exam,
                    lambda t: narrator.finished(t.failure is not None),
                    narrator.say,
                )
            )
        finally:
            narrator.end()
    if config.json_:
        print(run.model_dump_json(indent=2))
    else:
        _print(run)
    _judge(run, config.min_accuracy)
    return 0


def _judge(run: EvalRun, min_accuracy: float) -> None:
    """Raise BenchFailure when the mark says little of the model, or what it says is bad."""
    if num_failed := sum(failure.count for failure in run.failures):
        raise BenchFailure(
            f"{num_failed} of {run.overall.total} requests got no answer and count as wrong, so "
            "the accuracy says little about the model."
        )
    if run.overall.accuracy < min_accuracy:
        raise BenchFailure(
            f"{run.overall.accuracy:.1%} of the answers are right, fewer than the "
            f"{min_accuracy:.1%} of --min-accuracy."
        )
    if not run.overall.correct:
        raise BenchFailure("No answer is right; --min-accuracy sets another threshold.")


def _print(run: EvalRun) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"Exact match, model {run.model}, seed {run.seed}", title_justify="left")
    table.add_column("kind")
    for heading in ("right", "of", "share", "95 % interval"):
        table.add_column(heading, justify="right")
    for row in (*run.kinds, run.overall):
        if row is run.overall:
            table.add_section()
        interval = f"{row.low:.1%} to {row.high:.1%}"
        counts = (str(row.correct), str(row.total))
        table.add_row(row.kind, *counts, f"{row.accuracy:.1%}", interval)
    Console().print(table)
    for failure in run.failures:
        print(f"{failure.count} requests failed ({failure.kind}), e.g. {failure.example}")
    for wrong in run.mistakes[:5]:
        question = wrong.question if len(wrong.question) < 80 else wrong.question[:79] + "…"
        print(f"wrong ({wrong.kind}): {question!r} gave {wrong.answer!r}, not {wrong.expected!r}")


evaluate = verb(EvalConfig, _evaluate)
