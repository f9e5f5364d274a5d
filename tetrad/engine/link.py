"""An API process's connection to an engine: sends requests and streams their results.

It uses two sockets in a folder that only this user can enter: one for messages to the engine, one
for messages from it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from functools import partial
from typing import Any, Self

import zmq
from msgspec.structs import replace

from tetrad.core import errors
from tetrad.core.errors import EngineDiedError, RequestError, TetradError
from tetrad.core.limits import Limits
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
from tetrad.engine.admission import check_request
from tetrad.engine.sinks import Outputs, Sink, Stream
from tetrad.engine.turns import TURN_S, Turns
from tetrad.engine.wire import INBOX, OUTBOX, address, decode, encode, encoded, plain_tokens

_log = logging.getLogger(__name__)

POLL_S = 0.005
NUMBERS = 1 << 32
STOPPED = "The engine was stopped."
NEWS_WAIT_S = 5.0
"""How long the reason may take to come after the engine's sockets are gone."""

Progress = Callable[[EngineProgress], None]


class EngineLink:
    """One worker's sockets, and the streams of its requests. All methods belong to one event loop.

    Make it with `join` once the engine was told of the worker.
    """

    def __init__(self, folder: str, worker: int, on_progress: Progress | None = None) -> None:
        self.info: dict[str, Any] = {}
        """What the engine resolved and chose; filled once it is ready."""
        self._limits = Limits(0, 0, 0, 0, 0)
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
        self._streams: dict[int, Stream] = {}
        """By the number of the request."""
        self._numbers: dict[str, int] = {}
        """By the name that the request has in the engine."""
        self._num_requests = 0
        self._unsaid: list[AddRequests | AbortRequests] = []
        """Who began and who was left in this turn of the event loop: those that follow one another
        are told together."""
        self._reads_on = False
        """Whether the next turn of the event loop reads on."""
        self._turns = Turns(asyncio.get_running_loop())
        self._calls: dict[int, asyncio.Future[Reply]] = {}
        self._num_calls = 0
        self._is_stopping = False
        self._last_message_at = time.monotonic()
        self._tasks: list[asyncio.Task[None]] = []
        self._context = zmq.Context()
        self._outgoing = self._context.socket(zmq.PUSH)
        self._incoming = self._context.socket(zmq.PULL)
        self._descriptor: int = self._incoming.fileno()

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

    def begin(self, request: Request, sink: Sink) -> Callable[[], None]:
        """Have the engine serve `request`; `sink` hears what it gets, or why it gets nothing.
        Returns what is to be called when nobody wants more of it, which aborts it unless it is
        over.

        In the engine the request has a name of its own, never used again: what the engine still
        sends for one that was left must not reach a later one of the same rid. The engine refuses a
        rid that runs already, whichever worker it came from; what can never be served is not sent.
        """
        try:
            check_request(request, self._limits)
        except RequestError as error:
            return asyncio.get_running_loop().call_soon(sink.fail, error).cancel
        self._num_requests += 1
        name = f"{self._worker}.{self._num_requests}.{request.rid}"
        number = self._num_requests % NUMBERS
        named = encoded(
            replace(request, rid=name, client_rid=request.rid, number=number, worker=self._worker)
        )
        self._numbers[name] = number
        stream = self._streams[number] = Stream(number, name, sink)
        match self._unsaid:
            case [*_, AddRequests(requests)]:
                requests.append(named)
            case _:
                self._say_soon(AddRequests([named]))
        return partial(self._leave, stream)

    def _leave(self, stream: Stream) -> None:
        if self._streams.pop(stream.number, None) is None:
            return
        del self._numbers[stream.name]
        stream.leave()
        if stream.is_over:
            return
        match self._unsaid:
            case [*_, AbortRequests(names)]:
                names.append(stream.name)
            case _:
                self._say_soon(AbortRequests([stream.name]))

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """Yield what each step gives `request`; ends after the output that carries `finish`.

        Raises RequestError before the first output if the engine refuses the request, and
        EngineDiedError if the engine dies. Leaving the iterator early aborts the request.
        """
        outputs = Outputs(request.rid)
        leave = self.begin(request, outputs)
        try:
            async for output in outputs.read():
                yield output
        finally:
            leave()

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
            try:
                self._send(call)
            except EngineDiedError as error:
                raise await self._reason(error) from None
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
            stream.fail(error)
        for reply in self._calls.values():
            if not reply.done():
                reply.set_exception(error)

    async def stop(self) -> None:
        """Speak to the engine no more. Open requests get an error."""
        self._is_stopping = True
        self.fail(EngineDiedError(STOPPED))
        await self._close()

    def _open(self) -> None:
        for socket, box in ((self._outgoing, INBOX), (self._incoming, OUTBOX)):
            socket.set_hwm(0)
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(address(self._folder, box, self._worker))
        asyncio.get_running_loop().add_reader(self._descriptor, self._read)
        self._read()  # what has come before is not told again

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` until the end; if it fails, nobody must wait for the engine any more."""
        task = asyncio.create_task(work)
        task.add_done_callback(self._has_ended)
        self._tasks.append(task)

    def _say_soon(self, message: AddRequests | AbortRequests) -> None:
        if not self._unsaid:
            asyncio.get_running_loop().call_soon(self._say)
        self._unsaid.append(message)

    def _say(self) -> None:
        unsaid, self._unsaid = self._unsaid, []
        for message in unsaid:
            if isinstance(message, AbortRequests):
                with contextlib.suppress(EngineDiedError):
                    self._send(message)
            elif self._is_stopping:
                self.fail(EngineDiedError(STOPPED))
            else:
                try:
                    self._send(message)
                except EngineDiedError as error:
                    self._keep(self._fail_soon(error))

    async def _fail_soon(self, error: EngineDiedError) -> None:
        self.fail(await self._reason(error))

    def _send(self, message: Message) -> None:
        self._say()
        if self.died.done():
            raise self.died.result()
        try:
            self._outgoing.send(encode(message), zmq.NOBLOCK)
        except zmq.ZMQError:
            raise EngineDiedError("The engine process no longer listens.") from None

    async def _reason(self, error: EngineDiedError) -> EngineDiedError:
        """Everyone is told one reason when the engine is gone, also who comes between its death and
        the news of it."""
        await asyncio.wait({self.died}, timeout=NEWS_WAIT_S)
        return self.died.result() if self.died.done() else error

    def _read(self) -> None:
        """Take what the engine sent. The descriptor tells only of what comes to an empty socket, so
        all is read, but no longer in one turn than it hands out, nor while much is due: that is
        smaller where it is."""
        if self._is_stopping or self._reads_on:
            return
        until = time.monotonic() + TURN_S
        try:
            while time.monotonic() < until and not self._turns.is_behind:
                self._receive(decode(self._incoming.recv(zmq.NOBLOCK)))
            self._reads_on = True
            asyncio.get_running_loop().call_soon(self._read_on)
        except zmq.Again:
            pass
        except ValueError as error:
            self.fail(EngineDiedError(f"The engine sent something unreadable: {error}."))
        except Exception as error:  # noqa: BLE001 - nobody must wait for the engine then
            self._not_heard(error)
        self._turns.go()

    def _read_on(self) -> None:
        self._reads_on = False
        self._read()

    def _take_step(self, message: StepOutputs) -> None:
        """Note what streams got. What comes before it is handed out is written together."""
        streams, got_token = self._streams, self._turns.token
        for number, token_id in plain_tokens(message):
            if (stream := streams.get(number)) is not None:
                got_token(stream, token_id)
        for output in message.outputs:
            if (stream := streams.get(self._numbers.get(output.rid, -1))) is not None:
                self._turns.output(stream, output)

    def _receive(self, message: Message) -> None:
        self._last_message_at = time.monotonic()
        match message:
            case StepOutputs(stats=stats):
                self.stats, self.step_age_s = stats, 0.0
                self._take_step(message)
            case Heartbeat(step_age_s, stats):
                self.stats, self.step_age_s = stats, step_age_s
            case RequestRefused(rid, text, http_status, param):
                if stream := self._streams.get(self._numbers.get(rid, -1)):
                    stream.fail(RequestError(text, http_status=http_status, param=param))
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
            case EngineReady(info, limits):
                self.info, self._limits = info, limits
                self._ready.set_result(None)
            case EngineDied():
                self.fail(_error_of(message))

    def _has_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()):
            self._not_heard(error)

    def _not_heard(self, error: BaseException) -> None:
        """Whatever kept us from hearing the engine, nobody must wait for it any more."""
        _log.error("The engine cannot be heard any more.", exc_info=error)
        self.fail(EngineDiedError(f"The engine cannot be heard any more: {error!r}."))

    async def _close(self) -> None:
        self._is_stopping = True
        asyncio.get_running_loop().remove_reader(self._descriptor)
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
