"""Reasoning and answer, wherever the output is cut."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tetrad.server.reasoning import ReasoningParser, starts_inside

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


def read(pieces: Iterable[str], inside: bool) -> tuple[str, str]:
    parser = ReasoningParser(inside=inside)
    found = {"reasoning": "", "content": ""}
    for piece in pieces:
        for kind, text in parser.feed(piece):
            found[kind] += text
    for kind, text in parser.finish():
        found[kind] += text
    return found["reasoning"], found["content"]


CASES = [(True, *case) for case in INSIDE] + [(False, *case) for case in OUTSIDE]


@pytest.mark.parametrize(("inside", "text", "reasoning", "content"), CASES)
def test_every_split_gives_the_same(inside: bool, text: str, reasoning: str, content: str):
    for split in range(len(text) + 1):
        assert read([text[:split], text[split:]], inside) == (reasoning, content)
    assert read(text, inside) == (reasoning, content)


@pytest.mark.parametrize(("inside", "text", "reasoning", "content"), CASES)
def test_no_half_marker_is_shown_before_the_end(
    inside: bool, text: str, reasoning: str, content: str
):
    parser = ReasoningParser(inside=inside)
    shown = {"reasoning": "", "content": ""}
    for character in text:
        for kind, piece in parser.feed(character):
            shown[kind] += piece
        assert reasoning.startswith(shown["reasoning"])
        assert content.startswith(shown["content"])


def test_inside_tells_where_the_text_stands():
    parser = ReasoningParser(inside=True)
    parser.feed("a</thi")
    assert parser.inside
    parser.feed("nk>")
    assert not parser.inside


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("<|assistant|><think>", True),
        ("<|assistant|>\n<think>\n", True),
        ("<|assistant|><think></think>", False),
        ("<|assistant|></think>", False),
        ("<|assistant|>", False),
    ],
)
def test_the_prompt_decides_where_the_output_starts(prompt: str, expected: bool):
    assert starts_inside(prompt) is expected
