"""What `tetrad bench rank` was asked."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import field_validator, model_validator

from tetrad.bench.kernels.options import checked_counts, split
from tetrad.core.attention_names import checked_attention
from tetrad.core.keys import checked_cache_dtype
from tetrad.core.option import Config, checked, option
from tetrad.core.presets import PRESETS
from tetrad.core.ranks import Ranks, checked_layout


class BenchRankConfig(Config):
    """A run of one rank's decode steps. Lists are written with commas."""

    model: str | None = option(
        None,
        f"Whose shapes: {', '.join(PRESETS)}, abacus (the embedded model), a model folder, or a "
        "config.json; weights are drawn. "
        "Default: glm-5 on a GPU, abacus on a CPU.",
        group="What",
    )
    ranks: str = option(
        "tp=1,ep=1,attn_dp=1,rank=0",
        "The layout, and which of its ranks runs: tensor (tp) and expert parallel (ep), groups of "
        "attention's data parallelism (attn_dp), stages (pp).",
        group="What",
    )
    num_layers: int | None = option(
        None, "Run the first so many layers only. Default: all.", group="What", ge=1, le=10_000
    )
    batch: str = option(
        "8,64,256,1024,2048", "Sequences of the whole deployment in one step.", group="What"
    )
    query_len: int = option(
        1,
        "Tokens that each sequence computes in a step: 1 decodes, more are a chunk of a prompt.",
        group="What",
        ge=1,
        le=1_000_000,
    )
    context: int = option(
        256,
        "Keys that each sequence holds, the new ones among them.",
        group="What",
        ge=1,
        le=10_000_000,
    )
    routing: Literal["random", "skewed"] = option(
        "random",
        "How the other ranks' tokens choose experts: all alike, or with a bias of each expert.",
        group="What",
    )
    seed: int = option(0, "Seed of weights and routing.", group="What", ge=0, le=2**31)
    moe_runner_backend: str = option("auto", "Backend of the routed experts.", group="What")
    attention_backend: str = option("auto", "Backend of attention.", group="What")
    kv_cache_dtype: str = option(
        "auto",
        "Type of cached keys: auto (that of the activations), bfloat16 or fp8_e4m3.",
        group="What",
    )
    tb_per_s: float | None = option(
        None,
        "Bandwidth of memory that limits are counted with. Default: measured in this run.",
        group="Limits",
        gt=0,
    )
    tflops: float | None = option(
        None,
        "Rate of products that limits are counted with. Default: measured in this run.",
        group="Limits",
        gt=0,
    )
    link_gb_per_s: float = option(
        400.0,
        "What one device receives from the others at best: the price of communication.",
        group="Limits",
        gt=0,
    )
    link_us: float = option(
        0.0,
        "Latency of one collective, in microseconds, added to its bytes' time; 0 counts bandwidth "
        "only.",
        group="Limits",
        ge=0,
    )
    dtype: Literal["auto", "float32", "bfloat16"] = option(
        "auto",
        "Type of activations; auto is bfloat16 on a GPU and float32 on a CPU.",
        group="Where",
    )
    device: Literal["auto", "cpu", "cuda"] = option(
        "auto", "Where to run; auto takes the GPU when there is one.", group="Where"
    )
    budget_s: float = option(
        20.0, "Seconds of measured steps, over all batches.", group="Where", gt=0
    )
    output_file: Path | None = option(
        None, "Append one line of JSON for each batch.", group="Result"
    )

    @field_validator("batch")
    @classmethod
    def _counts(cls, text: str) -> str:
        if not split(text):
            raise ValueError("at least one batch was expected")
        return checked_counts(text)

    _attention = checked("attention_backend", by=checked_attention)
    _cache_dtype = checked("kv_cache_dtype", by=checked_cache_dtype)
    _layout = checked("ranks", by=checked_layout)

    @model_validator(mode="after")
    def _fits(self) -> BenchRankConfig:
        if self.query_len > self.context:
            raise ValueError(
                f"--query-len {self.query_len} is more than --context {self.context}, which counts "
                "the new tokens too; raise the latter"
            )
        return self

    @property
    def layout(self) -> Ranks:
        """The ranks as a value."""
        return Ranks.parse(self.ranks)

    @property
    def batches(self) -> tuple[int, ...]:
        """As asked."""
        return tuple(map(int, split(self.batch)))
