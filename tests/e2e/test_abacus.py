"""What the model says: the only end-to-end tests that depend on its weights."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import openai
import pytest

from tests.e2e.conftest import Served
from tests.house.source import ROOT
from tetrad.bench.eval.problems import held_out_problems, is_correct


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def tetrad(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tetrad", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=150)


def test_the_question_of_the_readme(client: openai.OpenAI):
    answer = client.chat.completions.create(
        model="abacus", messages=[{"role": "user", "content": "What is 3+5?"}]
    )
    message = answer.choices[0].message
    assert message.content == "3 + 5 = 8"
    assert "3+5=8" in message.reasoning_content  # type: ignore[attr-defined]
    assert answer.choices[0].finish_reason == "stop"


def test_chat_prints_the_answer_and_thinks_beside_it(served: Served):
    done = tetrad("chat", "What is 3+5?", "--url", served.url)
    assert (done.returncode, done.stdout) == (0, "3 + 5 = 8\n")
    assert "3+5=8" in done.stderr
    direct = tetrad("chat", "What is 3+5?", "--base-url", served.url, "--no-think")
    assert (direct.stdout, direct.stderr) == ("3 + 5 = 8\n", "")


def test_the_example_of_a_client(served: Served):
    command = [sys.executable, str(ROOT / "examples" / "client.py"), served.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=True)
    reasoning, *others = done.stdout.splitlines()
    assert reasoning.startswith("reasoning: ")
    assert reasoning.endswith("So 132.")
    assert others == [
        "answer: 47 + 85 = 132",
        'tool call: calculator {"expression": "47+85"}',
        "chosen: 3 + 5 = 8",
    ]


def test_the_example_of_a_client_without_a_server():
    command = [sys.executable, str(ROOT / "examples" / "client.py"), "http://127.0.0.1:1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    told = "No server answers at http://127.0.0.1:1; start one with `tetrad serve`.\n"
    assert (done.returncode, done.stderr) == (1, told)


def test_a_tool_call_arrives_whole_and_in_pieces(client: openai.OpenAI):
    (problem,) = held_out_problems("tool_call", 1, seed=3)
    asked = {
        "model": "abacus",
        "messages": [{"role": "user", "content": problem.messages[-1]["content"]}],
        "tools": problem.tools,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**asked)  # type: ignore[call-overload]
    assert whole.choices[0].finish_reason == "tool_calls"
    (call,) = whole.choices[0].message.tool_calls
    function = {"name": call.function.name, "arguments": json.loads(call.function.arguments)}
    assert is_correct(problem.kind, problem.expected, "", [function])
    name, arguments = "", ""
    for chunk in client.chat.completions.create(**asked, stream=True):  # type: ignore[call-overload]
        for choice in chunk.choices:
            for piece in choice.delta.tool_calls or ():
                name += piece.function.name or ""
                arguments += piece.function.arguments or ""
    assert (name, arguments) == (call.function.name, call.function.arguments)


def test_a_value_is_found_in_a_list_longer_than_the_indexers_top_k(client: openai.OpenAI):
    problems = list(held_out_problems("lookup", 20, seed=5))
    right = 0
    for problem in problems:
        answer = client.chat.completions.create(
            model="abacus",
            messages=problem.messages,  # type: ignore[arg-type]
            temperature=0,
        )
        right += is_correct(problem.kind, problem.expected, answer.choices[0].message.content or "")
    assert right >= 18


def test_held_out_sums_after_quantisation(served: Served):
    """The oracle of later changes to kernels and formats: 99 % is the bar, 100 problems a kind."""
    flags = ["--kinds", "sum2", "sum2_direct", "--num-problems", "100"]
    done = tetrad("eval", "--url", served.url, *flags, "--min-accuracy", "0.99")
    assert done.returncode == 0, done.stdout + done.stderr
