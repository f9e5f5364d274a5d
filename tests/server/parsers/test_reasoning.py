"""Reasoning and answer, wherever the output is cut."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tetrad.server.parsers.reasoning import (
    REASONING_FORMATS,
    ReasoningParser,
    Start,
    guessed_format,
)

INSIDE = [
    ("3 plus 5 is 8</think>3 + 5 = 8", "3 plus 5 is 8", "3 + 5 = 8"),
    ("\nlong\nthought\n</think>\n\nanswer\n", "long\nthought\n", "answer\n"),
    ("</think>answer", "", "answer"),
    ("never ends < here </thin", "never ends < here </thin", ""),
    ("think<tool_call>f</tool_call>", "think", "<tool_call>f</tool_call>"),
    ("a</think>b</think>c", "a", "b</think>c"),
    ("a < b <tool> </thinking></think>x", "a < b <tool> </thinking>", "x"),
    ("", "", ""),
]
OUTSIDE = [
    ("answer", "", "answer"),
    ("<think>why</think>answer", "why", "answer"),
    ("  <think>why</think>answer", "why", "answer"),
    ("<thin", "", "<thin"),
    ("  <three", "", "  <three"),
    ("x <think>y</think>", "", "x <think>y</think>"),
]


def read(pieces: Iterable[str], name: str, start: Start) -> tuple[str, str]:
    parser = ReasoningParser(REASONING_FORMATS[name], start)
    found = {"reasoning": "", "content": ""}
    for piece in pieces:
        for kind, text in parser.feed(piece):
            found[kind] += text
    for kind, text in parser.finish():
        found[kind] += text
    return found["reasoning"], found["content"]


CASES: list[tuple[str, Start, str, str, str]] = [
    *(("glm45", "inside", *case) for case in INSIDE),
    *(("glm45", "undecided", *case) for case in OUTSIDE),
    *(("qwen3", "inside", *case) for case in INSIDE if "<tool_call>" not in case[0]),
    *(("qwen3", "undecided", *case) for case in OUTSIDE),
    ("qwen3", "inside", "a <tool_call> b</think>c", "a <tool_call> b", "c"),
    *(("deepseek-r1", "inside", *case) for case in INSIDE if "<tool_call>" not in case[0]),
    ("deepseek-r1", "inside", "<think>\nwhy</think>answer", "why", "answer"),
    ("deepseek-r1", "inside", " <think>a<think>b</think>c", "a<think>b", "c"),
    ("deepseek-r1", "inside", "<thin", "<thin", ""),
    ("deepseek-r1", "after", "x <think>y</think>", "", "x <think>y</think>"),
    ("glm45", "after", "<think>y</think>", "", "<think>y</think>"),
]


@pytest.mark.parametrize(("name", "start", "text", "reasoning", "content"), CASES)
def test_every_split_gives_the_same(
    name: str, start: Start, text: str, reasoning: str, content: str
):
    for split in range(len(text) + 1):
        assert read([text[:split], text[split:]], name, start) == (reasoning, content)
    assert read(text, name, start) == (reasoning, content)


@pytest.mark.parametrize(("name", "start", "text", "reasoning", "content"), CASES)
def test_no_half_marker_is_shown_before_the_end(
    name: str, start: Start, text: str, reasoning: str, content: str
):
    parser = ReasoningParser(REASONING_FORMATS[name], start)
    shown = {"reasoning": "", "content": ""}
    for character in text:
        for kind, piece in parser.feed(character):
            shown[kind] += piece
        assert reasoning.startswith(shown["reasoning"])
        assert content.startswith(shown["content"])


PIECES = ["<think>", "</think>", "<tool_call>", "<", "a", " ", "\n", "<thi", "nk>"]


@pytest.mark.parametrize("name", REASONING_FORMATS)
@pytest.mark.parametrize("start", ["inside", "after", "undecided"])
@given(text=st.lists(st.sampled_from(PIECES), max_size=10).map("".join), data=st.data())
def test_any_text_however_cut_gives_the_same(
    name: str, start: Start, text: str, data: st.DataObject
):
    whole = read([text], name, start)
    assert read(text, name, start) == whole
    cut = data.draw(st.integers(0, len(text)))
    assert read([text[:cut], text[cut:]], name, start) == whole
    if start == "after":
        assert whole == ("", text)


def test_inside_tells_where_the_text_stands():
    parser = ReasoningParser(REASONING_FORMATS["glm45"], "inside")
    parser.feed("a</thi")
    assert parser.inside
    parser.feed("nk>")
    assert not parser.inside


@pytest.mark.parametrize(
    ("prompt", "expected", "forced"),
    [
        ("<|assistant|><think>", "inside", "inside"),
        ("<|assistant|>\n<think>\n", "inside", "inside"),
        ("<|assistant|><think></think>", "after", "after"),
        ("<|assistant|></think>\n\n", "after", "after"),
        ("<|assistant|>", "undecided", "inside"),
    ],
)
def test_the_prompt_decides_where_the_output_starts(prompt: str, expected: str, forced: str):
    assert REASONING_FORMATS["glm45"].start(prompt) == expected
    assert REASONING_FORMATS["qwen3"].start(prompt) == expected
    assert REASONING_FORMATS["deepseek-r1"].start(prompt) == forced


@pytest.mark.parametrize(
    ("template", "name"),
    [("<think> <tool_call><arg_key>", "glm45"), ("</think> <tool_call>", "qwen3"), ("hello", None)],
)
def test_the_template_tells_the_format(template: str, name: str | None):
    assert guessed_format(template) == name
