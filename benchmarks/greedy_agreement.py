"""Do two servers give the same greedy tokens, and where they differ, was it a near-tie?

Asks both servers every held-out problem of `tetrad eval` and compares the answers token by token. A
difference is explained when the first server itself had the other's token within TIE of its own:
two right sums may round to either side there. To compare a GPU's kernels with plain torch:

    tetrad serve --port 30001 &
    tetrad serve --port 30002 --device cpu &
    python benchmarks/greedy_agreement.py http://127.0.0.1:30001 http://127.0.0.1:30002

Ends with status 1 when a difference is not explained.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tetrad.bench.eval.problems import KINDS, Problem, held_out_problems
from tetrad.bench.eval.run import Exam, body

TIE = 0.1
"""Difference of log-probabilities; bf16 rounds logits of this model by up to 0.06."""

Tokens = list[dict[str, Any]]


def answer(url: str, problem: Problem, exam: Exam) -> Tokens:
    """The answer's tokens, each with its log-probability and the two best."""
    asked = body(problem, "default", exam) | {"logprobs": True, "top_logprobs": 2}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(asked).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=600) as reply:
        found: Tokens = json.load(reply)["choices"][0]["logprobs"]["content"]
    return found


def first_difference(ours: Tokens, theirs: Tokens) -> int | None:
    """Where the tokens part, None where they never do."""
    for place, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        if mine["token"] != other["token"]:
            return place
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


def gap(ours: Tokens, theirs: Tokens, place: int) -> float | None:
    """How much better the first server found its own token than the other's; None where that was
    not among its two best."""
    if place >= min(len(ours), len(theirs)):
        return None
    best = {each["token"]: each["logprob"] for each in ours[place]["top_logprobs"]}
    other = best.get(theirs[place]["token"])
    return None if other is None else float(ours[place]["logprob"] - other)


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare two servers' greedy tokens.")
    parser.add_argument("urls", nargs=2, metavar="URL")
    parser.add_argument("--num-problems", type=int, default=40, help="of each kind")
    options = parser.parse_args()
    exam = Exam(tuple(KINDS), options.num_problems, 0, 512, 16)
    problems = [p for kind in KINDS for p in held_out_problems(kind, options.num_problems, 0)]
    with ThreadPoolExecutor(exam.max_concurrency) as pool:
        both = [
            list(pool.map(lambda p, u=url: answer(u, p, exam), problems)) for url in options.urls
        ]
    num_tokens = sum(map(len, both[0]))
    num_different = num_unexplained = 0
    for problem, ours, theirs in zip(problems, *both, strict=True):
        place = first_difference(ours, theirs)
        if place is None:
            continue
        num_different += 1
        distance = gap(ours, theirs, place)
        is_tie = distance is not None and distance <= TIE
        num_unexplained += not is_tie
        shown = [
            tokens[place]["token"] if place < len(tokens) else "(end)" for tokens in (ours, theirs)
        ]
        said = "not among the two best" if distance is None else f"{distance:.3f} apart"
        question = str(problem.messages[-1]["content"])[:60]
        print(f"{problem.kind}, token {place}: {shown[0]!r} or {shown[1]!r}, {said}: {question}")
    print(
        f"{len(problems) - num_different} of {len(problems)} answers equal, {num_tokens} tokens; "
        f"{num_different} differ, {num_unexplained} of them not by a near-tie"
    )
    return 1 if num_unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
