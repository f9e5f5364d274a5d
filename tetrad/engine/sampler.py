"""From logits to tokens: the rules of a request applied to its row, then one draw.

In this order: logit bias, repetition penalty, frequency and presence penalties, end tokens that are
not allowed yet; then temperature, top-k, top-p and min-p inside the `sample` op. Log-probabilities
are those of the model, before any of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from tetrad.core.plan import Decodes, StepPlan, StepResult
from tetrad.core.request import TokenLogprob
from tetrad.core.step import SampleWork
from tetrad.engine.grammars import Masks
from tetrad.engine.masks import allow_only, mask_bits
from tetrad.engine.sequence import MIN_TEMPERATURE, SEED_MASK, sampling_rules
from tetrad.engine.transfer import Fetch, to_device
from tetrad.engine.uniforms import uniforms
from tetrad.kernels.select import OpSet

LAST_RESORT = -1e30
"""Logit of an end token that is not allowed yet, where a grammar may allow no other. Divided by the
least temperature it is still a number."""

Cells = tuple[list[int], list[int], list[float]]
"""Rows, token ids and a number for each: what a rule does to the logits."""


class Draws:
    """The tokens of one step. They are on the device until somebody waits for them."""

    def __init__(self, ids: Tensor, top: tuple[Tensor, ...], counts: dict[int, int]) -> None:
        """`ids` [R] int64 on the device, -1 where logits were not finite. `top`: the names and
        log-probabilities of `_top_log_probs`, of the rows in `counts`; each with its number."""
        self.ids = ids
        self._counts = counts
        self._fetch = Fetch(ids, *top)

    def wait(self) -> StepResult:
        """Blocks until the step has run."""
        ids, *top = self._fetch.wait()
        found = ids.numpy()
        logprobs = _told(self._counts, *top) if self._counts else {}
        return StepResult(found, {row: of for row, of in logprobs.items() if found[row] >= 0})


class Sampler:
    """Chooses one token for each row, with the ops `sample` and `finite_rows` of `ops`."""

    def __init__(self, ops: OpSet) -> None:
        self._sample_op: Callable[..., Tensor] = ops.sample
        self._finite_rows: Callable[[Tensor], tuple[Tensor, Tensor]] = ops.finite_rows

    def __call__(
        self, logits: Tensor, plan: StepPlan, masks: Callable[[], Masks | None] | None = None
    ) -> Draws:
        """`logits` [R, V] fp32, one row for each that samples; overwritten. `masks` tells which
        tokens are allowed where, and is called last."""
        if not len(logits):
            return Draws(logits.new_empty(0, dtype=torch.int64), (), {})
        first = len(plan.decodes)
        works = [work.sample for work in plan.sequences if work.sample]
        logits, is_finite = self._finite_rows(logits)
        counts = {
            row: work.params.num_logprobs
            for row, work in enumerate(works, first)
            if work.params.num_logprobs is not None
        }
        if counts:
            rows = to_device(torch.tensor(list(counts)), logits.device)
            log_probs = logits[rows].log_softmax(dim=1)
        has_changed = apply_rules(logits, first, works)
        if masks is not None and (allowed := masks()) is not None:
            allow_only(logits, allowed.sampled_rows, mask_bits(allowed, logits.shape[1]))
            has_changed = True
        if has_changed:
            # Whatever a rule made of a row, it must cost that request alone: no op may see a row
            # without a best token.
            is_finite &= logits.amax(dim=1).isfinite()
            logits.masked_fill_(~is_finite.unsqueeze(1), 0.0)
        ids = self._choose(logits, plan.decodes, works)
        top = _top_log_probs(log_probs, ids[rows], max(counts.values())) if counts else ()
        return Draws(ids.where(is_finite, -1), top, counts)

    def _choose(self, logits: Tensor, decodes: Decodes, works: Sequence[SampleWork]) -> Tensor:
        is_greedy = not any(work.params.temperature >= MIN_TEMPERATURE for work in works)
        if is_greedy and not decodes.rules[0].any():
            return self._sample_op(logits, None)
        own = np.array([sampling_rules(work.params) for work in works]).reshape(-1, 4).T
        numbers = np.empty((4, len(logits)), np.float32)
        numbers[:3, : len(decodes)] = decodes.rules
        numbers[:3, len(decodes) :] = own[:3]
        seeds = np.array([work.seed & SEED_MASK for work in works], np.uint64)
        indices = np.array([work.num_generated for work in works], np.int64)
        numbers[3] = uniforms(
            np.concatenate([decodes.seeds, seeds]), np.concatenate([decodes.num_generated, indices])
        )
        on_device = to_device(torch.from_numpy(numbers), logits.device)
        ranks = np.concatenate([decodes.top_k, own[3].astype(np.int64)])
        top_k = to_device(torch.from_numpy(ranks), logits.device)
        temperature, top_p, min_p, draw = on_device
        return self._sample_op(logits, temperature, top_k, top_p, min_p, draw)


def apply_rules(logits: Tensor, first: int, works: Sequence[SampleWork]) -> bool:
    """Change `logits` [R, V], from row `first` on, in place as each request asks; who asks nothing
    costs nothing. False if nobody asked for anything."""
    if not any(w.banned_ids or w.history_ids or w.params.logit_bias for w in works):
        return False
    device, logits = logits.device, logits[first:]
    if cells := _cells(works, lambda work: work.params.logit_bias):
        where, bias = _on(device, cells)
        logits[where] += bias
    if cells := _cells(works, _repetition):
        where, penalty = _on(device, cells)
        seen = logits[where]
        logits[where] = torch.where(seen > 0, seen / penalty, seen * penalty)
    if cells := _cells(works, _frequency_and_presence):
        where, penalty = _on(device, cells)
        logits[where] -= penalty
    if cells := _cells(works, _banned):
        where, lowest = _on(device, cells)
        logits[where] = lowest
    return True


def _repetition(work: SampleWork) -> dict[int, float]:
    """Token id → penalty, for every token of prompt and output."""
    penalty = work.params.repetition_penalty
    return dict.fromkeys(work.history_ids, penalty) if penalty != 1.0 else {}


def _frequency_and_presence(work: SampleWork) -> dict[int, float]:
    """Token id → what to subtract, for every token of the output."""
    frequency, presence = work.params.frequency_penalty, work.params.presence_penalty
    if not frequency and not presence:
        return {}
    counts = Counter(work.history_ids[work.num_prompt :])
    return {token_id: presence + frequency * count for token_id, count in counts.items()}


def _banned(work: SampleWork) -> dict[int, float]:
    """Token id → its logit, for end tokens that are not allowed yet."""
    return dict.fromkeys(work.banned_ids, LAST_RESORT if work.params.grammar else -torch.inf)


def _cells(
    works: Sequence[SampleWork], rule: Callable[[SampleWork], dict[int, float]]
) -> Cells | None:
    """The rule's numbers over all rows; None if it touches nothing. No cell comes twice."""
    rows: list[int] = []
    ids: list[int] = []
    values: list[float] = []
    for row, work in enumerate(works):
        if numbers := rule(work):
            rows += [row] * len(numbers)
            ids += numbers.keys()
            values += numbers.values()
    return (rows, ids, values) if rows else None


