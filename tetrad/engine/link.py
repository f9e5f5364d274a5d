"""An API process's end of an engine: sends requests, streams what each of them gets.

Two sockets in a folder only this user can enter: what the API process says goes out by one, what
the engine says comes in by the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import replace
from itertools import islice
from typing import Any, Self

import zmq
import zmq.asyncio
from msgspec import structs

from tetrad.core import errors
from tetrad.core.errors import EngineDiedError, RequestError, TetradError
from tetrad.core.messages import (
    AbortRequests,
    AddRequests,
    Call,
    EngineDied,
    EngineProgress,
    EngineReady,
    EngineStats,
    Heartbeat,
    LogSettings,
    Message,
    Reply,
    RequestRefused,
    StepOutputs,
)
from tetrad.core.request import Request, RequestOutput
from tetrad.engine.wire import INBOX, OUTBOX, address, decode, encode, plain_tokens

_log = logging.getLogger(__name__)

POLL_S = 0.005
SLICE = 64
"""Streams that are woken together: some 2 ms of work."""
NUMBERS = 1 << 32
NEWS_WAIT_S = 5.0
"""How long the reason may take to come after the engine's sockets are gone."""

Progress = Callable[[EngineProgress], None]


class _Stream:
    """What one request gets."""

    def __init__(self) -> None:
        self.items: asyncio.Queue[RequestOutput | TetradError] = asyncio.Queue()
        self._told: RequestOutput | None = None

    def take(self, output: RequestOutput) -> None:
        """Something new."""
        self._told = output
        self.items.put_nowait(output)

    def take_token(self, token_id: int) -> None:
        """One more token; all else is as it was told last."""
        told = self._told
        assert told is not None
        output = RequestOutput(
            told.rid,
            (token_id,),
            prompt_tokens=told.prompt_tokens,
            cached_tokens=told.cached_tokens,
            num_preemptions=told.num_preemptions,
        )
        self.items.put_nowait(output)


