"""`tetrad eval` against servers whose marks are known beforehand."""

from __future__ import annotations

import json
from typing import Any

import pytest
from aiohttp import web

from tests.bench.mock_server import MockServer
from tests.cli.conftest import beside
from tetrad.bench.eval.problems import KINDS, held_out_problems
from tetrad.bench.eval.run import wilson
from tetrad.core.eval_records import EvalRun


class Pupil(MockServer):
    """Knows every answer, and gives a wrong one to every `wrong_every`-th request."""

    def __init__(self, wrong_every: int = 0, status: int = 200) -> None:
        super().__init__()
        self.status = status
        self.wrong_every = wrong_every
        self.answers = {
            question_key(problem.messages, problem.thinking): problem.reply
            for kind in KINDS
            for problem in held_out_problems(kind, 3)
        }

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self.status != 200:
            return web.json_response({"error": {"message": "no"}}, status=self.status)
        thinking = body["chat_template_kwargs"]["enable_thinking"]
        message = dict(self.answers[question_key(body["messages"], thinking)])
        if self.wrong_every and len(self.bodies) % self.wrong_every == 0:
            message = {"role": "assistant", "content": "seven"}
        if calls := message.get("tool_calls"):
            function = calls[0]["function"]
            arguments = json.dumps(function["arguments"])
            message["tool_calls"] = [{"function": {**function, "arguments": arguments}}]
        return web.json_response({"choices": [{"message": message, "finish_reason": "stop"}]})


def question_key(messages: list[dict[str, Any]], thinking: bool) -> str:
    return json.dumps([[str(m.get("content")) for m in messages], thinking])


def test_a_perfect_model_gets_everything_right(tetrad):
    server = Pupil()
    with beside(server) as url:
        code, out, _ = tetrad("eval", "--url", url, "--num-problems", "3", "--json")
    assert code == 0
    run = EvalRun.model_validate_json(out)
    assert [score.kind for score in run.kinds] == list(KINDS)
    assert all((score.correct, score.total) == (3, 3) for score in run.kinds)
    assert run.overall.accuracy == 1.0
    assert (run.mistakes, run.failures) == ([], [])
    assert all(body["temperature"] == 0.0 for body in server.bodies)
    assert sum("tools" in body for body in server.bodies) == 6


def test_wrong_answers_are_counted_shown_and_may_fail_the_command(tetrad):
    arguments = ["--num-problems", "3", "--kinds", "sum2", "product", "--max-concurrency", "1"]
    with beside(Pupil(wrong_every=3)) as url:
        code, out, err = tetrad("eval", "--url", url, *arguments, "--min-accuracy", "0.9")
    assert code == 6
    assert "66.7% of the answers are right, fewer than the 90.0% of --min-accuracy" in err
    assert "gave 'seven'" in out
    with beside(Pupil(wrong_every=3)) as url:
        assert tetrad("eval", "--url", url, *arguments, "--min-accuracy", "0.6")[0] == 0


def test_a_model_that_is_always_wrong_fails_the_command(tetrad):
    """Whoever relies on the exit code must not take a broken model for a good one."""
    arguments = ["--num-problems", "2", "--kinds", "sum2"]
    with beside(Pupil(wrong_every=1)) as url:
        code, out, err = tetrad("eval", "--url", url, *arguments)
    assert code == 6
    assert "No answer is right" in err
    assert "0.0%" in out, "the table is shown all the same"


def test_a_request_without_an_answer_is_wrong_and_fails_the_command(tetrad):
    with beside(Pupil(status=500)) as url:
        code, out, err = tetrad("eval", "--url", url, "--num-problems", "1", "--json")
    run = EvalRun.model_validate_json(out)
    assert code == 6
    assert f"{len(KINDS)} of {len(KINDS)} requests got no answer" in err
    assert run.overall.correct == 0
    assert run.failures[0].count == len(KINDS)
    assert run.failures[0].example == "HTTP 500: no"


def test_wilsons_interval():
    """Newcombe (1998), table I: 81 of 263 gives 0.2553 to 0.3662."""
    low, high = wilson(81, 263)
    assert low == pytest.approx(0.2553, abs=5e-5)
    assert high == pytest.approx(0.3662, abs=5e-5)
    assert wilson(0, 0) == (0.0, 1.0)
    assert wilson(20, 20)[1] == pytest.approx(1.0)
    assert wilson(20, 20)[0] == pytest.approx(0.8389, abs=5e-5)
