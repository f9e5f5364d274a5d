"""Several load processes are one load: its order, its cap, its answers."""

from __future__ import annotations

import asyncio

import pytest

from tests.bench.mock_server import MockServer
from tests.bench.test_failures import config, prompts, run
from tetrad.bench.load.client import Load
from tetrad.bench.load.processes import automatic

__all__ = ["prompts"]


def test_the_number_follows_streams_and_leaves_half_of_the_cores():
    assert automatic(1, 64) == 1
    assert automatic(1024, 64) == 1
    assert automatic(1025, 64) == 2
    assert automatic(100_000, 64) == 32
    assert automatic(4096, 1) == 1


def test_slots_and_openers_of_a_load():
    load = Load("/", [b""] * 4, [0.0] * 4, after=[None, 0, None, 2], max_concurrency=9)
    assert (load.slots, load.openers) == (4, [0, 2])


async def test_two_processes_are_one_load(tmp_path):
    lines = tmp_path / "prompts.jsonl"
    lines.write_text("".join(f'{{"prompt": "number {i}", "output_len": 8}}\n' for i in range(40)))
    server = MockServer("error event", healthy=39)
    async with server.running() as url:
        result = await run(config(url, lines, workers=2, max_concurrency=5, output_details=True))
    assert (result.completed, result.failed, result.output_tokens) == (39, 1, 39 * 8)
    assert sorted(body["text"] for body in server.bodies) == sorted(
        f"number {i}" for i in range(40)
    )
    assert [record.index for record in result.requests] == list(range(40))
    assert 2 <= result.peak_concurrency <= 5
    assert result.client is not None
    assert result.client.processes == 2
    assert result.client.read_lag_ms.count == 39 * 8


async def test_an_interrupt_reaches_every_process(prompts):
    server = MockServer("hang", healthy=2)
    async with server.running() as url:
        task = asyncio.create_task(run(config(url, prompts, max_concurrency=2, workers=2)))
        while len(server.bodies) < 4:
            await asyncio.sleep(0.01)
        task.cancel()
        result = await task
    assert result.interrupted
    assert (result.completed, result.failed, result.unfinished) == (2, 0, 2)


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_connection_is_used_again(workers: int, tmp_path):
    """One for each slot, however many requests there are."""
    lines = tmp_path / "prompts.jsonl"
    lines.write_text('{"prompt": "What is 3+5?", "output_len": 8}\n' * 40)
    server = MockServer()
    async with server.running() as url:
        options = config(url, lines, workers=workers, max_concurrency=4)
        await run(options)
    assert len(server.bodies) == 40
    assert len(server.peers) == 4
