"""The HTTP conversation of `sglang.bench_serving --backend sglang`, request by request.

benchmarks/sglang_client.py runs the real one, which needs an environment of its own.
"""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from typing import Any

import aiohttp
from tokenizers import Tokenizer

from tests.e2e.conftest import Served

NUM_PROMPTS = 12
OUTPUT_TOKENS = 16


def payload(text: str, output_tokens: int) -> dict[str, Any]:
    """Exactly the fields that sglang 0.5.23 sends."""
    return {
        "text": text,
        "sampling_params": {
            "temperature": 0.0,
            "max_new_tokens": output_tokens,
            "ignore_eos": True,
        },
        "stream": True,
        "lora_path": None,
        "return_logprob": False,
        "return_routed_experts": False,
        "logprob_start_len": -1,
    }


async def generate(session: aiohttp.ClientSession, url: str, body: dict[str, Any]):
    """Read the stream line by line as that client does; gives every event's object."""
    events = []
    async with session.post(f"{url}/generate", json=body) as answer:
        assert answer.status == 200
        async for raw in answer.content:
            line = raw.strip()
            if not line:
                continue
            assert line.startswith(b"data: "), "an event must be one line"
            data = line.removeprefix(b"data: ")
            if data != b"[DONE]":
                events.append(json.loads(data))
    return events


async def test_the_whole_sequence(served: Served):
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{served.url}/v1/models") as answer:
            assert answer.status == 200
            assert (await answer.json())["data"][0]["id"] == "abacus"
        async with session.get(f"{served.url}/model_info") as answer:
            folder = (await answer.json())["tokenizer_path"]
        tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
        (warm,) = [await generate(session, served.url, payload("warm-up", 8))]
        assert warm[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 8}
        async with session.post(f"{served.url}/flush_cache?timeout=60") as answer:
            assert answer.status == 200
            assert (await answer.text()).startswith("Cache flushed.")
        texts = [f"{i}+{i}=" * (i + 1) for i in range(NUM_PROMPTS)]
        results = await asyncio.gather(
            *(generate(session, served.url, payload(t, OUTPUT_TOKENS)) for t in texts)
        )
        for text, events in zip(texts, results, strict=True):
            check_events(events, len(tokenizer.encode(text, add_special_tokens=False).ids))
        async with session.get(f"{served.url}/server_info") as answer:
            info = await answer.json()
    assert info["internal_states"][0]["effective_max_running_requests_per_dp"] == 64
    assert {row["op"] for row in info["engine"]["backends"]} >= {"mla", "experts"}


def check_events(events: list[dict[str, Any]], num_prompt: int) -> None:
    """Counts grow to the wanted number, text grows too, the end says why."""
    counts = [event["meta_info"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == OUTPUT_TOKENS
    for before, after in pairwise(events):
        assert after["text"].startswith(before["text"])
    last = events[-1]["meta_info"]
    assert last["finish_reason"] == {"type": "length", "length": OUTPUT_TOKENS}
    assert last["prompt_tokens"] == num_prompt
    assert last["e2e_latency"] > 0
    assert all(event["meta_info"]["finish_reason"] is None for event in events[:-1])


async def test_token_ids_and_text_give_the_same(served: Served):
    folder = served.get("/model_info")["tokenizer_path"]
    ids = Tokenizer.from_file(f"{folder}/tokenizer.json").encode("3+5=").ids
    async with aiohttp.ClientSession() as session:
        by_text = await generate(session, served.url, payload("3+5=", 8))
        body = payload("", 8)
        del body["text"]
        by_ids = await generate(session, served.url, {**body, "input_ids": ids})
    assert by_ids[-1]["text"] == by_text[-1]["text"]
    assert by_ids[-1]["output_ids"] == by_text[-1]["output_ids"]
