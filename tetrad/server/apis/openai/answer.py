"""What the answers of OpenAI's chat and completions share."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Generic, TypeVar

from tetrad.server.apis.openai.protocol import OpenAIBody
from tetrad.server.apis.openai.usage import usage
from tetrad.server.service import Service
from tetrad.server.stream.choices import Choice, pieces
from tetrad.server.stream.push import Outlet, Renderer
from tetrad.server.stream.session import ChoiceFinish
from tetrad.server.wire.encoding import event

B = TypeVar("B", bound=OpenAIBody)


class OpenAIAnswer(ABC, Generic[B]):
    """One answer, streamed or whole."""

    def __init__(
        self, service: Service, body: B, head: dict[str, Any], choices: Sequence[Choice], route: str
    ) -> None:
        """`head`: what each object of the answer begins with, but for when and of which model."""
        self._service = service
        self._body = body
        self._choices = choices
        self._route = route
        self._head = head | {"created": int(time.time()), "model": service.model.name}

    async def events(self, outlet: Outlet | None) -> AsyncGenerator[bytes, None]:
        """Chunks, as events."""
        found = pieces(self._service, self._route, self._choices, outlet, *self._renderer())
        async with aclosing(found) as events:
            async for piece in events:
                yield piece
        if self._body.include_usage:
            yield event(self._head | {"choices": [], "usage": self._usage()})

    @abstractmethod
    async def whole(self) -> dict[str, Any]:
        """The complete answer."""

    @abstractmethod
    def _renderer(self) -> Renderer:
        """What makes an event of a delta, and of its text alone."""

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        """An object of a stream."""
        end: dict[str, Any] = {}
        if self._body.include_usage:
            end["usage"] = self._usage() if self._body.has_running_usage else None
        return self._head | {"choices": [choice]} | end

    def _end(self, finish: ChoiceFinish | None) -> dict[str, Any]:
        """Why a choice ended: OpenAI's field, SGLang's and vLLM's, which does not name the model's
        own end tokens. Chunks before the last have OpenAI's alone."""
        if finish is None:
            return {"finish_reason": None}
        matched = finish.matched
        is_asked = isinstance(matched, str) or matched in (self._body.stop_token_ids or ())
        return {
            "finish_reason": finish.reason,
            "matched_stop": matched,
            "stop_reason": matched if is_asked else None,
        }

    def _usage(self) -> dict[str, Any]:
        num_prompts = sum(choice.is_first for choice in self._choices)
        return usage(self._choices, len(self._choices) // num_prompts)
