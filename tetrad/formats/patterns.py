"""Patterns over HF module names, as checkpoints use them to say what is and is not quantised."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence

from tetrad.core.errors import CheckpointError


class Patterns:
    """Anchored glob patterns: 'model.layers.1.*' does not match layer 10.

    A pattern that begins with "re:" is a regular expression from the start of the name
    (compressed-tensors' convention).
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        parts = [
            f"(?:{p[3:]})" if p.startswith("re:") else f"(?:{fnmatch.translate(p)})"
            for p in patterns
        ]
        try:
            self._regex = re.compile("|".join(parts)) if parts else None
        except re.error as error:
            raise CheckpointError(f"A pattern of {list(patterns)} is invalid: {error}.") from error

    def match(self, module: str) -> bool:
        """Whether any pattern covers `module`."""
        return self._regex is not None and self._regex.match(module) is not None


def summarize(kept: Iterable[str], quantized: Iterable[str]) -> list[str]:
    """Few patterns that match every module in `kept` and none in `quantized`, sorted.

    Each kept module is covered by its shortest dotted prefix that no quantised module begins with:
    `prefix*`, or `prefix.*` when the former would match too much ('model.layers.1.*' beside a
    quantised layer 10).
    """
    beginnings = {name[:end] for name in quantized for end in range(len(name) + 1)}
    return sorted({_shortest(name, beginnings) for name in kept})


def _shortest(module: str, taken: set[str]) -> str:
    dots = [position for position, letter in enumerate(module) if letter == "."]
    for position in dots:
        prefix = module[:position]
        if prefix not in taken:
            return f"{prefix}*"
        if f"{prefix}." not in taken:
            return f"{prefix}.*"
    return module
