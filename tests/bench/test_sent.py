"""What really goes out: bodies against a golden file, conversations in order, headers."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.bench.mock_server import Body, MockServer
from tetrad.bench.load.backends import write_body
from tetrad.bench.options.serve import BenchServeConfig
from tetrad.bench.serve.run import bench_serve
from tetrad.bench.workload.datasets import build
from tetrad.bench.workload.requests import Seeds
from tetrad.bench.workload.tokens import Vocabulary
from tetrad.cli.narrator import Narrator
from tetrad.core.records import BenchRun
from tetrad.data import embedded_model

GOLDEN = Path(__file__).with_name("golden_bodies.json")
"""Written with `sent_by_all`; a change is a change of what every user sends."""

SMALL: dict[str, Any] = {
    "num_prompts": 2,
    "random_input_len": 12,
    "random_output_len": 6,
    "seed": 7,
}
GROUPS: dict[str, Any] = {
    "dataset_name": "generated-shared-prefix",
    "gsp_num_groups": 1,
    "gsp_prompts_per_group": 1,
    "gsp_system_prompt_len": 6,
    "gsp_question_len": 3,
    "gsp_output_len": 2,
    "gsp_num_turns": 2,
    "seed": 7,
}
CASES: dict[str, dict[str, Any]] = {
    "random-ids to /generate": SMALL,
    "random-ids to completions": SMALL | {"backend": "sglang-oai", "top_p": 0.9},
    "random-ids to chat": SMALL | {"backend": "vllm-chat", "return_logprob": True},
    "random": SMALL | {"dataset_name": "random", "disable_stream": True},
    "random as tokens": SMALL | {"dataset_name": "random", "tokenize_prompt": True},
    "random to openai": SMALL | {"dataset_name": "random", "backend": "openai"},
    "log-probabilities": SMALL
    | {"return_logprob": True, "top_logprobs_num": 3, "token_ids_logprob": (5,)},
    "turns to /generate": GROUPS,
    "turns to chat": GROUPS | {"backend": "sglang-oai-chat", "served_model_name": "other"},
}


def sent_by_all() -> dict[str, list[Body]]:
    """The bodies of every case, as JSON has them."""
    vocabulary = Vocabulary(embedded_model())
    sent = {}
    for name, options in CASES.items():
        config = BenchServeConfig.parse(options)
        prompts = build(config, Seeds.of(config), vocabulary)
        bodies = [write_body(config, "m", prompt) for prompt in prompts]
        sent[name] = json.loads(json.dumps(bodies))
    return sent


def test_bodies_are_those_of_the_golden_file():
    assert sent_by_all() == json.loads(GOLDEN.read_text())


async def run(url: str, **options) -> tuple[BenchRun, list[str]]:
    said: list[str] = []

    class Listener(Narrator):
        def say(self, line: str) -> None:
            said.append(line)

    base = {"base_url": url, "warmup_requests": 0, "tokenizer": embedded_model()}
    return await bench_serve(BenchServeConfig.parse(base | options), Listener(show_bar=False)), said


@pytest.mark.parametrize(("backend", "workers"), [("tetrad", 1), ("vllm-chat", 1), ("tetrad", 2)])
async def test_a_turn_leaves_when_the_one_before_has_ended(backend: str, workers: int):
    server = MockServer()
    options = GROUPS | {"gsp_prompts_per_group": 3, "gsp_num_turns": 3, "gsp_output_len": 4}
    async with server.running() as url:
        result, _ = await run(url, backend=backend, workers=workers, output_details=True, **options)
    assert (result.completed, result.failed) == (9, 0)
    by_index = {request.index: request for request in result.requests}
    for index in range(9):
        if index % 3:
            before, now = by_index[index - 1], by_index[index]
            assert now.due_s >= before.ended_s
            assert now.sent_s >= now.due_s
    sizes = [len(body.get("input_ids") or body["messages"]) for body in server.bodies]
    assert sorted(sizes) == sorted(([9, 16, 23] if backend == "tetrad" else [1, 3, 5]) * 3)


async def test_a_conversation_goes_on_after_a_failure():
    server = MockServer("http 500")
    async with server.running() as url:
        result, _ = await run(url, **(GROUPS | {"gsp_num_turns": 3}))
    assert (result.completed, result.failed) == (0, 3)


async def test_the_distribution_and_the_arrivals_that_ran_are_told():
    async with MockServer().running() as url:
        options = SMALL | {"num_prompts": 5, "random_range_ratio": 1.0, "rate_profile": ("40:1",)}
        result, said = await run(url, **options)
    assert "prompt lengths: 5 requests, 60 tokens, mean 12.0, min 12, median 12, max 12" in said
    assert "arrivals: Poisson, 40:1; the last of 5 is due at 0.10 s" in said
    assert result.workload.arrivals == "Poisson, 40:1"
    assert result.workload.request_rate == pytest.approx(40)


async def test_a_model_that_is_a_folder_is_the_tokenizer_too():
    folder = str(embedded_model())
    async with MockServer(models=()).running() as url:
        result, _ = await run(url, tokenizer=None, model=folder, **SMALL)
    assert (result.completed, result.model) == (2, folder)


@pytest.mark.parametrize(
    ("keys", "sent"),
    [
        ({"OPENAI_API_KEY": "a"}, "Bearer a"),
        ({"API_KEY": "b"}, "b"),
        ({"OPENAI_API_KEY": "a", "API_KEY": "b"}, "Bearer a"),
        ({"TETRAD_API_KEY": "c"}, "Bearer c"),
        ({"OPENAI_API_KEY": "a", "TETRAD_API_KEY": "c"}, "Bearer c"),
    ],
)
def test_keys_come_from_the_environment(keys, sent: str, monkeypatch):
    from tetrad.cli.main import app

    for name in ("TETRAD_API_KEY", "OPENAI_API_KEY", "API_KEY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in keys.items():
        monkeypatch.setenv(name, value)
    seen: list[BenchServeConfig] = []
    parse = BenchServeConfig.parse

    def parsed(values):
        seen.append(parse(values))
        raise KeyboardInterrupt

    monkeypatch.setattr(BenchServeConfig, "parse", parsed)
    with pytest.raises(KeyboardInterrupt):
        app(["bench", "serve", "--header", "X-Run=7"], exit_on_error=False, print_error=False)
    assert seen[0].headers == {"X-Run": "7", "Authorization": sent}


async def closes_after_each_answer(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """As llama.cpp does: an answer that promises to keep the connection, and then its end."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(re.findall(rb"(?i)content-length: (\d+)", head)[0] if b"ength" in head else 0)
    await reader.readexactly(length)
    end = json.dumps({"choices": [{"text": "a", "finish_reason": "length"}]}).encode()
    usage = json.dumps({"choices": [], "usage": {"completion_tokens": 1}}).encode()
    events = b"".join(b"data: " + event + b"\n\n" for event in (end, usage, b"[DONE]"))
    status = b"HTTP/1.1 200 OK" if length else b"HTTP/1.1 404 No"
    writer.write(
        status + b"\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
        b"Keep-Alive: timeout=5\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(events), events)
    )
    await writer.drain()
    writer.close()


async def test_a_connection_closed_under_the_next_request_is_no_failure(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a", "output_len": 1}\n' * 20)
    server = await asyncio.start_server(closes_after_each_answer, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        options = {"dataset_name": "custom", "dataset_path": path, "max_concurrency": 1}
        result, _ = await run(url, backend="llamacpp", model="m", **options)
    assert (result.completed, result.failed) == (20, 0)
    assert result.peak_concurrency == 1