def _on(device: torch.device, cells: Cells) -> tuple[tuple[Tensor, Tensor], Tensor]:
    rows, ids, values = cells
    where = to_device(torch.tensor([rows, ids]), device)
    numbers = to_device(torch.tensor(values, dtype=torch.float32), device)
    return (where[0], where[1]), numbers


def _top_log_probs(log_probs: Tensor, ids: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Token ids [n, 1 + m] and log-probabilities [n, 1 + m] of `ids` [n] and then of the `most`
    best, or of as many as there are. `log_probs` [n, V]."""
    chosen = ids.unsqueeze(1)
    best, best_ids = log_probs.topk(min(most, log_probs.shape[1]), dim=1)
    numbers = torch.cat([log_probs.gather(1, chosen), best], dim=1)
    return torch.cat([chosen, best_ids], dim=1), numbers


def _told(counts: dict[int, int], names: Tensor, numbers: Tensor) -> dict[int, TokenLogprob]:
    """Row → log-probabilities of its token and of as many of the best as it asked for."""
    found = {}
    rows = zip(counts.items(), names.tolist(), numbers.tolist(), strict=True)
    for (row, count), token_ids, values in rows:
        top = tuple(zip(token_ids[1 : count + 1], values[1 : count + 1], strict=True))
        found[row] = TokenLogprob(token_ids[0], values[0], top)
    return found
