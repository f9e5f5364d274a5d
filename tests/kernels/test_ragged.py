"""Cutting a ragged step into rectangles loses and invents nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tetrad.core.step import PAGE_TOKENS
from tetrad.kernels import ragged as ragged_module
from tetrad.kernels.canary import try_case
from tetrad.kernels.contract import case
from tetrad.kernels.draw import Draw, Lens, rows_of, sequence_slots
from tetrad.kernels.ragged import Ragged
from tetrad.kernels.registry import OPS

STEPS: dict[str, Lens] = {
    "one token": ((1, 1),),
    "decodes": ((1, 3), (1, 200), (1, 64)),
    "prompts": ((7, 7), (70, 70), (8, 8)),
    "mixed": ((1, 130), (5, 5), (1, 1), (66, 130), (2, 65), (1, 7)),
}
CPU = torch.device("cpu")


def make(lens: Lens) -> Ragged:
    return Draw.of(case("ragged"), torch.float32, CPU).ragged(lens)


@pytest.mark.parametrize("max_pairs", [1, 300, 1 << 20])
@pytest.mark.parametrize("lens", STEPS.values(), ids=STEPS)
def test_every_row_sees_exactly_the_keys_up_to_its_own(
    lens: Lens, max_pairs: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ragged_module, "MAX_BLOCK_PAIRS", max_pairs)
    monkeypatch.setattr(ragged_module, "_FREE_PADDING_PAIRS", 40)
    step = make(lens)
    seen: dict[int, list[int]] = {}
    for block in step.blocks:
        hidden = block.hidden.flatten(0, 1)
        slots = block.slots.repeat_interleave(block.hidden.shape[1], dim=0)
        kept = range(len(hidden)) if block.kept is None else block.kept.tolist()
        for i in kept:
            row = int(block.rows.flatten()[i])
            assert row not in seen
            seen[row] = slots[i][~hidden[i]].tolist()
    for row, sequence, num_keys in rows_of(step):
        assert seen.pop(row) == sequence_slots(step, sequence)[:num_keys].tolist()
    assert not seen


@pytest.mark.parametrize("lens", STEPS.values(), ids=STEPS)
def test_no_block_is_larger_than_allowed(lens: Lens, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ragged_module, "MAX_BLOCK_PAIRS", 300)
    assert all(block.hidden.numel() <= 300 for block in make(lens).blocks)


def test_decodes_share_a_block_and_prompts_of_like_length_do():
    decodes = ((1, 300),) * 40
    assert len(make(decodes).blocks) == 1
    assert len(make(((60, 60), (64, 64), (50, 50), *decodes)).blocks) == 2


@pytest.mark.parametrize("lens", STEPS.values(), ids=STEPS)
def test_row_slots_find_each_rows_own_pages(lens: Lens):
    step = make(lens)
    rows = rows_of(step)
    last = torch.tensor([[num_keys - 1, 0] for _, _, num_keys in rows])
    found = step.row_slots(last).tolist()
    for row, sequence, num_keys in rows:
        slots = sequence_slots(step, sequence).tolist()
        assert found[row] == [slots[num_keys - 1], slots[0]]
        assert all(slot // PAGE_TOKENS in step.page_table[sequence] for slot in found[row])


@pytest.mark.parametrize("op", ["mla", "index_score"])
def test_ops_do_not_depend_on_how_the_step_is_cut(op: str, monkeypatch: pytest.MonkeyPatch):
    """The mixed step in many small blocks; by default it is one."""
    monkeypatch.setattr(ragged_module, "MAX_BLOCK_PAIRS", 100)
    mixed = OPS[op].contract.cases[0]
    assert len(make(mixed["lens"]).blocks) > 5
    (result,) = try_case(OPS[op], OPS[op].backends["torch"], mixed, torch.float32, CPU)
    assert result.passes(OPS[op].contract.tolerance["float32"]), result


@pytest.mark.parametrize("lens", STEPS.values(), ids=STEPS)
def test_each_row_has_its_sequence_and_sees_its_keys(lens: Lens):
    step = make(lens)
    rows = rows_of(step)
    assert step.row_sequences.tolist() == [sequence for _, sequence, _ in rows]
    assert step.seen.tolist() == [num_keys for _, _, num_keys in rows]
    assert step.row_sequences.dtype == step.seen.dtype == torch.int32


@pytest.mark.parametrize("max_pairs", [1, 300, 1000, 1 << 20])
@pytest.mark.parametrize("lens", STEPS.values(), ids=STEPS)
def test_parts_are_the_step_cut_by_rows(
    lens: Lens, max_pairs: int, monkeypatch: pytest.MonkeyPatch
):
    """Every row keeps its pages and its keys; the host's lengths are the device's."""
    monkeypatch.setattr(ragged_module, "MAX_PART_PAIRS", max_pairs)
    step = make(lens)
    expected = [(sequence_slots(step, s)[:n].tolist(), n) for _, s, n in rows_of(step)]
    found: list[tuple[list[int], int]] = []
    for rows, part in step.parts:
        assert rows.start == len(found)
        for _, sequence, num_keys in rows_of(part):
            found.append((sequence_slots(part, sequence)[:num_keys].tolist(), num_keys))
        assert rows.stop == len(found)
        assert (
            rows.stop - rows.start == 1 or (rows.stop - rows.start) * part.max_kv_len <= max_pairs
        )
        assert part.kv_lens.tolist() == list(part.kv_lens_host)
        assert part.query_start.diff().tolist() == list(part.query_lens)
        assert part.seen.tolist() == [num_keys for _, _, num_keys in rows_of(part)]
    assert found == expected
    starts = [(part.kv_lens, step.kv_lens[rows.start :]) for rows, part in step.parts]
    assert not step.is_decode or all(a.data_ptr() == b.data_ptr() for a, b in starts)
    assert (len(step.parts) == 1) == (len(found) * step.max_kv_len <= max_pairs or len(found) == 1)


def test_the_pages_of_a_sequence_lie_side_by_side():
    """However far apart sequences are; one page has no neighbour, wherever torch says that is."""
    table = torch.arange(12, dtype=torch.int32).view(3, 4)

    def stride(pages: torch.Tensor) -> int:
        return replace(ragged, page_table=pages).page_stride

    ragged = Ragged(torch.arange(4), torch.ones(3), table, (1, 1, 1), (1, 1, 1))
    assert stride(table) == stride(table[:, :2]) == 4
    assert stride(table[:1].T) == 1
    with pytest.raises(AssertionError):
        stride(table.T)
