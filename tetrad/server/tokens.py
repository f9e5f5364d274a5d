"""POST /tokenize and /detokenize, as vLLM and SGLang have them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tetrad.server.bodies import Body, read_body
from tetrad.server.protocol import Message, Texts, TokenId
from tetrad.server.service import Service

MAX_TOKENS = 1 << 20


class TokenizeBody(Body):
    """Either `prompt`, a text or several, or `messages`."""

    model: str | None = None
    prompt: str | Texts | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
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
    tokens: Annotated[list[TokenId], Field(max_length=MAX_TOKENS, fail_fast=True)]
    skip_special_tokens: bool = False


async def tokenize(service: Service, request: Request) -> Response:
    """Token ids of a text, of several, or of messages as the chat template renders them."""
    body = await read_body(request, TokenizeBody)
    model, context_tokens = service.model, service.engine.info["context_length"]
    model.check_name(body.model)
    texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    if body.messages is not None:
        texts = [model.render([message.for_template() for message in body.messages], None, {})]
    assert texts is not None
    ids = await model.encode(
        texts,
        add_special_tokens=body.add_special_tokens and body.messages is None,
        context_tokens=context_tokens,
    )
    is_one = not isinstance(body.prompt, list)
    counts = [len(each) for each in ids]
    return JSONResponse(
        {
            "tokens": ids[0] if is_one else ids,
            "count": counts[0] if is_one else counts,
            "max_model_len": context_tokens,
        }
    )


async def detokenize(service: Service, request: Request) -> Response:
    """The text of token ids: `prompt` for vLLM's clients, `text` for SGLang's."""
    body = await read_body(request, DetokenizeBody)
    model = service.model
    model.check_name(body.model)
    hidden = model.hidden_ids(skip_special=body.skip_special_tokens)
    text = model.tokenizer.decode(token for token in body.tokens if token not in hidden)
    return JSONResponse({"prompt": text, "text": text})
