"""`tetrad chat` against a server that runs already."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web

from tests.bench.mock_server import MockServer
from tests.cli.conftest import beside
from tetrad.cli.child import is_tetrad


class TalkingServer(MockServer):
    """Thinks, then answers; or refuses, or breaks off."""

    def __init__(self, *deltas: dict[str, Any], finish: str | None = "stop") -> None:
        super().__init__()
        self.deltas = deltas
        self.finish = finish
        self.error: dict[str, Any] | None = None

    async def generate(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.headers.append(dict(request.headers))
        if self.error is not None:
            return web.json_response({"error": self.error}, status=400)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for delta in self.deltas:
            event = delta if "error" in delta else {"choices": [{"delta": delta}]}
            await answer.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        if self.finish is not None:
            end = {"choices": [{"delta": {}, "finish_reason": self.finish}]}
            await answer.write(b"data: " + json.dumps(end).encode() + b"\n\ndata: [DONE]\n\n")
        return answer


SUM = ({"role": "assistant"}, {"reasoning_content": "Ones: "}, {"reasoning_content": "3+5=8."})
ANSWER = ({"content": "3 + 5"}, {"content": " = 8"})


def test_the_answer_is_on_stdout_and_the_reasoning_is_not(tetrad):
    server = TalkingServer(*SUM, *ANSWER)
    with beside(server) as url:
        assert tetrad("chat", "What is 3+5?", "--url", url) == (
            0,
            "3 + 5 = 8\n",
            "Ones: 3+5=8.\n",
        )
    assert server.bodies[0] == {
        "messages": [{"role": "user", "content": "What is 3+5?"}],
        "stream": True,
    }


def test_flags_reach_the_server(tetrad):
    server = TalkingServer(*ANSWER)
    flags = ["--system", "Be brief.", "--no-think", "--max-tokens", "9", "--temperature", "0.5"]
    with beside(server) as url:
        code, _, _ = tetrad("chat", "Hi", "--url", url, *flags, "--api-key", "secret")
    assert code == 0
    assert server.bodies[0] == {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
        ],
        "stream": True,
        "max_completion_tokens": 9,
        "temperature": 0.5,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert server.headers[0]["Authorization"] == "Bearer secret"


def test_a_prompt_may_be_piped_in(tetrad, monkeypatch):
    server = TalkingServer(*ANSWER)
    monkeypatch.setattr("sys.stdin", io.StringIO("What is\n3+5?\n"))
    with beside(server) as url:
        assert tetrad("chat", "--url", url)[:2] == (0, "3 + 5 = 8\n")
    assert server.bodies[0]["messages"][0]["content"] == "What is\n3+5?"
    monkeypatch.setattr("sys.stdin", io.StringIO(" \n"))
    code, _, err = tetrad("chat", "--url", url)
    assert (code, err) == (
        2,
        "error: There is nothing to ask: give a prompt, or pipe one in.\n",
    )


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def typed(*lines: str | type[BaseException]) -> Callable[[str], str]:
    """What `input` gives: the lines, then the end."""
    left = list(lines)

    def read(prompt: str = "") -> str:
        if not left:
            raise EOFError
        line = left.pop(0)
        assert isinstance(line, str)
        return line

    return read


def test_a_conversation_keeps_its_turns(tetrad, monkeypatch):
    server = TalkingServer(*SUM, *ANSWER)
    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("builtins.input", typed("What is 3+5?", "", "Now add 5."))
    with beside(server) as url:
        code, out, _ = tetrad("chat", "--url", url)
    assert code == 0
    assert out == "3 + 5 = 8\n3 + 5 = 8\n\n"
    assert server.bodies[1]["messages"] == [
        {"role": "user", "content": "What is 3+5?"},
        {"role": "assistant", "content": "3 + 5 = 8"},
        {"role": "user", "content": "Now add 5."},
    ]


def test_a_refusal_is_told_in_the_servers_words(tetrad):
    server = TalkingServer()
    server.error = {"message": "the prompt has 9000 tokens, the context 2048", "code": 400}
    with beside(server) as url:
        code, out, err = tetrad("chat", "Hi", "--url", url)
    assert (code, out) == (1, "")
    assert err == "error: the prompt has 9000 tokens, the context 2048\n"


@pytest.mark.parametrize(
    ("last", "finish", "sentence"),
    [
        ({"error": {"message": "the engine died"}}, None, "error: the engine died"),
        ({"content": "!"}, None, "error: the server's answer broke off"),
    ],
)
def test_a_broken_answer_is_an_error(last, finish, sentence: str, tetrad):
    with beside(TalkingServer(*ANSWER, last, finish=finish)) as url:
        code, out, err = tetrad("chat", "Hi", "--url", url)
    assert code == 1
    assert out.startswith("3 + 5 = 8")
    assert sentence in err


def test_a_cut_answer_says_so(tetrad):
    with beside(TalkingServer(*ANSWER, finish="length")) as url:
        code, _, err = tetrad("chat", "Hi", "--url", url)
    assert code == 0
    assert "--max-tokens" in err


def test_only_a_tetrad_server_is_spoken_to_unasked():
    """Another server at the usual place is left alone: a child is started instead."""
    with beside(TalkingServer(*ANSWER)) as url:
        assert not is_tetrad(url, None)
    assert not is_tetrad("http://127.0.0.1:9", None)


def test_nobody_there(tetrad):
    for verb in (("chat", "Hi"), ("eval",)):
        code, _, err = tetrad(*verb, "--url", "http://127.0.0.1:9")
        assert code == 2
        assert err == (
            "error: --url http://127.0.0.1:9: no server answers there (Connection refused); start "
            "one with `tetrad serve`, or leave --url out, and one is started for the occasion.\n"
        )
