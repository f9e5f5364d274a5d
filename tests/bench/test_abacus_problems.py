"""The problems are sums: what they expect must be true, and held out must mean unseen."""

from __future__ import annotations

import random
import re

import pytest

from tetrad.bench.eval import problems as abacus_problems
from tetrad.bench.eval.arithmetic import Operation, explain
from tetrad.bench.eval.problems import KINDS, MAKERS, held_out_problems, is_correct, is_held_out

# Not `7*12=12*7`, which only turns the factors round.
STEP = re.compile(r"(\d+)([-+*])(\d+)(?:([-+])(\d+))?=(\d+)(?![\d*])")
ANSWER = re.compile(r"(\d+) ([-+*]) (\d+) = (-?\d+)")
NUM_PROBLEMS = 200


def value_of(left: int, sign: str, right: int) -> int:
    return {"+": left + right, "-": left - right, "*": left * right}[sign]


def operations() -> list[Operation]:
    rng = random.Random(0)
    numbers = [(rng.randrange(1000), rng.randrange(1000)) for _ in range(500)]
    factors = [(rng.randrange(10, 100), rng.randrange(10)) for _ in range(200)]
    small = [(a, b) for a in range(13) for b in range(13)]
    return [
        *(Operation(sign, a, b) for sign in "+-" for a, b in numbers),
        *(Operation("*", a, b) for a, b in factors + small),
    ]


def test_every_step_of_the_reasoning_is_true_and_the_last_number_is_the_result():
    for operation in operations():
        text = explain(operation)
        steps = STEP.findall(text)
        assert steps, text
        for left, sign, right, more, extra, result in steps:
            value = value_of(int(left), sign, int(right))
            value = value_of(value, more, int(extra)) if more else value
            assert value == int(result), text
        assert re.findall(r"-?\d+", text.replace("=", " "))[-1] == str(operation.result), text


@pytest.mark.parametrize("kind", KINDS)
def test_expected_answers_are_true(kind):
    for problem in held_out_problems(kind, NUM_PROBLEMS):
        stated = ANSWER.fullmatch(problem.expected)
        if stated:
            left, sign, right, result = stated.groups()
            assert value_of(int(left), sign, int(right)) == int(result)
        if kind.startswith("comparison") and problem.expected.startswith(("Yes", "No")):
            left, sign, right = re.findall(r"\d+|[<>=]", problem.expected)
            truth = {"<": int(left) < int(right), ">": int(left) > int(right)}
            assert truth.get(sign, left == right)


@pytest.mark.parametrize("kind", ["sum2", "sum3", "difference3", "product", "tool_call"])
def test_training_never_sees_a_held_out_operation(kind):
    rng = random.Random(1)
    pattern = re.compile(r"(\d+) ?([-+*]) ?(\d+)")

    def operation(problem: abacus_problems.Problem) -> Operation:
        match = pattern.match(problem.expected)
        assert match
        return Operation(match[2], int(match[1]), int(match[3]))

    assert all(is_held_out(operation(p)) for p in held_out_problems(kind, NUM_PROBLEMS))
    trained = [MAKERS[kind](rng, False) for _ in range(NUM_PROBLEMS)]
    assert not any(is_held_out(operation(p)) for p in trained)


def test_commuted_operands_fall_on_the_same_side():
    pairs = [(a, b) for a in range(0, 100, 7) for b in range(100, 1000, 37)]
    for sign in "+*?":
        for a, b in pairs:
            assert is_held_out(Operation(sign, a, b)) == is_held_out(Operation(sign, b, a))
    assert any(is_held_out(Operation("+", a, b)) for a, b in pairs)


def test_the_same_seed_gives_the_same_problems():
    first, second = (list(held_out_problems("lookup", 20, seed=3)) for _ in range(2))
    assert first == second
    assert first != list(held_out_problems("lookup", 20, seed=4))


def test_only_the_exact_answer_is_correct():
    assert is_correct("sum2", "3 + 5 = 8", " 3 + 5 = 8\n")
    assert not is_correct("sum2", "3 + 5 = 8", "3 + 5 = 80")
    assert not is_correct("sum2", "3 + 5 = 8", "3 + 5 = 8", [{"name": "calculator"}])


def test_a_tool_call_is_judged_by_its_one_expression():
    call = {"function": {"name": "calculator", "arguments": {"expression": "12 + 30"}}}
    assert is_correct("tool_call", "12+30", "", [call])
    assert not is_correct("tool_call", "12+31", "", [call])
    assert not is_correct("tool_call", "12+30", "", [call, call])
    assert not is_correct("tool_call", "12+30", "12+30")
    other = {"function": {"name": "search", "arguments": {"expression": "12+30"}}}
    assert not is_correct("tool_call", "12+30", "", [other])
