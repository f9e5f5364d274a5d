"""Plans as tensors."""

from __future__ import annotations

from array import array

import torch

from tests.engine.fakes import as_decodes
from tetrad.core.plan import StepPlan
from tetrad.core.request import SamplingParams
from tetrad.core.step import PAGE_TOKENS, SampleWork, SequenceWork
from tetrad.engine.inputs import NOTHING, as_read, build

CPU = torch.device("cpu")
SAMPLE = SampleWork(SamplingParams(), 0, 0)


def work(num_tokens: int, start: int, pages: tuple[int, ...], *, samples: bool) -> SequenceWork:
    ids = tuple(range(start, start + num_tokens))
    return SequenceWork("r", array("i", ids), start, pages, SAMPLE if samples else None)


def test_a_mixed_step():
    plan = StepPlan(
        (
            work(1, 70, (5, 2), samples=True),
            work(5, 62, (9, 3, 8), samples=False),
            work(2, 0, (1,), samples=True),
        )
    )
    batch = build(plan, CPU)
    assert batch.token_ids.tolist() == [70, 62, 63, 64, 65, 66, 0, 1]
    assert batch.positions.tolist() == batch.token_ids.tolist()
    page = PAGE_TOKENS
    assert batch.slots.tolist() == [
        2 * page + 6,
        *(9 * page + 62, 9 * page + 63, 3 * page, 3 * page + 1, 3 * page + 2),
        *(page, page + 1),
    ]
    assert batch.query_start.tolist() == [0, 1, 6, 8]
    assert batch.kv_lens.tolist() == [71, 67, 2]
    assert batch.page_table.tolist() == [[5, 2], [9, 3], [1, 0]]
    assert batch.logit_rows.tolist() == [0, 7]
    assert (batch.query_lens, tuple(batch.kv_lens_host)) == ((1, 5, 2), (71, 67, 2))
    assert {t.dtype for t in (batch.token_ids, batch.positions, batch.slots)} == {torch.int64}
    assert {t.dtype for t in (batch.query_start, batch.kv_lens, batch.page_table)} == {torch.int32}


def test_decodes_come_before_the_others_and_are_the_same_as_those():
    one, two = work(1, 70, (5, 2), samples=True), work(1, 3, (8,), samples=True)
    chunk = work(5, 62, (9, 3, 8), samples=False)
    columns = build(StepPlan((chunk,), as_decodes((one, two))), CPU)
    plain = build(StepPlan((one, two, chunk)), CPU)
    for name in ("token_ids", "positions", "slots", "query_start", "kv_lens", "page_table"):
        assert getattr(columns, name).tolist() == getattr(plain, name).tolist(), name
        assert getattr(columns, name).dtype == getattr(plain, name).dtype
    assert columns.logit_rows.tolist() == plain.logit_rows.tolist() == [0, 1]
    assert (columns.query_lens, tuple(columns.kv_lens_host)) == ((1, 1, 5), (71, 4, 67))


def test_a_step_that_samples_nothing_wants_no_logits():
    batch = build(StepPlan((work(3, 0, (0,), samples=False),)), CPU)
    assert batch.logit_rows.shape == (0,)


def test_pending_tokens_come_from_the_rows_of_the_step_before():
    def one(rid: str, *ids: int) -> SequenceWork:
        return SequenceWork(rid, array("i", ids), 5, (0,), SAMPLE)

    plan = StepPlan((one("a", -2), one("b", 11, 12), one("c", 9, -1), one("d", -3)))
    batch = build(plan, CPU, as_read(NOTHING, torch.tensor([30, 31, -1])))
    assert batch.token_ids.tolist() == [31, 11, 12, 9, 30, 0]
