"""Events encoded but for their text."""

from __future__ import annotations

import pytest

from tetrad.server.wire.encoding import TextEvent, event


@pytest.mark.parametrize(
    "text", ["", "a", 'say "hi"\n', "\\", "\x00\x1f", "é 漢 🙂", "</think>", "\u2028"]
)
def test_the_bytes_are_those_of_the_whole_event(text: str):
    def value(text: str) -> dict[str, object]:
        return {"id": 'x"y', "choices": [{"text": text, "finish": None}], "model": "m"}

    assert TextEvent(value)(text) == event(value(text))
