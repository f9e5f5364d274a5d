"""What each API is asked and what its events mean."""

from __future__ import annotations

import pytest

from tetrad.bench.load.backends import Reading, ignores_eos, most_tokens, protocol, write_body
from tetrad.bench.options.serve import BenchServeConfig
from tetrad.bench.workload.requests import Prompt
from tetrad.core.errors import ConfigError

IDS = Prompt(16, ids=(5, 6, 7), num_tokens=3)
TEXT = Prompt(16, text="What is 3+5?")
MESSAGES = Prompt(16, messages=({"role": "user", "content": "What is 3+5?"},))


def body(prompt: Prompt, **options):
    return write_body(BenchServeConfig.parse(options), "m", prompt)


def read(backend: str, *events) -> Reading:
    reading = Reading()
    for time_s, event in enumerate(events, start=1):
        protocol(backend).read(reading, float(time_s), event)
    return reading


@pytest.mark.parametrize("backend", ["tetrad", "sglang", "sglang-native"])
def test_native_sends_token_ids_as_they_are(backend: str):
    assert body(IDS, backend=backend) == {
        "input_ids": (5, 6, 7),
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 16, "ignore_eos": True},
        "stream": True,
    }
    assert body(TEXT, backend=backend)["text"] == "What is 3+5?"
    with pytest.raises(ConfigError, match="takes no messages; use sglang-oai-chat"):
        body(MESSAGES, backend=backend)


