"""POST /tokenize and /detokenize, as vLLM and SGLang have them.

Both are work of the API process alone, which streams wait beside: what one request may ask for is
bounded, and what takes long is done in a thread.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from tetrad.core.errors import RequestError
from tetrad.server.bodies.chat_messages import Message
from tetrad.server.bodies.fields import Texts, TokenId
from tetrad.server.bodies.read import Body, read_body
from tetrad.server.service import Service
from tetrad.server.wire.encoding import json_bytes
from tetrad.server.wire.pace import beside, in_turn

MAX_TOKENS = 1 << 18
"""Of one request to /detokenize: more than any context."""
MAX_CHARACTERS = 1 << 21
"""Of all texts of one request to /tokenize."""
MANY_TOKENS, MANY_MESSAGES = 4096, 32
"""From there on a thread does it."""


class TokenizeBody(Body):
    """Either `prompt`, a text or several, or `messages`."""

    model: str | None = None
    """The served name, the model's folder or `default`; anything else is a 404. Default: the served
    model."""
    prompt: str | Texts | None = None
    """A text, or several; or else messages."""
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    """A conversation, as the chat template renders it."""
    add_special_tokens: bool = True
    """Those that the tokenizer puts around a text of its own; a chat template writes its own."""

    @model_validator(mode="after")
    def _has_one(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeBody(Body):
    """Token ids, vocabulary rows without a token among them."""

    model: str | None = None
    """The served name, the model's folder or `default`; anything else is a 404. Default: the served
    model."""
    tokens: Annotated[list[TokenId], Field(max_length=MAX_TOKENS, fail_fast=True)]
    """Token ids."""
    skip_special_tokens: bool = False
    """Leave special tokens out of the text."""


async def tokenize(service: Service, request: Request) -> Response:
    """Tokenize a text, several texts, or messages as the chat template renders them."""
    body = await read_body(request, TokenizeBody)
    model, context_tokens = service.model, service.engine.info["context_length"]
    model.check_name(body.model)
    texts = await _texts(service, body)
    if (length := sum(map(len, texts))) > MAX_CHARACTERS:
        raise RequestError(
            f"The texts have {length} characters together; one request may bring {MAX_CHARACTERS}.",
            param="prompt",
        )
    ids = await model.encode(
        texts,
        add_special_tokens=body.add_special_tokens and body.messages is None,
        context_tokens=context_tokens,
    )
    is_one = not isinstance(body.prompt, list)
    counts = [len(each) for each in ids]
    return await _json(
        {
            "tokens": ids[0] if is_one else ids,
            "count": counts[0] if is_one else counts,
            "max_model_len": context_tokens,
        }
    )


async def _texts(service: Service, body: TokenizeBody) -> list[str]:
    if body.messages is None:
        assert body.prompt is not None
        return [body.prompt] if isinstance(body.prompt, str) else body.prompt
    messages = body.messages

    def render() -> str:
        return service.model.render([message.for_template() for message in messages], None, {})

    return [await beside(render) if len(messages) > MANY_MESSAGES else render()]


async def detokenize(service: Service, request: Request) -> Response:
    """Turn token ids into text: `prompt` for vLLM's clients, `text` for SGLang's."""
    body = await read_body(request, DetokenizeBody)
    model = service.model
    model.check_name(body.model)
    if (largest := max(body.tokens, default=0)) >= model.arch.vocab:
        raise RequestError(
            f"tokens holds id {largest}; the model's ids go from 0 to {model.arch.vocab - 1}.",
            param="tokens",
        )
    hidden = model.hidden_ids(skip_special=body.skip_special_tokens)

    def decode() -> str:
        return model.tokenizer.decode(token for token in body.tokens if token not in hidden)

    is_long = len(body.tokens) > MANY_TOKENS
    text = await beside(decode) if is_long else decode()
    return await _json({"prompt": text, "text": text})


async def _json(value: object) -> Response:
    return Response(await in_turn(lambda: json_bytes(value)), media_type="application/json")
