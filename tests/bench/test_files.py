"""Prompts from files: what each line becomes, and what a bad one is told."""

from __future__ import annotations

import json

import pytest

from tetrad.bench.load.backends import write_body
from tetrad.bench.options.serve import BenchServeConfig
from tetrad.bench.workload.datasets import build
from tetrad.bench.workload.files import read, texts_of
from tetrad.bench.workload.requests import Prompt, Seeds
from tetrad.bench.workload.template import ChatTemplate
from tetrad.bench.workload.tokens import Vocabulary
from tetrad.core.errors import ConfigError
from tetrad.data import embedded_model

SEEDS = Seeds(1, 1)
TALK = [{"from": "human", "value": "What is 3+5?"}, {"from": "gpt", "value": "3 + 5 = 8"}]


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary(embedded_model())


def prompts(path, lines, vocabulary=None, **options) -> list[Prompt]:
    text = lines if isinstance(lines, str) else "\n".join(json.dumps(line) for line in lines)
    path = path / "prompts.jsonl"
    path.write_text(text)
    values = {"dataset_name": "custom", "dataset_path": path, "random_output_len": 9} | options
    return read(BenchServeConfig.parse(values), SEEDS, vocabulary)


def test_a_file_of_prompts(tmp_path):
    lines = [
        {"prompt": "What is 3+5?", "output_len": 7},
        {"messages": [{"role": "user", "content": "Hi"}]},
        {"input_ids": [4, 5], "max_tokens": 1},
    ]
    text, chat, ids = prompts(tmp_path, lines)
    assert (text.text, text.output_tokens, text.num_tokens) == ("What is 3+5?", 7, None)
    assert (chat.messages, chat.output_tokens) == (({"role": "user", "content": "Hi"},), 9)
    assert (ids.ids, ids.num_tokens, ids.output_tokens) == ((4, 5), 2, 1)
    assert prompts(tmp_path, lines, num_prompts=1, dataset_offset=1) == [chat]
    assert {p.output_tokens for p in prompts(tmp_path, lines, sharegpt_output_len=3)} == {3}
    with pytest.raises(ConfigError, match="holds 3 prompts that can be sent, fewer than the 4"):
        prompts(tmp_path, lines, num_prompts=4)
    with pytest.raises(ConfigError, match="no such file"):
        read(BenchServeConfig(dataset_name="custom", dataset_path=tmp_path / "no"), SEEDS, None)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", "line 1: not valid JSON"),
        ("7", "line 1: expected a JSON object, found int"),
        ("[7]", "entry 1: expected a JSON object, found int"),
        ('{"promt": "a"}', "unknown key 'promt'.*Did you mean 'prompt'"),
        ('{"prompt": "a", "input_ids": [1]}', "expected one of prompt, messages, turns, input_ids"),
        ('{"prompt": 3}', "prompt has the wrong type, int"),
        ('{"prompt": ["a"]}', "prompt has the wrong type, list"),
        ('{"input_ids": ["a"]}', "input_ids must be whole numbers"),
        ('{"messages": ["a"]}', "every message must be an object with content"),
        ('{"turns": ["a", 1]}', "turns must be a list of texts"),
        ('{"conversations": [1]}', "a conversation is a list of objects with a text"),
        ('{"prompt": "a", "output_len": 0}', "output_len must be a whole number above 0"),
        ('{"prompt": "a", "output_len": true}', "output_len must be a whole number above 0"),
    ],
)
def test_a_bad_line_is_named(line: str, sentence: str, tmp_path):
    with pytest.raises(ConfigError, match=sentence):
        prompts(tmp_path, line)


