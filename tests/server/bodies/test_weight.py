"""Bodies that would take long to read, or too much memory together, are refused before."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.server.test_bad_input import CHAT, COMPLETIONS, USER, json_values, sentence
from tetrad.core.errors import CapacityError
from tetrad.server.bodies import weight
from tetrad.server.bodies.weight import (
    HELD,
    LIGHT_BYTES,
    MAX_ESCAPES,
    MAX_NESTS,
    MAX_VALUES,
    Held,
    count,
)

FILL = " " * LIGHT_BYTES


def nests_and_commas(value: Any) -> tuple[int, int]:
    """Counted on the value itself."""
    if not isinstance(value, dict | list):
        return 0, 0
    inner = [
        nests_and_commas(each) for each in (value.values() if isinstance(value, dict) else value)
    ]
    return 1 + sum(n for n, _ in inner), max(0, len(value) - 1) + sum(c for _, c in inner)


def counts(text: str) -> tuple[int, int, int]:
    """What `count` is to find in the JSON of a value."""
    return *nests_and_commas(json.loads(text)), text.count("\\")


@given(json_values, st.integers(1, 9))
def test_what_is_counted_is_what_is_there(value: Any, piece_bytes: int):
    """Whatever strings hold, and wherever a piece ends."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight, "PIECE_BYTES", piece_bytes)
        for text in (json.dumps(value), json.dumps(value, ensure_ascii=False)):
            assert count(text.encode("utf-8", "surrogatepass")) == counts(text)


@given(st.lists(st.text(st.sampled_from('\\"{[,a'), max_size=12), max_size=6))
def test_quotes_and_backslashes_are_no_obstacle(texts: list[str]):
    for piece_bytes in range(1, 8):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(weight, "PIECE_BYTES", piece_bytes)
            assert count(json.dumps(texts).encode()) == counts(json.dumps(texts))


async def test_bodies_of_too_many_parts(client: httpx.AsyncClient):
    many = [{"role": "user", "content": "x"}] * MAX_NESTS
    message = sentence(await client.post(CHAT, json={"messages": many}), 413)
    assert f"{MAX_NESTS + 2} objects and lists" in message
    message = sentence(await client.post(COMPLETIONS, json={"prompt": [3] * (MAX_VALUES + 1)}), 413)
    assert f"{MAX_VALUES + 1} values" in message
    escapes = b'{"prompt": "' + b"\\n" * (MAX_ESCAPES + 1) + b'"}'
    message = sentence(await client.post(COMPLETIONS, content=escapes), 413)
    assert f"{MAX_ESCAPES + 1} backslashes" in message
    text = "{[,]}" * MAX_VALUES
    assert "characters" in sentence(await client.post(COMPLETIONS, json={"prompt": text}))
    assert HELD.total_bytes == 0


def test_memory_of_all_bodies_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(weight, "MAX_HELD_BYTES", 10 * LIGHT_BYTES)
    held = Held()
    held.grow(0, LIGHT_BYTES)
    assert held.total_bytes == 0
    held.grow(LIGHT_BYTES, 9 * LIGHT_BYTES)
    held.grow(0, LIGHT_BYTES)
    with pytest.raises(CapacityError, match="other large bodies"):
        held.grow(LIGHT_BYTES, 2 * LIGHT_BYTES)
    held.drop(LIGHT_BYTES)
    held.drop(9 * LIGHT_BYTES)
    assert held.total_bytes == 0


async def test_a_body_too_many_is_told_to_come_again(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(weight, "MAX_HELD_BYTES", LIGHT_BYTES)
    response = await client.post(CHAT, json={"messages": USER, "user": FILL})
    assert "try again later" in sentence(response, 503)
    assert response.headers["retry-after"]
    assert (await client.post(CHAT, json={"messages": USER})).status_code == 200
    assert HELD.total_bytes == 0


async def test_what_is_held_is_given_back(client: httpx.AsyncClient):
    assert (await client.post(CHAT, json={"messages": USER, "user": FILL})).status_code == 200
    sentence(await client.post(CHAT, content=f"{FILL}]".encode()))
    assert HELD.total_bytes == 0


async def test_short_bodies_of_too_many_parts(client: httpx.AsyncClient):
    """To tell what is wrong with each takes longer than whatever else fits into 128 KiB."""
    many = ",".join(["[      ]"] * (MAX_NESTS + 1))
    assert len(many) < 1 << 17
    answer = await client.post(CHAT, content=f'{{"messages": [{many}]}}')
    assert f"{MAX_NESTS + 3} objects and lists" in sentence(answer, 413)