class EngineLink:
    """One worker's sockets, and the streams of its requests. All methods belong to one event loop.

    Make it with `join` once the engine was told of the worker.
    """

    def __init__(self, folder: str, worker: int, on_progress: Progress | None = None) -> None:
        self.info: dict[str, Any] = {}
        """What the engine resolved and chose; filled once it is ready."""
        self.stats = EngineStats()
        self.step_age_s = 0.0
        """How long the step of the last heartbeat had been running."""
        self.died: asyncio.Future[EngineDiedError] = asyncio.get_running_loop().create_future()
        """Done when the engine ended unasked; the result is the error open requests got."""
        self._folder = folder
        self._worker = worker
        self._on_progress = on_progress
        self.on_log_settings: Callable[[LogSettings], None] | None = None
        """Hears what is to be logged from now on, whichever process was told."""
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._streams: dict[str, _Stream] = {}
        """By the name that the request has in the engine."""
        self._numbered: dict[int, _Stream] = {}
        """The same by the request's number."""
        self._num_requests = 0
        self._calls: dict[int, asyncio.Future[Reply]] = {}
        self._num_calls = 0
        self._is_stopping = False
        self._last_message_at = time.monotonic()
        self._tasks: list[asyncio.Task[None]] = []
        self._context = zmq.Context()
        self._outgoing = self._context.socket(zmq.PUSH)
        self._incoming = zmq.asyncio.Context.shadow(self._context).socket(zmq.PULL)

    @classmethod
    async def join(cls, folder: str, worker: int) -> Self:
        """Share the engine whose sockets are in `folder`; waits until it speaks to us."""
        link = cls(folder, worker)
        try:
            link._open()
            await link._ready
            while not link._outgoing.poll(0, zmq.POLLOUT):
                # The engine connects to the two sockets one after the other.
                await asyncio.sleep(POLL_S)
        except BaseException:
            await link._close()
            raise
        return link

    @property
    def last_beat_age_s(self) -> float:
        """Seconds since the engine last said anything; it does so at least once a second."""
        return time.monotonic() - self._last_message_at

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """Yield what each step gives `request`; ends after the output that carries `finish`.

        Raises RequestError before the first output if the engine refuses the request, and
        EngineDiedError if the engine dies. Leaving the iterator early aborts the request.

        In the engine the request has a name of its own, never used again: what the engine still
        sends for one that was left must not reach a later one of the same rid. The engine refuses a
        rid that runs already, whichever worker it came from.
        """
        self._num_requests += 1
        name = f"{self._worker}.{self._num_requests}.{request.rid}"
        number = self._num_requests % NUMBERS
        stream = self._streams[name] = self._numbered[number] = _Stream()
        is_over = False
        try:
            named = replace(request, rid=name, client_rid=request.rid, number=number)
            await self._tell(AddRequests([named], self._worker))
            while not is_over:
                item = await stream.items.get()
                if isinstance(item, TetradError):
                    is_over = True
                    raise item
                is_over = item.finish is not None
                yield structs.replace(item, rid=request.rid)
        finally:
            del self._streams[name], self._numbered[number]
            if not is_over:
                with contextlib.suppress(EngineDiedError):
                    self._send(AbortRequests([name]))

    async def flush_cache(self) -> tuple[bool, str]:
        """Empty the prefix cache. False with the reason while anything runs or waits."""
        reply = await self.ask("flush_cache")
        return reply.ok, reply.text

    async def state(self) -> dict[str, Any]:
        """`stats` read now, and `integrity`: "ok" or the sentence of what leaks."""
        return (await self.ask("state")).data

    async def ask(self, name: str, **arguments: Any) -> Reply:
        """A question or an order to the engine, see `engine/calls.py`. Raises EngineDiedError."""
        self._num_calls += 1
        call = Call(self._num_calls, name, self._worker, arguments)
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._calls[call.call_id] = reply
        try:
            await self._tell(call)
            return await reply
        finally:
            del self._calls[call.call_id]

    def fail(self, error: TetradError) -> None:
        """Give everyone who waits `error`. The first call decides; later ones find nobody."""
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()
        if not self.died.done() and not self._is_stopping and isinstance(error, EngineDiedError):
            self.died.set_result(error)
        for stream in self._streams.values():
            stream.items.put_nowait(error)
        for reply in self._calls.values():
            if not reply.done():
                reply.set_exception(error)

    async def stop(self) -> None:
        """Speak to the engine no more. Open requests get an error."""
        self._is_stopping = True
        self.fail(EngineDiedError("The engine was stopped."))
        await self._close()

    def _open(self) -> None:
        for socket, box in ((self._outgoing, INBOX), (self._incoming, OUTBOX)):
            socket.set_hwm(0)
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(address(self._folder, box, self._worker))
        self._keep(self._read())

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` until the end; if it fails, nobody must wait for the engine any more."""
        task = asyncio.create_task(work)
        task.add_done_callback(self._not_listening)
        self._tasks.append(task)

    def _send(self, message: Message) -> None:
        if self.died.done():
            raise self.died.result()
        try:
            self._outgoing.send_multipart(encode(message), zmq.NOBLOCK)
        except zmq.ZMQError:
            raise EngineDiedError("The engine process no longer listens.") from None

    async def _tell(self, message: Message) -> None:
        """Send it. Everyone is told one reason when the engine is gone, also who comes between its
        death and the news of it."""
        try:
            self._send(message)
        except EngineDiedError as error:
            await asyncio.wait({self.died}, timeout=NEWS_WAIT_S)
            raise (self.died.result() if self.died.done() else error) from None

    async def _read(self) -> None:
        try:
            while True:
                message = decode(await self._incoming.recv_multipart())
                self._receive(message)
                if isinstance(message, StepOutputs):
                    await self._hand_out(message)
        except ValueError as error:
            self.fail(EngineDiedError(f"The engine sent something unreadable: {error}."))

    async def _hand_out(self, message: StepOutputs) -> None:
        """Wake a few streams at a time. What else waits for the event loop, a new connection or
        whoever asks for /health, then waits for a few of them and not for thousands."""
        tokens, outputs = plain_tokens(message), iter(message.outputs)
        for _ in range(0, len(message.numbers) // 4 + len(message.outputs), SLICE):
            num_left = SLICE
            for number, token in islice(tokens, SLICE):
                num_left -= 1
                if stream := self._numbered.get(number):
                    stream.take_token(token)
            for output in islice(outputs, num_left):
                if stream := self._streams.get(output.rid):
                    stream.take(output)
            await asyncio.sleep(0)

    def _receive(self, message: Message) -> None:
        self._last_message_at = time.monotonic()
        match message:
            case StepOutputs(stats=stats):
                self.stats, self.step_age_s = stats, 0.0
            case Heartbeat(step_age_s, stats):
                self.stats, self.step_age_s = stats, step_age_s
            case RequestRefused(rid, text, http_status, param):
                if stream := self._streams.get(rid):
                    error = RequestError(text, http_status=http_status, param=param)
                    stream.items.put_nowait(error)
            case Reply(call_id):
                if (reply := self._calls.get(call_id)) and not reply.done():
                    reply.set_result(message)
            case _:
                self._receive_news(message)

    def _receive_news(self, message: Message) -> None:
        """What is neither a token nor an answer."""
        match message:
            case LogSettings() if self.on_log_settings:
                self.on_log_settings(message)
            case EngineProgress() if self._on_progress:
                self._on_progress(message)
            case EngineReady(info):
                self.info = info
                self._ready.set_result(None)
            case EngineDied():
                self.fail(_error_of(message))

    def _not_listening(self, task: asyncio.Task[None]) -> None:
        """A task that fails leaves nobody to hear the engine: nobody must wait for it then."""
        if not task.cancelled() and (error := task.exception()):
            _log.error("The engine cannot be heard any more.", exc_info=error)
            self.fail(EngineDiedError(f"The engine cannot be heard any more: {error!r}."))

    async def _close(self) -> None:
        self._is_stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._incoming.close()
        self._outgoing.close()
        self._context.term()


def _error_of(words: EngineDied) -> TetradError:
    cls = getattr(errors, words.kind, EngineDiedError)
    known = isinstance(cls, type) and issubclass(cls, errors.UserError)
    return cls(words.reason) if known else EngineDiedError(words.reason)
