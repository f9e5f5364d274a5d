"""OpenAI's /v1/responses, translated to a chat: create, fetch, cancel, delete.

Responses are kept for an hour on a shelf that all API processes share, in memory and bounded; the
oldest go first. What is kept is the response and the messages that a next request goes on from.
"""

from __future__ import annotations

import asyncio
from hashlib import blake2b

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tetrad.core.errors import CapacityError, RequestError, TetradError
from tetrad.server.apis.openai.conversation import chat_choices, translated
from tetrad.server.apis.responses.answer import ROUTE, ResponseAnswer
from tetrad.server.apis.responses.protocol import (
    ChatMessages,
    ResponsesBody,
    answer_message,
    chat_of,
)
from tetrad.server.bodies.read import read_body
from tetrad.server.door.arrival import arrival
from tetrad.server.service import Service
from tetrad.server.shared.shelf import Shelf
from tetrad.server.stream.answers import EventStream, LaterJson, Wire, in_time
from tetrad.server.stream.blocks import block_id
from tetrad.server.wire.encoding import json_bytes

ID_ROUTE = ROUTE + "/{response_id}"
CANCEL_ROUTE = ID_ROUTE + "/cancel"
MAX_BACKGROUND = 256
"""Responses that one API process computes without a connection."""
POLL_S = 0.2
"""How often a response in the background looks whether it is still wanted."""
CANCEL_WAIT_S = 2.0


class Kept(msgspec.Struct):
    """What is kept of a response."""

    response: msgspec.Raw
    messages: ChatMessages | None
    """None until it has ended well."""


class _Status(msgspec.Struct):
    status: str
    background: bool


async def create(service: Service, request: Request) -> Response:
    """Create a response, whole, streamed or in the background, or continue a previous one."""
    body = await read_body(request, ResponsesBody)
    service.model.check_name(body.model)
    before = _before(service.shelf, body.previous_response_id)
    response_id = block_id("resp")
    chat = await translated(len(before) + body.num_parts, lambda: chat_of(body, before))
    (choice,) = await chat_choices(service, chat, response_id)
    keeper = _Keeper(service.shelf, body, before)
    answer = ResponseAnswer(service, body, response_id, choice, keeper.keep)
    answer.is_stored = keeper.is_wanted
    if body.background:
        return _in_background(service, answer, keeper, choice.request.num_prompt)
    wire = Wire(b"", answer.broken)
    return EventStream(answer.events, wire) if body.stream else LaterJson(answer.whole)


class _Keeper:
    """Puts one response on the shelf, if it is to be stored."""

    def __init__(self, shelf: Shelf | None, body: ResponsesBody, before: ChatMessages) -> None:
        self._shelf = shelf
        self._body = body
        self._before = before
        self.is_wanted = shelf is not None and body.store is not False

    def keep(self, answer: ResponseAnswer) -> None:
        """As it is now. With too long a conversation it is kept without, so that it can be fetched
        but not gone on from; what is too large all the same is not stored, and says so."""
        if not self.is_wanted:
            return
        messages = None
        if answer.status in ("completed", "incomplete"):
            messages = [*self._before, *self._body.own_messages, answer_message(answer.blocks)]
        answer.is_stored = self._put(answer, messages) or (
            messages is not None and self._put(answer, None)
        )

    def _put(self, answer: ResponseAnswer, messages: ChatMessages | None) -> bool:
        assert self._shelf is not None
        value = {"response": answer.value(), "messages": messages}
        try:
            return self._shelf.put(_name(answer.response_id), json_bytes(value))
        except CapacityError:
            return False


