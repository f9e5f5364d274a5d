"""Reading event streams in tests."""

from __future__ import annotations

import json
from typing import Any


def events(text: str) -> list[Any]:
    """The JSON of each event; checks that each is one line and that [DONE] comes last."""
    assert text.endswith("\n\n")
    lines = text.removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def named_events(text: str) -> list[Any]:
    """The JSON of each event of a stream whose events have names; checks that each is named after
    its type."""
    assert text.endswith("\n\n")
    parsed = []
    for lines in text.removesuffix("\n\n").split("\n\n"):
        name, data = lines.split("\n")
        parsed.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {parsed[-1]['type']}"
    return parsed
