"""What an engine can serve."""

from __future__ import annotations

from dataclasses import dataclass

from tetrad.core.step import PAGE_TOKENS


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine can serve; resolved once at start."""

    num_pages: int
    max_running_requests: int
    step_tokens: int
    """Token budget of one step."""
    context_tokens: int
    """Longest prompt plus output."""
    vocab: int
    eos_ids: tuple[int, ...] = ()

    @property
    def cache_tokens(self) -> int:
        return self.num_pages * PAGE_TOKENS
