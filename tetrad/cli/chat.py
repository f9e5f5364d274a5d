"""`tetrad chat`: the model's answer on stdout, everything else on stderr."""

from __future__ import annotations

import http.client
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from tetrad.bench.load.sse import EventParser
from tetrad.cli.child import DIRECT, nobody, server
from tetrad.cli.flags import verb
from tetrad.cli.narrator import DIM, PLAIN, Narrator
from tetrad.cli.options import ChatConfig
from tetrad.core.errors import ConfigError, TetradError

READ_BYTES = 65536
Message = dict[str, Any]


def _chat(config: ChatConfig) -> int:
    """Ask once, or talk until the end of input."""
    prompt = config.prompt
    if prompt is None and not sys.stdin.isatty():
        prompt = sys.stdin.read().strip()
    if prompt is not None and not prompt.strip():
        raise ConfigError("There is no prompt: give one, or pipe one in.")
    narrator = Narrator()
    with server(config, narrator) as url:
        talk = Conversation(config, url, narrator)
        if prompt is not None:
            talk.ask(prompt)
        else:
            narrator.say("Ctrl-C stops an answer, Ctrl-D quits.")
            _converse(talk)
    return 0


def _converse(talk: Conversation) -> None:
    while True:
        try:
            prompt = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if prompt:
            try:
                talk.ask(prompt)
            except KeyboardInterrupt:
                print()


class Conversation:
    """The turns so far, and the server they are sent to."""

    def __init__(self, config: ChatConfig, url: str, narrator: Narrator) -> None:
        self._config = config
        self._narrator = narrator
        self._url = url
        self._turns: list[Message] = []
        if config.system is not None:
            self._turns.append({"role": "system", "content": config.system})

    def ask(self, prompt: str) -> None:
        """Send one question and print what comes, as it comes."""
        turns = [*self._turns, {"role": "user", "content": prompt}]
        printer = Printer()
        finish = None
        try:
            for event in self._events(turns):
                for choice in event.get("choices") or ():
                    printer.show(choice.get("delta") or {})
                    finish = choice.get("finish_reason") or finish
        finally:
            printer.end()
        if finish is None:
            raise TetradError("the server's answer broke off")
        if finish == "length":
            self._narrator.say("(cut off at the maximum length; see --max-tokens)")
        self._turns = [*turns, {"role": "assistant", "content": printer.answer}]

    def _events(self, turns: list[Message]) -> Iterator[dict[str, Any]]:
        parser = EventParser()
        with self._post(turns) as answer:
            while data := _read(answer):
                for event in parser.feed(data):
                    if event == b"[DONE]":
                        return
                    yield _parsed(event)

    def _post(self, turns: list[Message]) -> http.client.HTTPResponse:
        headers = {"Content-Type": "application/json"}
        if self._config.api_key is not None:
            headers["Authorization"] = f"Bearer {self._config.api_key}"
        body = json.dumps(self._body(turns)).encode()
        request = urllib.request.Request(
            f"{self._url}/v1/chat/completions", data=body, headers=headers
        )
        try:
            answer = DIRECT.open(request)
        except urllib.error.HTTPError as error:
            raise TetradError(_refusal(error)) from None
        except urllib.error.URLError as error:
            raise nobody(self._url, error.reason) from None
        assert isinstance(answer, http.client.HTTPResponse)
        return answer

    def _body(self, turns: list[Message]) -> dict[str, Any]:
        body: dict[str, Any] = {"messages": turns, "stream": True}
        if self._config.max_tokens is not None:
            body["max_completion_tokens"] = self._config.max_tokens
        if self._config.temperature is not None:
            body["temperature"] = self._config.temperature
        if self._config.no_think:
            body["chat_template_kwargs"] = {"enable_thinking": False}
        return body


def _read(answer: http.client.HTTPResponse) -> bytes:
    try:
        return answer.read1(READ_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise TetradError(f"the connection to the server broke: {error}") from None


def _parsed(event: bytes) -> dict[str, Any]:
    body = json.loads(event)
    if error := body.get("error"):
        raise TetradError(error["message"] if isinstance(error, dict) else str(error))
    assert isinstance(body, dict)
    return body


def _refusal(error: urllib.error.HTTPError) -> str:
    """The server's own sentence, where its body has one."""
    text = error.read().decode("utf-8", "replace")
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"the server answered HTTP {error.code}: {text[:200]}"


class Printer:
    """Writes reasoning dimmed to stderr and the answer to stdout."""

    def __init__(self) -> None:
        self.answer = ""
        self._is_thinking = False
        self._dim = sys.stderr.isatty()

    def show(self, delta: dict[str, Any]) -> None:
        """One piece of the stream."""
        if thought := delta.get("reasoning_content"):
            if not self._is_thinking and self._dim:
                sys.stderr.write(DIM)
            self._is_thinking = True
            sys.stderr.write(thought)
            sys.stderr.flush()
        if text := delta.get("content"):
            self._end_thought()
            self.answer += text
            sys.stdout.write(text)
            sys.stdout.flush()

    def end(self) -> None:
        """Close the line."""
        self._end_thought()
        if self.answer:
            print(flush=True)

    def _end_thought(self) -> None:
        if self._is_thinking:
            self._is_thinking = False
            sys.stderr.write(f"{PLAIN}\n" if self._dim else "\n")
            sys.stderr.flush()


chat = verb(ChatConfig, _chat, positional=("prompt",))
