"""One request while it lives in the engine."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from tetrad.core.request import Request
from tetrad.core.step import PAGE_TOKENS, SampleWork


@dataclass(slots=True, eq=False)
class Sequence:
    """Known tokens are prompt and output; computed tokens are those whose keys are in the cache."""

    request: Request
    seed: int
    arrival: int
    """Place in the order of arrival."""
    end_ids: frozenset[int]
    """Tokens that end it: the model's end tokens unless ignored, and its own stop tokens."""
    place: tuple[int, int, int] = (0, 0, 0)
    """Place in the order of service, see `line.py`; lower goes first."""
    added_at: float = field(default_factory=time.monotonic)
    queue_s: float | None = None
    """How long it waited before it first ran; None before."""
    token_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    """Tokens that planned steps have computed or will compute."""
    num_pending: int = 0
    """Tokens that planned steps sample and the host does not know yet; they follow `token_ids`."""
    pages: tuple[int, ...] = ()
    page_names: list[bytes] = field(default_factory=list)
    """Names of its first full pages, as far as they were needed."""
    num_kept: int = 0
    """Pages offered to the prefix cache, or taken from it."""
    num_shared: int = 0
    """Pages taken from the prefix cache when it was admitted."""
    num_cached_prompt: int | None = None
    """Prompt tokens taken from the prefix cache when it first ran; None before."""
    num_preemptions: int = 0
    num_retries: int = 0
    """How often it began anew since its logits were not finite."""
    needs_history: bool = field(init=False)
    num_prompt: int = field(init=False)
    most_tokens: int = field(init=False)
    """Prompt and output at its limit."""

    def __post_init__(self) -> None:
        self.token_ids = self.token_ids or list(self.request.prompt_ids)
        sampling = self.request.sampling
        self.num_prompt = len(self.request.prompt_ids)
        self.most_tokens = self.num_prompt + sampling.max_new_tokens
        self.needs_history = (
            sampling.repetition_penalty != 1.0
            or sampling.presence_penalty != 0.0
            or sampling.frequency_penalty != 0.0
        )

    @property
    def num_known(self) -> int:
        return len(self.token_ids)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_total(self) -> int:
        """Known tokens and pending ones."""
        return len(self.token_ids) + self.num_pending

    @property
    def is_spent(self) -> bool:
        """Do the pending tokens bring it to its limit? Then there is nothing left to plan."""
        return len(self.token_ids) + self.num_pending >= self.most_tokens

    @property
    def num_slots(self) -> int:
        """Tokens its pages can hold."""
        return len(self.pages) * PAGE_TOKENS

    def sample_work(self) -> SampleWork:
        """What the sampler needs for the next token."""
        sampling = self.request.sampling
        assert not (self.needs_history and self.num_pending), "penalties need every token"
        num_generated = self.num_generated + self.num_pending
        is_early = num_generated < sampling.min_new_tokens
        return SampleWork(
            params=sampling,
            seed=self.seed,
            num_generated=num_generated,
            history_ids=tuple(self.token_ids) if self.needs_history else (),
            num_prompt=self.num_prompt,
            banned_ids=tuple(sorted(self.end_ids)) if is_early else (),
        )

    def renewed(self) -> Sequence:
        """Another with the same known tokens, nothing computed, and no part in steps in flight."""
        return replace(
            self,
            token_ids=list(self.token_ids),
            num_computed=0,
            num_pending=0,
            pages=(),
            num_kept=0,
            num_retries=self.num_retries + 1,
        )

    def forget_computed(self) -> tuple[int, ...]:
        """Fall back to nothing computed; returns the pages to give back."""
        pages, self.pages = self.pages, ()
        self.num_computed = 0
        return pages
