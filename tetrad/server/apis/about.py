"""Routes that say what is served and how it does: models, configuration, health, metrics."""

from __future__ import annotations

import asyncio
import shlex
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

import tetrad
from tetrad.core.config import ServeConfig
from tetrad.core.errors import TetradError
from tetrad.core.option import secrets
from tetrad.core.request import Request as EngineRequest
from tetrad.core.request import SamplingParams, packed
from tetrad.server.apis.native.generate import WEIGHT_VERSION
from tetrad.server.engine_port import EnginePort
from tetrad.server.service import Service
from tetrad.server.stream.choices import new_id

HEALTH_GENERATE_TIMEOUT_S = 20.0
STATE_TIMEOUT_S = 5.0
LEAST_SECRET = 6
"""A shorter one would be found in half of all words."""


async def models(service: Service, _request: Request) -> Response:
    """List the one model that is served, as OpenAI's and Anthropic's clients read it."""
    name = service.model.name
    page = {"has_more": False, "first_id": name, "last_id": name}
    return JSONResponse({"object": "list", "data": [_model_card(service)], **page})


async def model(service: Service, request: Request) -> Response:
    """Get one model by its name."""
    name = request.path_params["name"]
    if name.rstrip("/") != service.model.name.rstrip("/"):  # the last of a path is never seen
        service.model.check_name(name)
    return JSONResponse(_model_card(service))


def _model_card(service: Service) -> dict[str, Any]:
    return {
        "id": service.model.name,
        "object": "model",
        "created": int(service.started_at),
        "type": "model",
        "display_name": service.model.name,
        "created_at": datetime.fromtimestamp(int(service.started_at), UTC).isoformat(),
        "owned_by": "tetrad",
        "root": str(service.model.folder),
        "parent": None,
        "max_model_len": service.engine.info["context_length"],
    }


async def model_info(service: Service, _request: Request) -> Response:
    """Describe the model, as SGLang does."""
    model = service.model
    return JSONResponse(
        {
            "model_path": str(model.folder),
            "served_model_name": model.name,
            "tokenizer_path": str(model.text_folder),
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": WEIGHT_VERSION,
            "load_format": "safetensors",
            "reasoning_parser": model.reasoning_parser,
            "tool_call_parser": model.tool_call_parser,
            "disaggregation_mode": "null",
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": model.arch.model_type,
            "architectures": list(model.architectures),
        }
    )


async def server_info(service: Service, _request: Request) -> Response:
    """Describe the server: its resolved options, what the engine chose and why, its state now."""
    engine = service.engine
    info = {
        **_resolved(service),
        "model_path": str(service.model.folder),
        "tokenizer_path": str(service.model.text_folder),
        "api_key_required": service.keys.are_for_users,
        "launch_command": shlex.join(_without_secrets(service)),
        "version": tetrad.__version__,
        "startup_time": service.startup_s,
        "frontend": "python",
        "scheduler_info": {
            "status": service.phase,
            "max_total_num_tokens": engine.info["max_total_tokens"],
            "max_req_input_len": engine.info["context_length"] - 1,
        },
        "internal_states": [_internal_state(service)],
        "engine": engine.info,
        "state": await _state(engine),
    }
    return JSONResponse(info)


def _resolved(service: Service) -> dict[str, Any]:
    """Every option with the value in effect, whether it was asked for or chosen."""
    info, model = service.engine.info, service.model
    asked = service.config.model_dump(mode="json", exclude=secrets(ServeConfig))
    chosen = {name: info[name] for name in asked if name in info}
    return (
        asked
        | chosen
        | {
            "served_model_name": model.name,
            "device": info["device"]["kind"],
            "reasoning_parser": model.reasoning_parser,
            "tool_call_parser": model.tool_call_parser,
        }
    )


async def _state(engine: EnginePort) -> dict[str, Any] | None:
    """The engine's own account of itself; None if a long step keeps it from answering."""
    try:
        async with asyncio.timeout(STATE_TIMEOUT_S):
            return await engine.state()
    except TimeoutError:
        return None


def _without_secrets(service: Service) -> list[str]:
    """The command line, with the values of keys and passwords replaced, wherever they are."""
    names = secrets(ServeConfig)
    hidden = ["--" + name.replace("_", "-") for name in names]
    values = [str(value) for name in names if (value := getattr(service.config, name))]
    shown = list(service.command)
    for i, argument in enumerate(shown):
        flag, equals, _ = argument.partition("=")
        if flag in hidden and equals:
            shown[i] = f"{flag}=..."
        elif flag in hidden and i + 1 < len(shown):
            shown[i + 1] = "..."
        for value in values:
            if len(value) >= LEAST_SECRET:
                shown[i] = shown[i].replace(value, "...")
    return shown


def _internal_state(service: Service) -> dict[str, Any]:
    """The state of the one engine, under SGLang's names."""
    info, stats = service.engine.info, service.engine.stats
    memory = info["memory"]
    graphs, graph_gb = info["graph_sizes"] or {}, info["graph_bytes"] / 2**30
    return {
        "effective_max_running_requests_per_dp": info["max_running_requests"],
        "last_gen_throughput": stats.gen_throughput,
        "avg_spec_accept_length": 1.0,
        "num_running_reqs": stats.running_requests,
        "num_waiting_reqs": stats.waiting_requests,
        "num_retractions": stats.preemptions_total,
        "new_token_ratio": stats.new_token_ratio,
        "memory_usage": {
            "weight": memory["weight_bytes"] / 2**30,
            "kvcache": memory["cache_bytes"] / 2**30,
            "startup_available": memory["free_bytes"] / 2**30,
            "token_capacity": info["max_total_tokens"],
            "graph": {"decode": graph_gb},
        },
        "decode_cuda_graph_bs": sorted({size for sizes in graphs.values() for size in sizes}),
        "decode_cuda_graph_memory_gb": graph_gb,
        "disaggregation_mode": "null",
        "world_size": service.config.tp,
    }


async def health(service: Service, _request: Request) -> Response:
    """Answer 200 while requests are served, else 503 with the reason; the engine is not asked."""
    reason = service.why_unhealthy
    return Response(status_code=200) if reason is None else _unhealthy(reason)


async def version(_service: Service, _request: Request) -> Response:
    """Get Tetrad's version, in vLLM's shape."""
    return JSONResponse({"version": tetrad.__version__})


async def health_generate(service: Service, _request: Request) -> Response:
    """Have the engine generate one token; answer 503 if it does not in time."""
    if (reason := service.why_unhealthy) is not None:
        return _unhealthy(reason)
    sampling = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
    probe = EngineRequest(new_id("HEALTH_CHECK"), packed((0,)), sampling)
    try:
        async with (
            asyncio.timeout(HEALTH_GENERATE_TIMEOUT_S),
            aclosing(service.engine.generate(probe)) as outputs,
        ):
            await anext(outputs)
    except (TimeoutError, TetradError) as error:
        return _unhealthy(str(error) or "the engine gave no token in time")
    return Response(status_code=200)


def _unhealthy(reason: str) -> Response:
    return PlainTextResponse(f"{reason}\n", status_code=503)


async def metrics(service: Service, _request: Request) -> Response:
    """Get the metrics in the text format of Prometheus."""
    return Response(service.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)
