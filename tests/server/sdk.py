"""What the tests with the official client libraries share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai

from tests.server.fake_engine import FakeEngine, saying
from tetrad.server.text.tokenizer import Tokenizer

REASON_TEXT_CALL = (
    "use it</think>Well.<tool_call>calculator"
    "<arg_key>expression</arg_key><arg_value>é+5</arg_value></tool_call>"
)
"""An answer with reasoning, text and a call."""


def openai_sdk(address: str) -> openai.AsyncOpenAI:
    """OpenAI's client; it tries nothing twice."""
    return openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=30)


def script(engine: FakeEngine, tokenizer: Tokenizer, text: str) -> None:
    """Have the engine say this."""
    engine.script = saying(tokenizer.encode(text, add_special_tokens=False))


async def exhaust(events: AsyncIterator[Any]) -> None:
    """Read to the end."""
    async for _ in events:
        pass
