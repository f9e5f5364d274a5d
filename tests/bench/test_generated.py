"""Generated prompts have the lengths they were asked for, and share what they should share."""

from __future__ import annotations

import json
import random
import statistics
from collections import Counter
from itertools import takewhile
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tetrad.bench.options.serve import BenchServeConfig
from tetrad.bench.workload.datasets import build, warmup
from tetrad.bench.workload.requests import Prompt, Seeds, lognormal, normal
from tetrad.bench.workload.tokens import Vocabulary
from tetrad.core.errors import ConfigError
from tetrad.data import embedded_model

SEEDS = Seeds(1, 1)
GROUPS: dict[str, Any] = {
    "dataset_name": "generated-shared-prefix",
    "gsp_num_groups": 3,
    "gsp_prompts_per_group": 4,
    "gsp_system_prompt_len": 40,
    "gsp_question_len": 10,
    "gsp_output_len": 6,
}


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary(embedded_model())


def drawn(vocabulary: Vocabulary, seeds: Seeds = SEEDS, **options) -> list[Prompt]:
    return build(BenchServeConfig.parse(options), seeds, vocabulary)


@given(st.integers(1, 400), st.integers(0, 60), st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_text_of_any_length_and_seed_is_exact(length: int, begun: int, seed: int):
    vocabulary, rng = Vocabulary(embedded_model()), random.Random(seed)
    beginning = vocabulary.draw_text(rng, begun) if begun else ""
    text = vocabulary.draw_text(rng, begun + length, beginning)
    assert vocabulary.count(text) == begun + length
    assert text.startswith(beginning)


def shared_start(one: str, other: str) -> int:
    """Characters that both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


@pytest.mark.parametrize("length", [1, 2, 17, 300])
def test_text_that_begins_as_told_is_exact(length: int, vocabulary: Vocabulary):
    rng = random.Random(length)
    beginning = vocabulary.draw_text(rng, 20)
    text = vocabulary.draw_text(rng, 20 + length, beginning)
    assert text.startswith(beginning)
    assert vocabulary.count(text) == 20 + length
    with pytest.raises(ConfigError, match="No text of exactly 5 tokens"):
        vocabulary.draw_text(rng, 5, beginning)


@pytest.mark.parametrize("length", [1, 5, 64, 333])
def test_a_given_text_is_repeated_or_cut_to_length(length: int, vocabulary: Vocabulary):
    text = "What is 3+5? It is 8, of course."
    fitted = vocabulary.fit_text(random.Random(1), text, length)
    assert vocabulary.count(fitted) == length
    assert shared_start(fitted, text * 20) >= min(len(fitted), len(text)) - 3
    assert vocabulary.count(vocabulary.fit_text(random.Random(1), "", 7)) == 7


def test_random_text_from_a_file(tmp_path, vocabulary: Vocabulary):
    path = tmp_path / "talks.json"
    talks = [{"conversations": [{"value": f"What is {i}+{i}?"}, {"value": "?"}]} for i in range(9)]
    path.write_text(json.dumps(talks))
    options: dict[str, Any] = {"dataset_name": "random", "dataset_path": path, "num_prompts": 12}
    prompts = drawn(vocabulary, random_input_len=50, **options)
    assert all(vocabulary.count(p.text or "") == p.num_tokens for p in prompts)
    assert sum((p.text or "").startswith("What is") for p in prompts) > 6
    ids = drawn(vocabulary, random_input_len=50, tokenize_prompt=True, **options)
    assert [len(p.ids or ()) for p in ids] == [p.num_tokens for p in prompts]


@pytest.mark.parametrize("draw", [normal, lognormal])
def test_lengths_have_the_mean_and_the_spread_asked_for(draw):
    lengths = draw(random.Random(1), 1000, 0.3, 20_000)
    assert statistics.fmean(lengths) == pytest.approx(1000, rel=0.01)
    assert statistics.pstdev(lengths) == pytest.approx(300, rel=0.03)
    assert set(draw(random.Random(1), 7, 0.0, 9)) == {7}
    assert min(draw(random.Random(1), 2, 5.0, 2000)) == 1


def test_the_drawn_distribution_is_used(vocabulary: Vocabulary):
    options: dict[str, Any] = {
        "length_distribution": "lognormal",
        "length_cv": 1.0,
        "num_prompts": 300,
    }
    prompts = drawn(vocabulary, random_input_len=20, random_output_len=5, **options)
    assert statistics.fmean(p.num_tokens or 0 for p in prompts) == pytest.approx(20, rel=0.2)
    assert max(p.num_tokens or 0 for p in prompts) > 40


def test_a_profile_says_how_many_prompts(vocabulary: Vocabulary):
    assert len(drawn(vocabulary, random_input_len=4, rate_profile=("2:3", "2-4:2"))) == 13


@pytest.mark.parametrize(
    ("backend", "name"), [("tetrad", "ids"), ("vllm", "ids"), ("vllm-chat", "text")]
)
def test_groups_share_their_beginning_and_nothing_else(backend, name, vocabulary: Vocabulary):
    prompts = drawn(vocabulary, backend=backend, **GROUPS)
    assert {(p.num_tokens, p.output_tokens) for p in prompts} == {(50, 6)}
    content = [getattr(p, name) for p in prompts]
    if name == "text":
        assert {vocabulary.count(text) for text in content} == {50}
        content = [vocabulary.encode(text) for text in content]
    begins = Counter(tuple(ids[:36]) for ids in content)
    assert sorted(begins.values()) == [4, 4, 4]
    assert len({tuple(ids) for ids in content}) == 12
    order = [begins_with[:36] for begins_with in content]
    ordered = drawn(vocabulary, backend=backend, gsp_ordered=True, **GROUPS)
    assert order != [getattr(p, name)[:36] for p in ordered]


def test_groups_by_zipfs_law(vocabulary: Vocabulary):
    options = GROUPS | {"gsp_prompts_per_group": 200, "gsp_system_prompt_len": 4}
    prompts = drawn(vocabulary, gsp_group_distribution="zipf", gsp_zipf_alpha=1.0, **options)
    sizes = sorted(Counter((p.ids or ())[:4] for p in prompts).values(), reverse=True)
    assert sum(sizes) == 600
    for size, weight in zip(sizes, (6 / 11, 3 / 11, 2 / 11), strict=True):
        assert size == pytest.approx(600 * weight, rel=0.2)


def test_group_lengths_have_their_own_ratio(vocabulary: Vocabulary):
    prompts = drawn(vocabulary, gsp_range_ratio=0.5, **GROUPS)
    lengths = {p.num_tokens or 0 for p in prompts}
    assert len(lengths) > 3
    assert min(lengths) >= 25
    assert max(lengths) <= 50


def test_turns_grow_by_answer_and_question(vocabulary: Vocabulary):
    prompts = drawn(vocabulary, gsp_num_turns=3, **GROUPS)
    assert len(prompts) == 36
    first, second, third = prompts[3:6]
    assert [p.after for p in (first, second, third)] == [None, 3, 4]
    assert [p.num_tokens for p in (first, second, third)] == [50, 66, 82]
    assert all(len(p.ids or ()) == p.num_tokens for p in prompts)
    assert (third.ids or ())[:66] == second.ids
    chat = drawn(vocabulary, backend="vllm-chat", gsp_num_turns=3, **GROUPS)[5]
    assert [m["role"] for m in chat.messages or ()] == ["user", "assistant"] * 2 + ["user"]
    counted = [vocabulary.count(m["content"]) for m in chat.messages or ()]
    assert counted == [50, 6, 10, 6, 10]
    assert chat.num_tokens == 82


def trace(path, lines, **options) -> dict[str, Any]:
    file = path / "trace.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in lines))
    return {"dataset_name": "mooncake", "dataset_path": file} | options


LINES = [
    {"timestamp": 9000, "input_length": 1100, "output_length": 3, "hash_ids": [1, 2, 9]},
    {"timestamp": 3000, "input_length": 1024, "output_length": 5, "hash_ids": [1, 2]},
    {"timestamp": 5000, "input_length": 700, "output_length": 4, "hash_ids": [1, 7]},
]


@pytest.mark.parametrize(("backend", "name"), [("tetrad", "ids"), ("vllm-chat", "text")])
def test_a_trace_shares_its_blocks(backend, name, tmp_path, vocabulary: Vocabulary):
    options = trace(tmp_path, LINES, backend=backend)
    early, middle, late = drawn(vocabulary, mooncake_slowdown_factor=0.5, **options)
    assert [p.trace_s for p in (early, middle, late)] == [0.0, 1.0, 3.0]
    assert [p.num_tokens for p in (early, middle, late)] == [1024, 700, 1100]
    assert [p.output_tokens for p in (early, middle, late)] == [5, 4, 3]
    first, second, third = (getattr(p, name) for p in (early, middle, late))
    assert third[: len(first)] == first
    shared = 512 if name == "ids" else shared_start(first, second)
    assert second[:shared] == first[:shared]
    assert second[: shared + 1] != first[: shared + 1]
    if name == "text":
        assert vocabulary.count(first[:shared]) == pytest.approx(512, abs=3)
        assert [vocabulary.count(text) for text in (first, second)] == [1024, 700]
    again = drawn(vocabulary, Seeds(1, 2), **options)
    assert getattr(again[0], name) != first


def test_a_part_of_a_block_is_its_beginning(tmp_path, vocabulary: Vocabulary):
    lines = [{"input_length": n, "output_length": 1, "hash_ids": [4]} for n in (100, 512, 300)]
    short, whole, long = (p.ids or () for p in drawn(vocabulary, **trace(tmp_path, lines)))
    assert whole[:300] == long
    assert whole[:100] == short
    again = drawn(vocabulary, **trace(tmp_path, [{"input_length": 9, "output_length": 1}]))
    assert again == drawn(vocabulary, **trace(tmp_path, [{"input_length": 9, "output_length": 1}]))


def test_a_trace_without_blocks_is_a_list_of_lengths(tmp_path, vocabulary: Vocabulary):
    lines = [{"input_length": n, "output_length": 2} for n in (3, 3, 5)]
    prompts = drawn(vocabulary, **trace(tmp_path, lines))
    assert [len(p.ids or ()) for p in prompts] == [3, 3, 5]
    assert prompts[0].ids != prompts[1].ids
    rounds = drawn(vocabulary, **trace(tmp_path, lines, mooncake_num_rounds=2))
    assert [p.num_tokens for p in rounds[:2]] == [3, 8]
    assert rounds[1].after == 0


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ({"input_length": 3}, "line 1: output_length must be a whole number above 0, found None"),
        ({"input_length": 3, "output_length": 1}, "timestamp must be milliseconds, found 'nothing"),
        ({"timestamp": -1, "input_length": 3, "output_length": 1}, "must be milliseconds, found -"),
        (LINES[1] | {"hash_ids": [1, 2, 3]}, "one entry for every 512 tokens"),
        (LINES[1] | {"hash_ids": 3}, "hash_ids must be a list"),
    ],
)
def test_a_bad_entry_is_named(line, sentence: str, tmp_path, vocabulary: Vocabulary):
    with pytest.raises(ConfigError, match=sentence):
        drawn(vocabulary, **trace(tmp_path, [line], use_trace_timestamps=True))


def test_a_trace_that_is_too_short(tmp_path, vocabulary: Vocabulary):
    with pytest.raises(ConfigError, match="holds 3 requests, fewer than the 4"):
        drawn(vocabulary, **trace(tmp_path, LINES, num_prompts=4))
    assert len(drawn(vocabulary, **trace(tmp_path, LINES, num_prompts=1, dataset_offset=2))) == 1


@pytest.mark.parametrize("options", [GROUPS | {"gsp_num_turns": 2}, {"random_input_len": 60}])
def test_warm_up_shares_no_beginning(options, vocabulary: Vocabulary):
    config = BenchServeConfig.parse({"warmup_requests": 4, "num_prompts": 4} | options)
    prompts = build(config, SEEDS, vocabulary)
    warm = warmup(config, prompts, SEEDS, vocabulary)
    assert [p.num_tokens for p in warm] == [p.num_tokens for p in prompts[:4]]
    assert not {(p.ids or ())[:8] for p in warm} & {(p.ids or ())[:8] for p in prompts}
    assert all(p.after is None for p in warm)