def test_a_file_that_is_no_text(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(ConfigError, match="is no UTF-8 text"):
        read(BenchServeConfig(dataset_name="custom", dataset_path=path), SEEDS, None)


def test_sharegpt_takes_the_first_question_and_the_first_answers_length(tmp_path, vocabulary):
    short, alone = [{"value": "a"}, {"value": "b"}], TALK[:1]
    talks = [{"conversations": talk, "id": 1} for talk in (TALK, alone, short)]
    (only,) = prompts(tmp_path, json.dumps(talks), vocabulary, dataset_name="sharegpt")
    assert only.text == "What is 3+5?"
    assert only.num_tokens == vocabulary.count("What is 3+5?")
    assert only.output_tokens == vocabulary.count("3 + 5 = 8")
    fixed = {"dataset_name": "sharegpt", "sharegpt_output_len": 2}
    assert {p.output_tokens for p in prompts(tmp_path, talks[:1], **fixed)} == {2}
    with pytest.raises(ConfigError, match="give --tokenizer FOLDER or --sharegpt-output-len"):
        prompts(tmp_path, talks, dataset_name="sharegpt")
    with pytest.raises(ConfigError, match="holds 0 prompts"):
        prompts(tmp_path, talks, vocabulary, dataset_name="sharegpt", sharegpt_context_len=5)


def test_sharegpt_is_shuffled_the_same_in_every_run(tmp_path):
    talks = [
        {"conversation": [{"content": f"question {i}"}, {"content": "answer"}]} for i in range(20)
    ]
    options = {"dataset_name": "sharegpt", "sharegpt_output_len": 4}
    first, again = (prompts(tmp_path, talks, **options) for _ in range(2))
    assert first == again
    assert [p.text for p in first] != [f"question {i}" for i in range(20)]
    assert len({p.text for p in first}) == 20
    assert texts_of(tmp_path / "prompts.jsonl", 2)[1] == "question 3"
    with pytest.raises(ConfigError, match="no prompt that is text, from entry 20 on"):
        texts_of(tmp_path / "prompts.jsonl", 20)


def test_suffix_template_and_tokens(tmp_path, vocabulary):
    lines = [{"prompt": "What is 3+5?"}]
    (suffixed,) = prompts(tmp_path, lines, prompt_suffix=" Quick!")
    assert suffixed.text == "What is 3+5? Quick!"
    (rendered,) = prompts(tmp_path, lines, vocabulary, apply_chat_template=True)
    assert rendered.text is not None
    assert "What is 3+5?" in rendered.text
    assert rendered.text != "What is 3+5?"
    assert rendered.num_tokens == vocabulary.count(rendered.text)
    (ids,) = prompts(tmp_path, lines, vocabulary, tokenize_prompt=True)
    assert ids.text is None
    assert list(ids.ids or ()) == vocabulary.encode("What is 3+5?")
    with pytest.raises(ConfigError, match="give --tokenizer FOLDER"):
        prompts(tmp_path, lines, apply_chat_template=True)


def test_a_folder_without_a_template_or_with_a_bad_one(tmp_path):
    with pytest.raises(ConfigError, match="holds no chat template"):
        ChatTemplate(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ConfigError, match="is no template"):
        ChatTemplate(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ConfigError, match="failed: roles must alternate"):
        ChatTemplate(tmp_path).render([{"role": "user", "content": "a"}])


def test_turns_wait_for_each_other_and_carry_the_files_answers(tmp_path, vocabulary):
    lines = [{"prompt": "a"}, {"turns": ["q1", "a1", "q2", "a2", "q3"], "output_len": 5}]
    _, one, two, three = prompts(tmp_path, lines)
    assert [p.after for p in (one, two, three)] == [None, 1, 2]
    assert one.messages == ({"role": "user", "content": "q1"},)
    assert [m["content"] for m in three.messages or ()] == ["q1", "a1", "q2", "a2", "q3"]
    assert [m["role"] for m in two.messages or ()] == ["user", "assistant", "user"]
    *_, last = prompts(tmp_path, lines, vocabulary, apply_chat_template=True)
    assert last.messages is None
    assert last.after == 2
    places = [(last.text or "").index(text) for text in ("q1", "a1", "q2", "a2", "q3")]
    assert places == sorted(places)


def test_openai_lines_are_sent_as_they_are(tmp_path):
    messages = [{"role": "user", "content": "Hi"}]
    line = {"messages": messages, "max_tokens": 7, "model": "x", "tools": [1], "temperature": 0.7}
    line |= {"stream": False, "stream_options": None}
    (prompt,) = prompts(tmp_path, [line], dataset_name="openai")
    config = BenchServeConfig(backend="openai-chat", extra_request_body='{"seed": 1}')
    assert write_body(config, "m", prompt) == {
        "messages": tuple(messages),
        "model": "m",
        "max_completion_tokens": 7,
        "temperature": 0.7,
        "tools": [1],
        "seed": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    with pytest.raises(ConfigError, match="expected messages"):
        prompts(tmp_path, [{"prompt": "a"}], dataset_name="openai")


def test_cache_bust_marks_conversations_as_a_whole(tmp_path):
    lines = [{"turns": ["q1", "a1", "q2"]}, {"prompt": "a"}, {"input_ids": [1, 2, 3]}]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    config = BenchServeConfig(dataset_name="custom", dataset_path=path, cache_bust=True)
    one, two, text, ids = build(config, Seeds(1, 1), None)
    assert (one.messages or ())[0] == (two.messages or ())[0]
    assert (one.messages or ())[0]["content"].endswith("] q1")
    assert text.text is not None
    assert text.text.endswith("] a")
    assert sorted(ids.ids or ()) == [1, 2, 3]
    assert ids.ids != (1, 2, 3)
    assert build(config, Seeds(1, 2), None)[2].text != text.text
