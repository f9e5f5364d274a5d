"""How long /health takes on a new connection while few clients ask for much (`health.py`: while
many ask for little).

Starts `tetrad serve --load-format null` with one API process. Other clients ask again and again for
the largest events, answers and bodies there are, so many at once, read all and look at nothing.

    python benchmarks/health_heavy.py --cases events bodies --clients 8 64 --seconds 10
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from health import null_server, probe, told

READ_BYTES = 1 << 20
PROBE_PERIOD_S = 0.01
CONTEXT = 200_000
BEGIN_S = 1.0
"""Between the first request and the first probe."""

Call = tuple[str, dict[str, Any] | bytes | None]
"""Path and body; without one it is a GET."""


def native(num_tokens: int, **fields: Any) -> Call:
    """With all that it can tell of each token."""
    sampling = {"max_new_tokens": num_tokens, "ignore_eos": True, **fields.pop("sampling", {})}
    asked = {"return_logprob": True, "top_logprobs_num": 20}
    prompt = {} if "input_ids" in fields or "text" in fields else {"text": "3"}
    return "/generate", asked | prompt | {"sampling_params": sampling} | fields


def openai(path: str, num_tokens: int, **fields: Any) -> Call:
    asked = {"max_tokens": num_tokens, "ignore_eos": True}
    return path, asked | fields


MESSAGES = [{"role": "user", "content": "3"}]
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
LOGPROBS = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 20}


def cases() -> dict[str, tuple[Call, ...]]:
    """What is asked for in each, in turn."""
    many_ids = [3 + i % 1000 for i in range(500_000)]
    escaped = b'{"text": "' + b"\\u4e2d\\n" * 1_000_000 + b'"}'
    long = json.dumps({"text": "\u4e2d\u00e9" * 6_000_000}, ensure_ascii=False).encode()
    messages = [{"role": "user", "content": "3"} for _ in range(8_000)]
    return {
        "events": (native(4000, stream=True),),
        "events of choices": (native(2000, stream=True, sampling={"n": 8}),),
        "answers": (native(2000),),
        "batches": (native(64, text=["3"] * 500),),
        "chats": (openai(CHAT, 2000, **LOGPROBS),),
        "chats of choices": (openai(CHAT, 200, **LOGPROBS, n=64),),
        "completions": (openai(COMPLETIONS, 64, prompt=["3"] * 500, logprobs=20),),
        "responses": ((RESPONSES, {"input": "3 " * 70_000, "max_output_tokens": 4000}),),
        "ids": (("/generate", {"input_ids": many_ids}),),
        "texts": (("/generate", escaped), ("/generate", long)),
        "messages": (openai(CHAT, 16, messages=messages),),
        "prompts": (openai(COMPLETIONS, 1, prompt=[many_ids[:500]] * 1000),),
        "long prompts": (openai(COMPLETIONS, 1, prompt=many_ids[:120_000]),),
        "tokenize": (
            ("/tokenize", {"prompt": "one two 3 " * 200_000}),
            ("/detokenize", {"tokens": many_ids[:260_000]}),
        ),
        "pages": (("/metrics", None), ("/openapi.json", None)),
    }


def raw(call: Call) -> bytes:
    """The request, on a connection of its own."""
    path, body = call
    head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: x\r\nConnection: close"
    content = (
        body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    )
    return f"{head}\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content


async def ask(port: int, requests: Sequence[bytes], begin_at: int, count: list[int]) -> None:
    """One after the other, for ever. `count`: answers, bytes of them, those that were refused."""
    for number in itertools.count(begin_at):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=READ_BYTES)
        writer.write(requests[number % len(requests)])
        status = await reader.read(READ_BYTES)
        size = len(status)
        count[2] += not status.startswith(b"HTTP/1.1 200")
        while piece := await reader.read(READ_BYTES):
            size += len(piece)
            count[1] += len(piece)
        writer.close()
        count[0] += 1
        if size == 0:
            await asyncio.sleep(0.1)


def load(port: int, requests: Sequence[bytes], num_clients: int, lead: Connection) -> None:
    """So many clients, until told to end; then say what came."""

    async def run() -> None:
        count = [0, 0, 0]
        loop = asyncio.get_running_loop()
        clients = [loop.create_task(ask(port, requests, i, count)) for i in range(num_clients)]
        lead.send("begun")
        while not lead.poll():
            await asyncio.sleep(0.05)
            for client in clients:
                if client.done():
                    client.result()
        lead.send(count)

    asyncio.run(run())


def measure(name: str, num_clients: int, options: argparse.Namespace) -> str:
    """One row of the table."""
    with null_server(options.step_ms, 1, "--context-length", str(CONTEXT)) as (port, _):
        ours, theirs = multiprocessing.Pipe()
        requests = [raw(call) for call in cases()[name]]
        reader = multiprocessing.Process(target=load, args=(port, requests, num_clients, theirs))
        reader.start()
        ours.recv()
        time.sleep(BEGIN_S)
        begun = time.monotonic()
        found = probe(port, lambda: time.monotonic() > begun + options.seconds, PROBE_PERIOD_S)
        ours.send("end")
        num_answers, num_bytes, num_refused = ours.recv()
        took_s = time.monotonic() - begun
        reader.terminate()
        reader.join()
    return (
        f"{name:18s} {num_clients:7d} {num_answers / took_s:9.1f} {num_bytes / took_s / 1e6:8.1f} "
        f"{num_refused:8d} {told(found)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", nargs="+", choices=cases(), default=list(cases()))
    parser.add_argument("--clients", type=int, nargs="+", default=[8])
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    lines = [
        f"/health on {cores} cores, load average {os.getloadavg()[0]:.1f} before; steps of "
        f"{given.step_ms:g} ms, {given.seconds:g} s each; times in ms",
        "case               clients answers/s     MB/s  refused  probes   median      p99  longest",
    ]
    print("\n".join(lines))
    for name in given.cases:
        for num_clients in given.clients:
            lines.append(measure(name, num_clients, given))
            print(lines[-1], flush=True)
    if given.output:
        given.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