def _name(response_id: str) -> str:
    """On the shelf. Whoever comes with another key does not find it."""
    whose = f"{arrival().key_name} {response_id}"
    return blake2b(whose.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _before(shelf: Shelf | None, response_id: str | None) -> ChatMessages:
    """The messages that a previous response ended with."""
    if response_id is None:
        return []
    kept = _kept(shelf, response_id, "previous_response_id", 400)
    if kept.messages is None:
        raise RequestError(
            f"The response {response_id[:64]!r} is {_status(kept).status} and cannot be gone on "
            "from: that takes one that has ended well and is not too long; send the whole "
            "conversation as input.",
            param="previous_response_id",
        )
    return kept.messages


def _kept(shelf: Shelf | None, response_id: str, param: str, http_status: int = 404) -> Kept:
    if shelf is None:
        raise RequestError(
            "No responses are stored here (--max-stored-responses 0); send the whole conversation "
            "as input.",
            http_status=http_status,
            param=param,
        )
    value = shelf.get(_name(response_id))
    if value is None:
        raise RequestError(
            f"There is no response {response_id[:64]!r}: it was not stored, was deleted, is older "
            "than an hour or than many others, or is another replica's; send the whole "
            "conversation as input.",
            http_status=http_status,
            param=param,
        )
    return msgspec.json.decode(value, type=Kept)


def _status(kept: Kept) -> _Status:
    return msgspec.json.decode(kept.response, type=_Status)


def _in_background(
    service: Service, answer: ResponseAnswer, keeper: _Keeper, num_prompt: int
) -> Response:
    """Let it in before it is promised: a refusal is the answer to this request."""
    if service.shelf is None:
        raise RequestError(
            "background needs stored responses, and none are stored here "
            "(--max-stored-responses 0); leave background out.",
            param="background",
        )
    if len(service.background) >= MAX_BACKGROUND:
        raise CapacityError(
            f"{MAX_BACKGROUND} responses run in the background already; try again later, or "
            "without background."
        )
    arrival().admission = service.let_in([num_prompt])
    keeper.keep(answer)
    if not answer.is_stored:
        _turn_away()
        raise RequestError(
            "This response cannot be stored, so nobody could fetch it; leave background out.",
            param="background",
        )
    begun = answer.value()
    task = asyncio.create_task(_compute(service.shelf, answer))
    service.background.add(task)
    task.add_done_callback(service.background.discard)
    return _json(json_bytes(begun))


async def _compute(shelf: Shelf, answer: ResponseAnswer) -> None:
    """Compute it as long as it is wanted: neither deleted, nor cancelled, nor pushed off the
    shelf."""
    work = asyncio.create_task(_in_time(answer))
    try:
        while not (await asyncio.wait((work,), timeout=POLL_S))[0]:
            if not shelf.is_wanted(_name(answer.response_id)):
                work.cancel()
        work.result()
    except asyncio.CancelledError:
        if shelf.get(_name(answer.response_id)) is not None:
            answer.cancel()
    except TetradError as error:
        answer.fail(str(error))
    except Exception:
        answer.fail("The server failed on this response; its log says why.")
        raise
    finally:
        work.cancel()
        _turn_away()


def _turn_away() -> None:
    """Who was let in and never began leaves."""
    if (admission := arrival().admission) is not None:
        arrival().admission = None
        admission.leave()


async def _in_time(answer: ResponseAnswer) -> None:
    async with in_time():
        await answer.whole()


async def fetch(service: Service, request: Request) -> Response:
    """Get a stored response as it is now."""
    if request.query_params.get("stream") == "true":
        raise RequestError(
            "A stored response cannot be streamed again; fetch it without stream.", param="stream"
        )
    kept = _kept(service.shelf, request.path_params["response_id"], "response_id")
    return _json(kept.response)


async def cancel(service: Service, request: Request) -> Response:
    """Cancel a response in the background; one that has ended stays as it is."""
    response_id = request.path_params["response_id"]
    kept = _kept(service.shelf, response_id, "response_id")
    if not _status(kept).background:
        raise RequestError(
            "Only a response in the background can be cancelled; close the connection of any "
            "other.",
            param="response_id",
        )
    assert service.shelf is not None
    service.shelf.mark(_name(response_id))
    deadline = asyncio.get_running_loop().time() + CANCEL_WAIT_S
    while _status(kept).status == "in_progress" and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(POLL_S / 4)
        kept = _kept(service.shelf, response_id, "response_id")
    return _json(kept.response)


async def delete(service: Service, request: Request) -> Response:
    """Delete a stored response; one in the background is cancelled."""
    response_id = request.path_params["response_id"]
    _kept(service.shelf, response_id, "response_id")
    assert service.shelf is not None
    service.shelf.drop(_name(response_id))
    return _json(json_bytes({"id": response_id, "object": "response", "deleted": True}))


def _json(raw: bytes | msgspec.Raw) -> Response:
    return Response(bytes(raw), media_type="application/json")
