"""Many at once, some of whom leave: nothing leaks, and the others get what they would have got."""

from __future__ import annotations

import asyncio
import json
import random

import aiohttp

from tests.e2e.conftest import Served

NUM_STREAMS = 200
LEAVERS = 3
"""One in so many closes its connection midway."""
OUTPUT_TOKENS = 24


def body(index: int) -> dict[str, object]:
    """Some share a prefix longer than a page, so that the prefix cache takes part."""
    shared = [7 + index % 5] * 80 if index % 2 else []
    rng = random.Random(index)
    ids = [*shared, *(rng.randrange(5, 200) for _ in range(rng.randrange(1, 60)))]
    sampling = {"temperature": 0.0, "max_new_tokens": OUTPUT_TOKENS, "ignore_eos": True}
    return {"input_ids": ids, "sampling_params": sampling, "stream": True}


async def stream(session: aiohttp.ClientSession, url: str, index: int) -> list[int] | None:
    """Output ids of one request; None for one that left after its third event."""
    output: list[int] = []
    num_events = 0
    async with session.post(f"{url}/generate", json=body(index)) as answer:
        assert answer.status == 200
        async for raw in answer.content:
            data = raw.strip().removeprefix(b"data: ")
            if not data or data == b"[DONE]":
                continue
            event = json.loads(data)
            assert "error" not in event, event
            output = event["output_ids"]
            num_events += 1
            if index % LEAVERS == 0 and num_events == 3:
                answer.close()
                return None
    assert event["meta_info"]["finish_reason"]["type"] == "length"
    assert event["meta_info"]["completion_tokens"] == OUTPUT_TOKENS
    return output


async def test_a_third_of_200_clients_leaves_midway(served: Served):
    before = served.get("/server_info")["state"]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        streams = [stream(session, served.url, i) for i in range(NUM_STREAMS)]
        outputs = await asyncio.gather(*streams)
        left = sum(output is None for output in outputs)
        assert left == len(range(0, NUM_STREAMS, LEAVERS))
        state = await asyncio.to_thread(served.wait_idle)
        assert state["integrity"] == "ok"
        assert state["used_pages"] == 0
        generated = state["generated_tokens_total"] - before["generated_tokens_total"]
        assert generated < NUM_STREAMS * OUTPUT_TOKENS, "those who left were not aborted"
        alone = await stream(session, served.url, 1)
    assert alone == outputs[1], "a request in a crowd must get what it gets alone"
    async with aiohttp.ClientSession() as session, session.get(f"{served.url}/health") as answer:
        assert answer.status == 200


async def test_the_cache_can_be_flushed_to_the_last_page(served: Served):
    async with aiohttp.ClientSession() as session:
        await stream(session, served.url, 1)
    assert served.wait_idle()["cached_pages"] > 0
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{served.url}/flush_cache?timeout=10") as answer,
    ):
        assert answer.status == 200
    state = served.wait_idle()
    assert (state["cached_pages"], state["used_pages"], state["integrity"]) == (0, 0, "ok")
