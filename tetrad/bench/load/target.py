"""The server under load: is it there, what does it call its model, what does it say of itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from tetrad.bench.load.client import Client, in_words
from tetrad.bench.load.judge import error_message
from tetrad.bench.workload.tokens import has_tokenizer
from tetrad.core.errors import BenchFailure, ConfigError
from tetrad.core.option import KEY_PLACES

POLL_S = 1.0


@dataclass(frozen=True, slots=True)
class Target:
    """What the server said of itself before the run."""

    model: str | None
    """First model of /v1/models, None where the server has no such route."""
    tokenizer: Path | None
    """Folder of the tokenizer, or GGUF file, when it is on this machine."""
    silence: str = ""
    """Why nothing is known: what went wrong when it was asked."""


async def find(client: Client, patience_s: float, say: Callable[[str], None]) -> Target:
    """Wait until the server is ready; `say` hears what for, once. Raises BenchFailure when it never
    is, unless there is no patience at all: then the run may start and count its failures. Raises
    ConfigError at once for a host that nobody knows: waiting brings none."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience_s
    is_told = False
    while True:
        try:
            return await _describe(client)
        except aiohttp.ClientConnectorDNSError as error:
            raise ConfigError(
                f"There is no host {error.host!r} ({client.url}); name another server with "
                "--base-url or --host and --port."
            ) from None
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            if loop.time() >= deadline:
                silence = nobody(client.url, in_words(error))
                if patience_s == 0:
                    return Target(None, None, silence)
                raise BenchFailure(silence) from error
            if not is_told:
                say(
                    f"waiting up to {patience_s:g} s (--ready-check-timeout-sec) for a server at "
                    f"{client.url}: {in_words(error)}"
                )
                is_told = True
        await asyncio.sleep(min(POLL_S, max(0.0, deadline - loop.time())))


def nobody(url: str, why: str) -> str:
    """The sentence for a server that does not answer."""
    return (
        f"No server answers at {url}: {why}. Start one with `tetrad serve`, or give another "
        "address."
    )


async def _describe(client: Client) -> Target:
    first = _first_model(await get_json(client, "/v1/models") or {})
    info = await get_json(client, "/model_info") or {}
    named = info.get("tokenizer_path") or info.get("model_path") or first.get("root")
    folder = Path(str(named)) if named else None
    is_here = folder is not None and has_tokenizer(folder)
    name = first.get("id")
    return Target(name if isinstance(name, str) else None, folder if is_here else None)


def _first_model(models: dict[str, Any]) -> dict[str, Any]:
    """The first entry of the list of models; empty when the answer is no such list."""
    listed = models.get("data")
    first = listed[0] if isinstance(listed, list) and listed else None
    return first if isinstance(first, dict) else {}


async def get_json(client: Client, path: str) -> dict[str, Any] | None:
    """The JSON object at `path`; None where the server has none. Raises what the transport does,
    ConnectionError while the server is starting, ConfigError when it wants a key."""
    async with client.session.get(client.url + path, allow_redirects=False) as answer:
        body = await answer.read()
        elsewhere = answer.headers.get("Location", "")
    if answer.status in (401, 403):
        raise ConfigError(f"{client.url} wants an API key; give it with {KEY_PLACES}.")
    if 300 <= answer.status < 400:
        raise ConfigError(
            f"{client.url} sends whoever asks to {elsewhere or 'another address'} (HTTP "
            f"{answer.status}); give the address where it answers itself."
        )
    if answer.status == 503:
        raise ConnectionError(f"HTTP 503 at {path}: {error_message(body)}")
    if answer.status != 200:
        return None
    try:
        parsed = json.loads(body)
    except ValueError:
        return None
    return parsed if isinstance(parsed, dict) else None


async def server_info(client: Client) -> dict[str, Any] | None:
    """/server_info after the run; None when it cannot be had, which spoils no figure."""
    try:
        return await get_json(client, "/server_info")
    except (aiohttp.ClientError, OSError, TimeoutError, ConfigError):
        return None


async def flush_cache(client: Client, timeout_s: float) -> None:
    """Empty the prefix cache, by SGLang's route or vLLM's. Raises when the server has neither or
    refuses."""
    for path in (f"/flush_cache?timeout={timeout_s:g}", "/reset_prefix_cache"):
        async with client.session.post(client.url + path, allow_redirects=False) as answer:
            body = await answer.read()
        if 200 <= answer.status < 300:
            return
        if answer.status not in (404, 405):
            raise BenchFailure(f"The server did not flush its cache: {error_message(body)}")
    raise ConfigError(
        f"--flush-cache: {client.url} has neither /flush_cache nor /reset_prefix_cache; leave the "
        "flag out (generated prompts are fresh for every run all the same)."
    )
