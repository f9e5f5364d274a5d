"""Lengths mean what they say, and prompts are what was asked for."""

from __future__ import annotations

import random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tetrad.bench.options.serve import BenchServeConfig
from tetrad.bench.workload.datasets import build, warmup
from tetrad.bench.workload.requests import Seeds, random_lengths
from tetrad.bench.workload.tokens import Vocabulary, ordinary_ids
from tetrad.core.errors import ConfigError

SPECIAL = ["<eos>", "<tool>"]


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory) -> Vocabulary:
    """Words and letters, so that some texts encode to fewer tokens than they were drawn from."""
    folder = tmp_path_factory.mktemp("tokenizer")
    letters = [*"abcdefgh ", "ab", "cd", "abcd", " a"]
    merges = [("a", "b"), ("c", "d"), ("ab", "cd"), (" ", "a")]
    vocab = {letter: place for place, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_next")
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    return Vocabulary(folder)


def options(**values) -> BenchServeConfig:
    return BenchServeConfig.parse({"num_prompts": 50, "random_input_len": 40} | values)


def test_range_ratio_is_sglangs():
    """[max(int(longest * ratio), 1), longest], both ends included; vLLM means something else."""
    lengths = random_lengths(options(random_input_len=10, random_output_len=6), 2000, seed=1)
    assert {prompt for prompt, _ in lengths} == set(range(1, 11))
    assert {output for _, output in lengths} == set(range(1, 7))
    half = random_lengths(options(random_input_len=10, random_range_ratio=0.5), 500, seed=1)
    assert {prompt for prompt, _ in half} == set(range(5, 11))
    fixed = options(random_input_len=10, random_output_len=6, random_range_ratio=1.0)
    assert set(random_lengths(fixed, 100, seed=1)) == {(10, 6)}


def test_random_ids_are_exact_and_never_special(vocabulary: Vocabulary):
    assert vocabulary.ordinary_ids == list(range(13))
    prompts = build(options(), Seeds(1, 1), vocabulary)
    assert len(prompts) == 50
    assert all(prompt.ids and len(prompt.ids) == prompt.num_tokens for prompt in prompts)
    assert {i for prompt in prompts for i in prompt.ids or ()} == set(range(13))


def test_special_tokens_inside_the_vocabulary_are_left_out_too():
    """Trainers put them there; a list of pieces (Unigram) has its ids by place."""
    model = {"vocab": {"<eos>": 0, "a": 1, "b": 2, "<unk>": 3}, "unk_token": "<unk>"}
    added = [{"id": 0, "content": "<eos>"}, {"id": 9, "content": "<tool>"}]
    assert ordinary_ids({"model": model, "added_tokens": added}) == [1, 2]
    pieces = {"vocab": [["<eos>", 0.0], ["a", -1.0]]}
    assert ordinary_ids({"model": pieces, "added_tokens": added}) == [1]


def test_random_text_encodes_to_its_length(vocabulary: Vocabulary):
    prompts = build(options(dataset_name="random"), Seeds(1, 1), vocabulary)
    assert len({prompt.num_tokens for prompt in prompts}) > 10
    assert all(vocabulary.count(prompt.text or "") == prompt.num_tokens for prompt in prompts)


def test_chat_backends_get_text(vocabulary: Vocabulary):
    (prompt,) = build(options(backend="openai-chat", num_prompts=1), Seeds(1, 1), vocabulary)
    assert prompt.ids is None
    assert vocabulary.count(prompt.text or "") == prompt.num_tokens


def test_a_length_no_text_has_is_an_error(vocabulary: Vocabulary, monkeypatch):
    monkeypatch.setattr(vocabulary, "encode", lambda text: [0, 0, 0, 0])
    with pytest.raises(ConfigError, match="No text of exactly 9 tokens"):
        vocabulary.draw_text(random.Random(1), 9)


def test_lengths_repeat_and_content_is_fresh_unless_a_seed_is_given(vocabulary: Vocabulary):
    assert Seeds.of(options(seed=7)) == Seeds(7, 7)
    first, second = Seeds.of(options()), Seeds.of(options())
    assert first.shape == second.shape == 42
    assert first.content != second.content
    one, two = (build(options(), seeds, vocabulary) for seeds in (first, second))
    assert [p.num_tokens for p in one] == [p.num_tokens for p in two]
    assert [p.ids for p in one] != [p.ids for p in two]


def test_warm_up_has_the_lengths_but_not_the_prompts(vocabulary: Vocabulary):
    config = options(warmup_requests=3, random_output_len=64, random_range_ratio=1.0)
    prompts = build(config, Seeds(1, 1), vocabulary)
    warm = warmup(config, prompts, Seeds(1, 1), vocabulary)
    assert [p.num_tokens for p in warm] == [40, 40, 40]
    assert [p.output_tokens for p in warm] == [32, 32, 32]
    assert not {p.ids for p in warm} & {p.ids for p in prompts}


def test_without_a_vocabulary_random_prompts_say_what_is_missing():
    with pytest.raises(ConfigError, match="give --tokenizer FOLDER"):
        build(options(), Seeds(1, 1), None)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"dataset_name": "custom"}, "The custom dataset needs --dataset-path"),
        ({"dataset_path": "x.jsonl"}, "use --dataset-name custom"),
        ({"extra_request_body": "[1]"}, "--extra-request-body .*must be a JSON object"),
        ({"extra_request_body": "{"}, "not valid JSON"),
        ({"header": ("X",)}, "must have the form Name=value"),
        ({"random_range_ratio": 1.5}, "--random-range-ratio 1.5"),
        ({"request_rate": 0}, "--request-rate 0"),
        (
            {"host": "far:31"},
            "--host far:31: a host alone was expected; --port gives the port",
        ),
        ({"host": "http://far"}, "--base-url takes an address such as http://far:30000"),
    ],
)
def test_options_that_cannot_be(values, sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        BenchServeConfig.parse(values)


def test_where_the_server_is():
    assert BenchServeConfig().url == "http://127.0.0.1:30000"
    for address in ("h:1", "h:1/", "http://h:1/v1", "http://h:1/v1/"):
        assert BenchServeConfig(base_url=address).url == "http://h:1", address
    assert BenchServeConfig(base_url="https://h/proxy/v1").url == "https://h/proxy"
    assert BenchServeConfig(backend="vllm-chat").url == "http://127.0.0.1:8000"
    assert BenchServeConfig(base_url="http://far:1/", port=7).url == "http://far:1"
    assert BenchServeConfig(host="::1", port=7).url == "http://[::1]:7"
    assert BenchServeConfig(host="[::1]", port=7).url == "http://[::1]:7"
