"""An engine without a model: it says what a script tells it, and remembers who it still holds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from tetrad.core.errors import EngineDiedError, TetradError
from tetrad.core.limits import Limits
from tetrad.core.messages import EngineStats, LogSettings, Reply
from tetrad.core.request import Finish, Request, RequestOutput, TokenLogprob
from tetrad.engine.admission import check_request
from tetrad.engine.sinks import Sink

VOCAB = 512
EOS = 498
"""<|user|> of the embedded tokenizer."""


@dataclass(frozen=True)
class Step:
    """What one step gives a request."""

    token_ids: tuple[int, ...]
    finish: Finish | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    """Others than the usual ones, if asked for."""


Script = Callable[[Request], Sequence[Step]]


def saying(token_ids: Sequence[int], num_per_step: int = 1) -> Script:
    """Say these tokens, then the end token; obeys max_new_tokens and ignore_eos."""

    def script(request: Request) -> list[Step]:
        most = request.sampling.max_new_tokens
        ids = [*token_ids, *([] if request.sampling.ignore_eos else [EOS])]
        while request.sampling.ignore_eos and len(ids) < most:
            ids += token_ids
        is_cut = len(ids) > most or request.sampling.ignore_eos
        finish = Finish("length") if is_cut else Finish("stop", matched_token=EOS)
        ids = ids[:most]
        pieces = [tuple(ids[i : i + num_per_step]) for i in range(0, len(ids), num_per_step)]
        steps = [Step(piece) for piece in pieces]
        return [*steps[:-1], Step(pieces[-1], finish)]

    return script


def echo(request: Request) -> list[Step]:
    """Say the prompt."""
    return list(saying(request.prompt_ids)(request))


class FakeEngine:
    """An `EnginePort`. Set `script`; while `gate` is clear, no step runs."""

    def __init__(self, script: Script = echo, **info: Any) -> None:
        self.script = script
        self.info: dict[str, Any] = {
            "context_length": 256,
            "max_total_tokens": 4096,
            "max_running_requests": 4,
            "memory": {"weight_bytes": 2_500_000, "cache_bytes": 2**30, "free_bytes": 2**31},
            "load_s": 0.44,
            "read_gb_per_s": 1.234,
            "weights": {
                "nvfp4": {"memory_bytes": 1500, "stored_bytes": 400},
                "bf16": {"memory_bytes": 2_498_500, "stored_bytes": 2_498_500},
            },
            "device": {"name": "abacus", "kind": "cpu", "memory_bytes": 8_000_000_000},
            "dtype": "float32",
            "mem_fraction_static": 0.3,
            "moe_runner_backend": "torch",
            "graph_sizes": {"short": [1, 2], "sparse": [2, 4]},
            "graph_bytes": 2**29,
            "cache_sentence": "4096 tokens (1.07 GB), all that memory leaves",
            "kv_cache_dtype": "float32",
            "memory_statement": ["8 GB: 2.5 MB weights", "4 requests at once, as asked"],
            "backends": [
                {"op": "rope", "backend": "torch", "reason": "", "refusals": {}},
                {"op": "mla", "backend": "torch", "reason": "", "refusals": {"beads": "no wire."}},
            ],
        } | info
        self.stats = EngineStats(total_pages=64, preemptions_total=3, new_token_ratio=0.25)
        self.last_beat_age_s = 0.0
        self.step_age_s = 0.0
        self.died: asyncio.Future[EngineDiedError] = asyncio.get_running_loop().create_future()
        self.gate = asyncio.Event()
        self.gate.set()
        self.step_s = 0.0
        """Pause between steps."""
        self.live: dict[str, Request] = {}
        self.seen: list[Request] = []
        self.aborted: list[str] = []
        self.flush_reply = (True, "")
        self.is_stopped = False
        self.asked: list[tuple[str, dict[str, Any]]] = []
        """Orders of the operator."""
        self.reply = Reply(0, ok=True, text="done", data={"num_aborted": 2})
        self._pushing: set[asyncio.Task[None]] = set()
        self.on_log_settings: Callable[[LogSettings], None] | None = None

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        check_request(request, self._limits())
        self.seen.append(request)
        self.live[request.rid] = request
        is_over = False
        try:
            for step in self.script(request):
                await self._step()
                is_over = step.finish is not None
                yield self._output(request, step)
        except EngineDiedError:
            is_over = True
            raise
        finally:
            del self.live[request.rid]
            if not is_over:
                self.aborted.append(request.rid)

    def begin(self, request: Request, sink: Sink) -> Callable[[], None]:
        """Tell `sink` what `generate` gives, plain tokens as such."""
        task = asyncio.create_task(self._push(request, sink))
        self._pushing.add(task)
        task.add_done_callback(self._pushing.discard)
        return task.cancel  # type: ignore[return-value]

    async def _push(self, request: Request, sink: Sink) -> None:
        has_begun = False
        try:
            async with aclosing(self.generate(request)) as outputs:
                async for output in outputs:
                    is_more = output.finish or output.logprobs or len(output.token_ids) != 1
                    if has_begun and not is_more:
                        sink.take_tokens(output.token_ids)
                    else:
                        sink.take(output)
                    has_begun = True
        except TetradError as error:
            sink.fail(error)

    def add_worker(self, worker: int) -> str:
        """Nobody can speak to it from another process."""
        return "/nowhere"

    def remove_worker(self, worker: int) -> None:
        pass

    async def end_stuck(self) -> None:
        pass

    async def flush_cache(self) -> tuple[bool, str]:
        return self.flush_reply

    async def ask(self, name: str, **arguments: Any) -> Reply:
        self.asked.append((name, arguments))
        return self.reply

    async def state(self) -> dict[str, Any]:
        return {"integrity": "ok"}

    async def stop(self) -> None:
        self.is_stopped = True
        self.kill("The engine was stopped.")

    def kill(self, reason: str) -> None:
        """Everyone who waits, and everyone who comes, gets this."""
        if not self.died.done():
            self.died.set_result(EngineDiedError(reason))
        self.gate.set()

    async def _step(self) -> None:
        await asyncio.sleep(self.step_s)
        await self.gate.wait()
        if self.died.done():
            raise self.died.result()

    def _limits(self) -> Limits:
        return Limits(
            num_pages=self.info["max_total_tokens"] // 64,
            max_running_requests=self.info["max_running_requests"],
            step_tokens=256,
            context_tokens=self.info["context_length"],
            vocab=VOCAB,
            eos_ids=(EOS,),
        )

    @staticmethod
    def _output(request: Request, step: Step) -> RequestOutput:
        num_top = request.sampling.num_logprobs
        logprobs: tuple[TokenLogprob, ...] = ()
        if num_top is not None:
            logprobs = tuple(
                TokenLogprob(i, -0.5, tuple((top, -0.5 - top) for top in range(num_top)))
                for i in step.token_ids
            )
            logprobs = step.logprobs or logprobs
        return RequestOutput(
            request.rid,
            step.token_ids,
            logprobs,
            step.finish,
            prompt_tokens=len(request.prompt_ids),
            cached_tokens=3,
        )
