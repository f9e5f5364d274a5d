"""Masks of allowed tokens, applied to logits."""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.engine.grammars import Masks
from tetrad.engine.transfer import to_device

ROWS_AT_ONCE = 256
"""Bits are unpacked to a byte each: 40 MB for so many rows of 154880 tokens."""


def mask_bits(masks: Masks, vocab: int) -> Tensor:
    """int32 [n, W] on the host: bit v % 32 of word v // 32 is 1 if token v is allowed."""
    num_words = (vocab + 31) // 32
    num_rows = len(masks.sampled_rows)
    words = torch.frombuffer(masks.words, dtype=torch.int32, count=num_rows * num_words)
    bits = words.view(num_rows, num_words)
    if masks.also:
        # The memory is the grammar's own, which writes a row anew before each use.
        bytes_of_rows = bits.view(torch.uint8)
        for row, token_id in masks.also:
            bytes_of_rows[row, token_id // 8] |= 1 << token_id % 8
    return bits


def allow_only(logits: Tensor, sampled_rows: tuple[int, ...], bits: Tensor) -> None:
    """Set `logits` [R, V] to -inf in rows `sampled_rows` [n] where `bits` int32 [n, W], on the
    host, has no bit."""
    vocab = logits.shape[1]
    rows = to_device(torch.tensor(sampled_rows, dtype=torch.int64), logits.device)
    on_device = to_device(bits, logits.device).view(torch.uint8)
    places = torch.arange(8, dtype=torch.uint8, device=logits.device)
    one_bit = torch.ones_like(places).bitwise_left_shift(places)
    for start in range(0, len(sampled_rows), ROWS_AT_ONCE):
        some = slice(start, start + ROWS_AT_ONCE)
        is_banned = (on_device[some].unsqueeze(2) & one_bit).view(-1, on_device.shape[1] * 8) == 0
        where = rows[some]
        logits[where] = logits[where].masked_fill_(is_banned[:, :vocab], -torch.inf)
