"""Plans as tensors."""

from __future__ import annotations

import torch

from tetrad.core.request import SamplingParams
from tetrad.core.step import PAGE_TOKENS, PENDING, SampleWork, SequenceWork, StepPlan
from tetrad.engine.inputs import InputBuilder, Sampled

SAMPLE = SampleWork(SamplingParams(), 0, 0)


def work(num_tokens: int, start: int, pages: tuple[int, ...], *, samples: bool) -> SequenceWork:
    ids = tuple(range(start, start + num_tokens))
    return SequenceWork("r", ids, start, pages, SAMPLE if samples else None)


def test_a_mixed_step():
    plan = StepPlan(
        (
            work(1, 70, (5, 2), samples=True),
            work(5, 62, (9, 3, 8), samples=False),
            work(2, 0, (1,), samples=True),
        )
    )
    batch = InputBuilder(torch.device("cpu")).build(plan)
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
    assert (batch.query_lens, batch.kv_lens_host) == ((1, 5, 2), (71, 67, 2))
    assert {t.dtype for t in (batch.token_ids, batch.positions, batch.slots)} == {torch.int64}
    assert {t.dtype for t in (batch.query_start, batch.kv_lens, batch.page_table)} == {torch.int32}


def test_the_page_table_forgets_what_it_held():
    builder = InputBuilder(torch.device("cpu"))
    long = work(1, 3 * PAGE_TOKENS, (7, 8, 9, 6), samples=True)
    short = work(1, 0, (5,), samples=True)
    builder.build(StepPlan((long, long)))
    batch = builder.build(StepPlan((short, long)))
    assert batch.page_table.tolist() == [[5, 0, 0, 0], [7, 8, 9, 6]]
    batch = builder.build(StepPlan((long, short, short)))
    assert batch.page_table.tolist() == [[7, 8, 9, 6], [5, 0, 0, 0], [5, 0, 0, 0]]


def test_a_batch_keeps_its_page_table_when_the_next_is_built():
    builder = InputBuilder(torch.device("cpu"))
    first = builder.build(StepPlan((work(1, 0, (5,), samples=True),)))
    builder.build(StepPlan((work(1, 0, (6,), samples=True),)))
    assert first.page_table.tolist() == [[5]]


def test_a_step_that_samples_nothing_wants_no_logits():
    batch = InputBuilder(torch.device("cpu")).build(StepPlan((work(3, 0, (0,), samples=False),)))
    assert batch.logit_rows.shape == (0,)


def test_pending_tokens_come_from_the_rows_of_the_step_before():
    def one(rid: str, *ids: int) -> SequenceWork:
        return SequenceWork(rid, ids, 5, (0,), SAMPLE)

    plan = StepPlan((one("a", PENDING), one("b", 11, 12), one("c", 9, PENDING), one("d", PENDING)))
    previous = Sampled(torch.tensor([30, 31, -1]), {"c": 0, "a": 1, "d": 2})
    batch = InputBuilder(torch.device("cpu")).build(plan, previous)
    assert batch.token_ids.tolist() == [31, 11, 12, 9, 30, 0]
