"""Exact match on held-out problems, through the same API that everyone else uses."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from tetrad import __version__
from tetrad.bench.eval.problems import Problem, held_out_problems, is_correct
from tetrad.bench.figures.measure import count_failures
from tetrad.bench.load import target
from tetrad.bench.load.backends import CHAT
from tetrad.bench.load.client import Client, Load, run_load
from tetrad.bench.load.http1 import BadAnswerError
from tetrad.bench.load.judge import error_message
from tetrad.bench.load.wire import Trace
from tetrad.core.errors import BenchFailure
from tetrad.core.eval_records import EvalRun, KindScore, Mistake
from tetrad.core.records import Failure

PATIENCE_S = 10.0
REQUEST_TIMEOUT_S = 600.0
MISTAKES_KEPT = 20


@dataclass(frozen=True, slots=True)
class Exam:
    """What to ask."""

    kinds: tuple[str, ...]
    num_problems: int
    """Of each kind."""
    seed: int
    max_tokens: int
    max_concurrency: int


@dataclass(frozen=True, slots=True)
class Marked:
    """One problem with the answer it got."""

    problem: Problem
    answer: str
    is_right: bool
    failure: Failure | None = None


async def evaluate(
    url: str,
    headers: dict[str, str],
    exam: Exam,
    on_finished: Callable[[Trace], None],
    say: Callable[[str], None],
) -> EvalRun:
    """Ask everything, mark it; `say` hears what is waited for.

    Raises BenchFailure when no server answers or it was interrupted.
    """
    started_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    problems = [
        p for kind in exam.kinds for p in held_out_problems(kind, exam.num_problems, exam.seed)
    ]
    client = Client(url, headers, REQUEST_TIMEOUT_S)
    try:
        model = (await target.find(client, PATIENCE_S, say)).model
        load = Load(
            path=CHAT.path,
            bodies=[json.dumps(body(problem, model, exam)).encode() for problem in problems],
            due_s=[0.0] * len(problems),
            max_concurrency=exam.max_concurrency,
        )
        result = await run_load(client, load, on_finished)
    finally:
        await client.close()
    if result.interrupted:
        raise BenchFailure("The evaluation was interrupted.")
    marked = [mark(problems[trace.index], trace) for trace in result.traces]
    return EvalRun(
        tetrad_version=__version__,
        started_at=started_at,
        model=model,
        seed=exam.seed,
        duration_s=result.duration_s,
        kinds=[score(kind, [m for m in marked if m.problem.kind == kind]) for kind in exam.kinds],
        overall=score("all", marked),
        failures=count_failures(enumerate(m.failure for m in marked)),
        mistakes=[mistake(m) for m in marked if not m.is_right][:MISTAKES_KEPT],
    )


def body(problem: Problem, model: str | None, exam: Exam) -> dict[str, Any]:
    """The problem as a chat request, greedy."""
    asked: dict[str, Any] = {
        "model": model,
        "messages": [_as_sent(message) for message in problem.messages],
        "temperature": 0.0,
        "max_completion_tokens": exam.max_tokens,
        "chat_template_kwargs": {"enable_thinking": problem.thinking},
    }
    return asked if problem.tools is None else {**asked, "tools": problem.tools}


def _as_sent(message: dict[str, Any]) -> dict[str, Any]:
    """Arguments of calls travel as JSON text."""
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": _text(call["function"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _text(function: dict[str, Any]) -> str:
    return json.dumps(function["arguments"])


def mark(problem: Problem, trace: Trace) -> Marked:
    """Compare the answer with the expected one; a request without an answer is wrong."""
    if trace.failure is not None:
        return Marked(problem, "", is_right=False, failure=trace.failure)
    try:
        answer = trace.body()
    except BadAnswerError as error:
        failure = Failure(kind="malformed", message=f"not HTTP: {error}")
        return Marked(problem, "", is_right=False, failure=failure)
    if trace.status != 200:
        message = f"HTTP {trace.status}: {error_message(answer)}"
        failure = Failure(kind="http_status", message=message)
        return Marked(problem, "", is_right=False, failure=failure)
    try:
        message = msgspec.json.decode(answer)["choices"][0]["message"]
        text = message.get("content") or ""
        calls = [call["function"] for call in message.get("tool_calls") or ()]
    except (msgspec.DecodeError, LookupError, TypeError, AttributeError):
        failure = Failure(kind="malformed", message=error_message(answer))
        return Marked(problem, "", is_right=False, failure=failure)
    parsed = [{**call, "arguments": _arguments(call)} for call in calls]
    is_right = is_correct(problem.kind, problem.expected, text, parsed)
    shown = text or "".join(f"{c.get('name')}({c.get('arguments')})" for c in calls)
    return Marked(problem, shown, is_right)


def _arguments(call: dict[str, Any]) -> dict[str, Any]:
    try:
        parsed = json.loads(call.get("arguments") or "{}")
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


def score(kind: str, marked: Sequence[Marked]) -> KindScore:
    """Right answers and how sure one can be of their share."""
    correct = sum(m.is_right for m in marked)
    low, high = wilson(correct, len(marked))
    return KindScore(kind=kind, correct=correct, total=len(marked), low=low, high=high)


def mistake(marked: Marked) -> Mistake:
    """What to show of a wrong answer."""
    failure = marked.failure
    return Mistake(
        kind=marked.problem.kind,
        question=str(marked.problem.messages[-1]["content"]),
        expected=marked.problem.expected,
        answer=marked.answer if failure is None else f"({failure.kind}: {failure.message})",
    )


def wilson(correct: int, total: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's score interval of a share, 95 % by default; (0, 1) without any sample."""
    if total == 0:
        return 0.0, 1.0
    share = correct / total
    centre = share + z * z / (2 * total)
    half = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)
