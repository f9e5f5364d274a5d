"""`tetrad chat` against a server that runs already."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web

from tests.bench.mock_server import MockServer
from tests.cli.conftest import beside


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
    for prompt in ((), ("",), ("  ",)):
        code, _, err = tetrad("chat", *prompt, "--url", url)
        sentence = "error: There is no prompt: give one, or pipe one in.\n"
        assert (code, err) == (2, sentence)


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


class StartingServer(TalkingServer):
    """A Tetrad server that is starting for a while, and that may want a key."""

    def __init__(self, *, starting: int = 0, key: str | None = None) -> None:
        super().__init__(*ANSWER)
        self._num_starting = starting
        self._key = key

    async def models(self, request: web.Request) -> web.Response:
        if self._key is not None and request.headers.get("Authorization") != f"Bearer {self._key}":
            return web.json_response({"error": {"message": "no key"}}, status=401)
        if self._num_starting:
            self._num_starting -= 1
            return web.json_response({"error": {"message": "starting"}}, status=503)
        return web.json_response({"data": [{"id": "abacus", "owned_by": "tetrad"}]})


@pytest.fixture
def no_child(monkeypatch) -> None:
    def start(*_: Any) -> None:
        raise AssertionError("a server was started")

    monkeypatch.setattr("tetrad.cli.child.started", start)


def at_the_usual_place(server: MockServer, monkeypatch, tetrad, *flags: str):
    with beside(server) as url:
        monkeypatch.setattr("tetrad.cli.child.USUAL_URL", url)
        code, out, err = tetrad("chat", "Hi", *flags)
        return code, out, err.replace(url, "URL")


def test_a_server_that_is_starting_is_waited_for(tetrad, monkeypatch, no_child):
    code, out, err = at_the_usual_place(StartingServer(starting=2), monkeypatch, tetrad)
    assert (code, out) == (0, "3 + 5 = 8\n")
    assert err == "waiting up to 900 s for the server at URL: HTTP 503 ...\n"
    with beside(StartingServer(starting=2)) as url:
        assert tetrad("chat", "Hi", "--url", url)[:2] == (0, "3 + 5 = 8\n")


def test_a_server_that_never_is_ready_is_an_error(tetrad, monkeypatch, no_child):
    monkeypatch.setattr("tetrad.cli.child.STARTUP_S", 0.2)
    code, out, err = at_the_usual_place(StartingServer(starting=10**6), monkeypatch, tetrad)
    assert (code, out) == (1, "")
    assert err.endswith("error: the server at URL was not ready after 0.2 s.\n")


def test_a_server_that_wants_a_key_is_not_passed_over(tetrad, monkeypatch, no_child):
    for flags, wants in (
        ((), "wants an API key"),
        (("--api-key", "another"), "does not take this API key"),
    ):
        code, out, err = at_the_usual_place(StartingServer(key="k"), monkeypatch, tetrad, *flags)
        assert (code, out) == (2, "")
        assert err == (
            f"error: The server at URL {wants}; give its key with --api-key or in "
            "TETRAD_API_KEY or OPENAI_API_KEY.\n"
        )
    server = StartingServer(key="k")
    assert at_the_usual_place(server, monkeypatch, tetrad, "--api-key", "k")[0] == 0
    with beside(StartingServer(key="k")) as url:
        code, _, err = tetrad("chat", "Hi", "--url", url)
    assert code == 2
    assert "TETRAD_API_KEY" in err


@pytest.mark.parametrize("other", [None, "wrong"])
def test_a_key_may_be_in_either_variable(tetrad, monkeypatch, no_child, other: str | None):
    """Ours goes before the other, which many have for another server."""
    monkeypatch.setenv("OPENAI_API_KEY", other or "k")
    if other is not None:
        monkeypatch.setenv("TETRAD_API_KEY", "k")
    with beside(StartingServer(key="k")) as url:
        assert tetrad("chat", "Hi", "--url", url)[0] == 0


def test_another_server_at_the_usual_place_is_neither_asked_nor_passed_over(
    tetrad, monkeypatch, no_child
):
    server = TalkingServer(*ANSWER)
    code, out, err = at_the_usual_place(server, monkeypatch, tetrad)
    assert (code, out, server.bodies) == (2, "", [])
    assert "What listens at URL does not answer like a Tetrad server" in err
    assert "--url URL" in err


def test_where_nobody_listens_a_server_is_started(tetrad, monkeypatch):
    """And only there."""
    monkeypatch.setattr("tetrad.cli.child.USUAL_URL", "http://127.0.0.1:9")
    with beside(TalkingServer(*ANSWER)) as url:
        start = contextlib.nullcontext(url)
        monkeypatch.setattr("tetrad.cli.child.started", lambda *_: start)
        assert tetrad("chat", "Hi")[:2] == (0, "3 + 5 = 8\n")


def test_nobody_there(tetrad):
    for verb in (("chat", "Hi"), ("eval",)):
        code, _, err = tetrad(*verb, "--url", "http://127.0.0.1:9")
        assert code == 2
        assert err == (
            "error: --url http://127.0.0.1:9: no server answers there (Connection refused); start "
            "one with `tetrad serve`, or leave --url out, and one is started for the occasion.\n"
        )