@pytest.mark.parametrize("backend", ["sglang-oai", "vllm"])
def test_completions_asks_for_usage_and_sends_ids_as_a_prompt(backend: str):
    assert body(IDS, backend=backend) == {
        "prompt": (5, 6, 7),
        "model": "m",
        "max_tokens": 16,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    assert "stream_options" not in body(TEXT, backend=backend, disable_stream=True)
    with pytest.raises(ConfigError, match=f"use {backend}-chat"):
        body(MESSAGES, backend=backend)


@pytest.mark.parametrize("backend", ["sglang-oai-chat", "vllm-chat", "openai-chat"])
def test_chat_makes_text_a_user_turn(backend: str):
    sent = body(TEXT, backend=backend)
    assert sent["messages"] == ({"role": "user", "content": "What is 3+5?"},)
    assert sent["max_completion_tokens"] == 16
    assert body(MESSAGES, backend=backend)["messages"] == MESSAGES.messages
    with pytest.raises(ConfigError, match="takes no input_ids"):
        body(IDS, backend=backend)


def test_ignore_eos_goes_only_where_it_is_known():
    assert not ignores_eos(body(TEXT, backend="openai"))
    assert not ignores_eos(body(TEXT, backend="openai-chat"))
    assert ignores_eos(body(TEXT, backend="vllm"))
    assert ignores_eos(body(TEXT, backend="tetrad"))
    assert not ignores_eos(body(TEXT, backend="tetrad", disable_ignore_eos=True))
    assert ignores_eos(body(TEXT, backend="openai", extra_request_body='{"ignore_eos": true}'))


def test_the_extra_body_is_merged_one_level_deep():
    extra = '{"sampling_params": {"top_p": 0.5, "temperature": 1}, "priority": 2}'
    sent = body(IDS, backend="tetrad", extra_request_body=extra)
    assert sent["priority"] == 2
    assert sent["sampling_params"] == {
        "temperature": 1,
        "max_new_tokens": 16,
        "ignore_eos": True,
        "top_p": 0.5,
    }


def native(text: str, tokens: int, finish=None):
    meta = {
        "completion_tokens": tokens,
        "prompt_tokens": 9,
        "cached_tokens": 4,
        "finish_reason": finish,
    }
    return {"text": text, "meta_info": meta}


def test_native_counts_are_cumulative():
    """The second event brings no token: its text was held back."""
    end = {"type": "length", "length": 5}
    reading = read("sglang", native("a", 1), native("a", 1), native("a b c", 5, end))
    assert reading.stamps == [(1.0, 1), (3.0, 4)]
    assert reading.counts_tokens
    assert (reading.text, reading.output_tokens, reading.finish) == ("a b c", 5, "length")
    assert (reading.prompt_tokens, reading.cached_tokens) == (9, 4)


def test_native_abort_is_a_failure():
    reading = read("sglang", native("a", 1, {"type": "abort", "message": "out of pages"}))
    assert reading.failure is not None
    assert (reading.failure.kind, reading.failure.message) == ("aborted", "out of pages")


def chunk(delta=None, finish=None, usage=None, **choice):
    choices = [] if delta is None and not choice else [{"finish_reason": finish, **choice}]
    if delta is not None:
        choices[0]["delta"] = delta
    return {"choices": choices, "usage": usage}


def test_chat_reads_reasoning_content_and_tool_calls():
    opened = [{"index": 0, "id": "call_0", "function": {}}]
    call = [{"index": 0, "function": {"name": "calculator", "arguments": ""}}]
    more = [{"index": 0, "function": {"arguments": '{"a":1}'}}]
    usage = {
        "prompt_tokens": 9,
        "completion_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    reading = read(
        "openai-chat",
        chunk({"role": "assistant", "content": ""}),
        chunk({"reasoning_content": "think", "content": None}),
        chunk({"reasoning": " more"}),
        chunk({"content": "8"}),
        chunk({"tool_calls": opened}),
        chunk({"tool_calls": call}),
        chunk({"tool_calls": more}),
        chunk({}, finish="tool_calls"),
        chunk(usage=usage),
    )
    assert [time_s for time_s, _ in reading.stamps] == [2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert reading.text == 'think more8calculator{"a":1}'
    assert (reading.finish, reading.output_tokens, reading.prompt_tokens) == ("tool_calls", 6, 9)
    assert reading.cached_tokens == 4
    assert not reading.counts_tokens


def test_chat_reads_a_whole_answer():
    message = {"role": "assistant", "reasoning_content": "t", "content": "8", "tool_calls": None}
    usage = {"prompt_tokens": 9, "completion_tokens": 2}
    answer = {"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage}
    reading = read("openai-chat", answer)
    assert (reading.text, reading.finish, reading.output_tokens) == ("t8", "stop", 2)


def test_completions_reads_text_usage_and_held_back_tokens():
    reading = read(
        "openai",
        chunk(text="a"),
        chunk(text=""),
        chunk(text="", finish="length"),
        chunk(usage={"completion_tokens": 2, "prompt_tokens": 3, "prompt_tokens_details": None}),
    )
    assert reading.stamps == [(1.0, 1), (2.0, 1)]
    assert (reading.text, reading.finish, reading.output_tokens) == ("a", "length", 2)


NO_COUNTS: tuple[object, ...] = ("8", 8.0, 8.7, -8, True, [8], {}, 10**30, float("inf"))


@pytest.mark.parametrize("count", NO_COUNTS)
def test_what_is_no_number_of_tokens_is_no_answer(count: object):
    """One of them, taken at its word, would spoil the sums of a whole run."""
    for field in ("completion_tokens", "prompt_tokens", "cached_tokens"):
        meta = {"completion_tokens": 8, "finish_reason": {"type": "length"}, field: count}
        with pytest.raises((TypeError, ValueError)):
            read("tetrad", {"text": "a", "meta_info": meta})
    for field in ("completion_tokens", "prompt_tokens"):
        with pytest.raises((TypeError, ValueError)):
            read("vllm", {"choices": [], "usage": {field: count}})
    with pytest.raises((TypeError, ValueError)):
        read("vllm", {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": count}}})


@pytest.mark.parametrize("text", [5, ["a"], {"a": 1}, True])
def test_what_is_no_text_is_no_answer(text: object):
    meta = {"completion_tokens": 8, "finish_reason": None}
    for backend, event in (
        ("tetrad", {"text": text, "meta_info": meta}),
        ("tetrad", {"text": "a", "meta_info": meta | {"finish_reason": {"type": text}}}),
        ("vllm", {"choices": [{"text": text}]}),
        ("vllm", {"choices": [{"text": "a", "finish_reason": text}]}),
        ("vllm-chat", {"choices": [{"delta": {"content": text}}]}),
    ):
        with pytest.raises(TypeError):
            read(backend, event)


def test_null_counts_leave_what_was_known():
    usage = {"prompt_tokens": 3, "completion_tokens": 5}
    reading = read("vllm", {"usage": usage}, {"usage": dict.fromkeys(usage)})
    assert (reading.prompt_tokens, reading.output_tokens) == (3, 5)


def test_most_tokens_is_what_the_body_allows():
    assert most_tokens(body(IDS)) == 16
    assert most_tokens(body(TEXT, backend="vllm-chat")) == 16
    extra = '{"n": 3, "max_tokens": 20}'
    assert most_tokens(body(TEXT, backend="vllm", extra_request_body=extra)) == 60
    assert most_tokens({"prompt": "x"}) is None
