"""Names of backends that flags can force, known without any kernel: a misspelt one is refused at
the door, also where no kernel is ever chosen. A test holds them against the registry."""

from __future__ import annotations

from collections.abc import Sequence

from tetrad.core.errors import nearest

AUTO = "auto"
EXPERTS = (
    *("gluon", "triton", "humming", "flashinfer_trtllm", "flashinfer_cutedsl"),
    *("flashinfer_cutlass", "triton_fp4", "torch"),
)
ATTENTION = ("gluon", "triton", "flashinfer_sparse_mla", "sdpa", "torch")
"""Of latents, or of grouped queries."""


def checked_backend(name: str, known: Sequence[str]) -> str:
    """`name`, if it is one of `known` or auto. Raises ValueError."""
    if name != AUTO and name not in known:
        listed = ", ".join(known)
        raise ValueError(
            f"there is no such backend; there are {listed}, and auto to let Tetrad choose."
            f"{nearest(name, known)}"
        )
    return name
