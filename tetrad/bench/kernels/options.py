"""What `tetrad bench kernels` was asked."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import field_validator

from tetrad.core.errors import nearest
from tetrad.core.option import Config, checked, option
from tetrad.core.presets import PRESETS


def split(text: str) -> tuple[str, ...]:
    """A list written with commas."""
    return tuple(part.strip() for part in text.split(",")) if text.strip() else ()


def checked_counts(text: str) -> str:
    """`text` if it lists whole numbers from 1 on. Raises ValueError."""
    if any(not part.isdecimal() or int(part) < 1 for part in split(text)):
        raise ValueError("whole numbers from 1 on with commas between them were expected")
    return text


class BenchKernelsConfig(Config):
    """A run of the kernel timer. Lists are written with commas."""

    ops: str = option(
        "",
        "Ops to time, such as experts,route; dense are large products by cuBLAS, moe_block is a "
        "whole block of experts. Default: all.",
        group="What",
    )
    backends: str = option(
        "", "Backends to time, such as triton,torch. Default: all of each op.", group="What"
    )
    model: str | None = option(
        None,
        f"Whose shapes: {', '.join(PRESETS)}, abacus (the embedded model), a model folder, or a "
        "config.json. Default: glm-5 on a GPU, abacus on a CPU.",
        group="Shapes",
    )
    ranks: str = option(
        "tp=1,ep=1", "Over how many ranks a layer (tp) and its experts (ep) lie.", group="Shapes"
    )
    tokens: str = option("1,8,64,512", "Tokens of a step, over all ranks.", group="Shapes")
    tokens_per_expert: str = option(
        "", "Tokens that each expert gets: the experts' load instead of --tokens.", group="Shapes"
    )
    routing: Literal["uniform", "random", "skewed"] | None = option(
        None,
        "How tokens choose experts: evenly, by Gaussian scores, or by scores with a Gaussian bias "
        "of each expert. Default: uniform with --tokens-per-expert, else random.",
        group="Shapes",
    )
    context: int = option(
        4096, "Keys that a decoding sequence holds.", group="Shapes", ge=1, le=10_000_000
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
        120.0,
        "Seconds for the whole run; what does not fit is shown as skipped.",
        group="Where",
        gt=0,
    )
    breakdown: bool = option(
        False, "Also list each call's launches with their times (GPU only).", group="Result"
    )
    compare: bool = option(
        False,
        "Also run Humming for the experts, and show how much of its time ours takes.",
        group="Result",
    )
    output_file: Path | None = option(
        None, "Append one line of JSON for each row of the table.", group="Result"
    )
    plot: Path | None = option(
        None, "Draw a roofline with a point for each row (needs matplotlib).", group="Result"
    )

    _counts = checked("tokens", "tokens_per_expert", by=checked_counts)

    @field_validator("ranks")
    @classmethod
    def _pairs(cls, text: str) -> str:
        for part in split(text):
            name, _, number = part.partition("=")
            if name not in ("tp", "ep"):
                raise ValueError(
                    f"there is no {name!r}, only tp and ep.{nearest(name, ('tp', 'ep'))}"
                )
            if not number.isdecimal() or int(number) < 1:
                raise ValueError(f"{name} must be a whole number from 1 on")
        return text

    @property
    def op_names(self) -> tuple[str, ...]:
        """As asked; () for all."""
        return split(self.ops)

    @property
    def backend_names(self) -> tuple[str, ...]:
        """As asked; () for all."""
        return split(self.backends)

    @property
    def token_counts(self) -> tuple[int, ...]:
        """Tokens of each step."""
        return tuple(map(int, split(self.tokens)))

    @property
    def tokens_per_expert_counts(self) -> tuple[int, ...]:
        """Tokens per expert of each step, () when `tokens` says it."""
        return tuple(map(int, split(self.tokens_per_expert)))

    @property
    def rank_counts(self) -> dict[str, int]:
        """tp and ep, as far as given."""
        pairs = (part.partition("=") for part in split(self.ranks))
        return {name: int(number) for name, _, number in pairs}
