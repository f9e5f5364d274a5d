"""Masks allow what a plain search finds, and whoever takes too long loses only himself."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from threading import Thread

import pytest

from tests.grammar.conftest import SOURCE, Compile
from tests.grammar.hasty_foundry import CRASHES, SLEEPS, SPINS
from tetrad.grammar import masks as masks_module
from tetrad.grammar.compiler import Compiled, Compiler, Refused
from tetrad.grammar.layout import ALLOWED, DEAD_END, ENDED, GIVEN_UP, REJECTED, mask_words
from tetrad.grammar.masks import MaskMaker
from tetrad.grammar.vocabulary import ends_line_first, ends_line_last, has_blank_line
from tetrad.grammar.wire import MAX_MESSAGE_BYTES

WORDS = ["red", "reddish", "green tea", "grün", "rot\n", "0"]
NUM_ROWS = 6


@pytest.fixture
def maker(compiler: Compiler) -> Iterator[MaskMaker]:
    made = MaskMaker(compiler, SOURCE.size, NUM_ROWS)
    yield made
    made.stop()


def one_of(compiled: Compile, *words: str) -> Compiled:
    elements = [{"type": "const_string", "value": word} for word in words]
    tag = {"type": "structural_tag", "format": {"type": "or", "elements": elements}}
    outcome = compiled("structural_tag", json.dumps(tag))
    assert isinstance(outcome, Compiled)
    return outcome


def row_of(maker: MaskMaker, row: int) -> set[int]:
    width = mask_words(SOURCE.size)
    words = maker.rows[row * width : (row + 1) * width]
    return {i for i in range(SOURCE.size) if words[i // 32] >> i % 32 & 1}


def searched(vocabulary: list[bytes], words: list[str], said: bytes) -> set[int]:
    """Tokens with which `said` remains the beginning of one of `words`, and end tokens where it is
    one: the plain reference."""
    texts = [word.encode() for word in words]
    on = {
        i
        for i, token in enumerate(vocabulary)
        if token and any(text.startswith(said + token) for text in texts)
    }
    return on | (set(SOURCE.end_ids) if said in texts else set())


@pytest.mark.parametrize("seed", range(4))
def test_masks_allow_what_a_plain_search_finds(
    compiled: Compile, maker: MaskMaker, vocabulary: list[bytes], seed: int
):
    """Several answers side by side, some of which take part in a step and some not."""
    draw = random.Random(seed)
    grammar = one_of(compiled, *WORDS)
    answers = {maker.open(grammar): b"" for _ in range(NUM_ROWS)}
    news: dict[int, list[int]] = {number: [] for number in answers}
    while answers:
        taking_part = draw.sample(sorted(answers), draw.randint(1, len(answers)))
        states = maker.fill([(number, news[number]) for number in taking_part])
        assert states == [ALLOWED] * len(taking_part)
        for row, number in enumerate(taking_part):
            allowed = row_of(maker, row)
            assert allowed == searched(vocabulary, WORDS, answers[number])
            token = draw.choice(sorted(allowed))
            if token in SOURCE.end_ids:
                maker.close(number)
                del answers[number]
                continue
            news[number] = [token]
            answers[number] += vocabulary[token]


def test_a_row_says_when_nothing_goes_on(compiled: Compile, maker: MaskMaker):
    number = maker.open(one_of(compiled, "red"))
    assert maker.fill([(number, [0])]) == [REJECTED]
    control = compiled("regex", "[ab]\x7f?x")
    assert isinstance(control, Compiled)
    assert maker.fill([(maker.open(control), [])]) in ([ALLOWED], [DEAD_END])


@pytest.mark.parametrize(
    ("what", "state", "why"), [(SPINS, GIVEN_UP, "too long"), (CRASHES, ENDED, "ended twice")]
)
def test_one_is_given_up_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
    compiled: Compile,
    compiler: Compiler,
    maker: MaskMaker,
    vocabulary: list[bytes],
    what: int,
    state: int,
    why: str,
):
    monkeypatch.setattr(masks_module, "CPU_LIMIT_S", 0.1)
    good, bad = one_of(compiled, *WORDS), one_of(compiled, f"bad {what}")
    first, culprit, last = maker.open(good), maker.open(bad), maker.open(good)
    start: list[tuple[int, list[int]]] = [(first, []), (culprit, []), (last, [])]
    assert maker.fill(start) == [ALLOWED] * 3
    r, e, g = (vocabulary.index(letter) for letter in (b"r", b"e", b"g"))
    assert maker.fill([(first, [r])]) == [ALLOWED]
    states = maker.fill([(first, [e]), (culprit, [what]), (last, [g])])
    assert states == [ALLOWED, state, ALLOWED]
    assert row_of(maker, 0) == searched(vocabulary, WORDS, b"re")
    assert row_of(maker, 2) == searched(vocabulary, WORDS, b"g")
    d = vocabulary.index(b"d")
    assert maker.fill([(first, [d]), (last, [])]) == [ALLOWED] * 2
    assert row_of(maker, 0) == searched(vocabulary, WORDS, b"red")
    assert row_of(maker, 1) == searched(vocabulary, WORDS, b"g")
    maker.close(culprit)  # as whoever was told does
    refused = compiler.outcome(bad.key)
    assert isinstance(refused, Refused)
    assert why in refused.reason


@pytest.mark.parametrize("num_kills", [1, 2])
def test_whom_a_killed_process_worked_for_is_tried_anew_once(
    compiled: Compile, compiler: Compiler, maker: MaskMaker, vocabulary: list[bytes], num_kills: int
):
    """As when the system is short of memory."""
    grammar = one_of(compiled, "red", f"killed {num_kills} times")
    number, r = maker.open(grammar), vocabulary.index(b"r")
    maker.fill([(number, [])])

    def kill() -> None:
        for _ in range(num_kills):
            pid = maker._pid
            while maker._words[0] != number or maker._pid == 0:
                time.sleep(0.001)
            os.kill(maker._pid, signal.SIGKILL)
            while maker._pid == pid:
                time.sleep(0.001)

    thread = Thread(target=kill, daemon=True)
    thread.start()
    states = maker.fill([(number, [SLEEPS, r])])
    if num_kills == 1:
        assert states == [ALLOWED]
        assert row_of(maker, 0) == searched(vocabulary, ["red"], b"r")
        assert compiler.outcome(grammar.key) is grammar
    else:
        assert states == [ENDED]
        assert isinstance(compiler.outcome(grammar.key), Refused)
    thread.join(5)


def test_a_process_that_is_killed_is_started_anew(
    compiled: Compile, maker: MaskMaker, vocabulary: list[bytes]
):
    """Between two masks, so that nobody is to blame."""
    numbers = [maker.open(one_of(compiled, *WORDS)) for _ in range(2)]
    maker.fill([(number, []) for number in numbers])
    r = vocabulary.index(b"r")
    maker.fill([(number, [r]) for number in numbers])
    for _ in range(2):
        os.kill(maker._pid, signal.SIGKILL)
        assert maker.fill([(number, []) for number in numbers]) == [ALLOWED] * 2
        assert row_of(maker, 1) == searched(vocabulary, WORDS, b"r")


def test_a_new_process_is_told_of_a_long_answer(
    compiled: Compile, maker: MaskMaker, vocabulary: list[bytes]
):
    """Longer than one message may be."""
    word = next(i for i, token in enumerate(vocabulary) if i > 255 and token.isalpha())
    words = compiled("regex", "[A-Za-z]*x")
    assert isinstance(words, Compiled)
    number, other = maker.open(words), maker.open(one_of(compiled, *WORDS))
    for _ in range(MAX_MESSAGE_BYTES // 3 // 10_000 + 1):
        assert maker.fill([(number, [word] * 10_000), (other, [])]) == [ALLOWED] * 2
    os.kill(maker._pid, signal.SIGKILL)
    assert maker.fill([(number, []), (other, [])]) == [ALLOWED] * 2
    assert row_of(maker, 1) == searched(vocabulary, WORDS, b"")


def test_one_that_never_starts_is_given_up_at_last(
    monkeypatch: pytest.MonkeyPatch, compiled: Compile, compiler: Compiler
):
    maker = MaskMaker(compiler, SOURCE.size, NUM_ROWS)
    monkeypatch.setattr(masks_module, "WALL_LIMIT_S", 0.05)
    monkeypatch.setattr(compiler, "follow", lambda end, masks: None)
    number = maker.open(one_of(compiled, "red"))
    assert maker.fill([(number, [])]) == [ENDED]
    maker.stop()


def test_who_only_waits_for_a_processor_is_not_given_up(
    monkeypatch: pytest.MonkeyPatch, compiled: Compile, maker: MaskMaker
):
    monkeypatch.setattr(masks_module, "CPU_LIMIT_S", 0.1)
    number = maker.open(one_of(compiled, "red"))
    assert maker.fill([(number, [SLEEPS])]) == [ALLOWED]


def test_a_grammar_that_is_not_followed_any_more_is_dropped_at_last(
    monkeypatch: pytest.MonkeyPatch, compiled: Compile, maker: MaskMaker
):
    monkeypatch.setattr(masks_module, "MAX_LOADED", 1)
    for word in ("one", "two", "three", "one"):
        number = maker.open(one_of(compiled, word))
        assert maker.fill([(number, [])]) == [ALLOWED]
        maker.close(number)
    assert len(maker.keys) <= 2


def test_a_row_takes_microseconds(compiled: Compile, maker: MaskMaker):
    """A bound far above what it takes, so that a wait or a poll in the way is noticed."""
    number = maker.open(one_of(compiled, *WORDS))
    maker.fill([(number, [])])
    took = []
    for _ in range(50):
        began = time.perf_counter()
        maker.fill([(number, [])])
        took.append(time.perf_counter() - began)
    assert sorted(took)[25] < 0.01


def test_json_has_no_control_characters(
    compiled: Compile, maker: MaskMaker, vocabulary: list[bytes]
):
    """xgrammar lets them into a string with a limit, where they are no JSON."""
    for schema in ({"type": "string", "maxLength": 5}, {"type": "string", "minLength": 2}):
        grammar = compiled("json_schema", json.dumps(schema))
        assert isinstance(grammar, Compiled)
        assert maker.fill([(maker.open(grammar), [vocabulary.index(b'"')])]) == [ALLOWED]
        allowed = row_of(maker, 0)
        assert len(allowed) > 300
        assert not [i for i in allowed if any(byte < 0x20 for byte in vocabulary[i])]


def test_a_grammar_is_read_beside_the_masks(compiled: Compile, maker: MaskMaker):
    """Masks of others do not wait for one that is large."""
    number = maker.open(one_of(compiled, "red"))
    maker.fill([(number, [])])
    large = compiled("json_schema", json.dumps({"enum": [f"v{i}" for i in range(6000)]}))
    assert isinstance(large, Compiled)
    num_fills = 0
    while not maker.prepare(large):
        assert maker.fill([(number, [])]) == [ALLOWED]
        num_fills += 1
    assert num_fills >= 3
    other = maker.open(large)
    assert maker.fill([(number, []), (other, [])]) == [ALLOWED] * 2


def test_white_space_does_not_go_on_for_ever(
    compiled: Compile, maker: MaskMaker, vocabulary: list[bytes]
):
    """After 8 tokens of it JSON must go on with a sign; where only white space matches it may."""
    schema = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
    json_, spaces = compiled("json_schema", schema), compiled("regex", " {40}x")
    assert isinstance(json_, Compiled)
    assert isinstance(spaces, Compiled)
    brace, space = vocabulary.index(b"{"), vocabulary.index(b" ")
    blanks = {i for i, token in enumerate(vocabulary) if token and not token.strip()}
    number, other = maker.open(json_), maker.open(spaces)
    for count in range(12):
        last = brace if count == 0 else space
        is_allowed = count <= 8
        states = maker.fill([(number, [last] if is_allowed else []), (other, [space])])
        assert states == [ALLOWED, ALLOWED]
        assert bool(row_of(maker, 0) & blanks) == (count < 8)
        assert row_of(maker, 0) & {vocabulary.index(b'"')}
        assert row_of(maker, 1) & blanks


def test_json_has_no_blank_lines(compiled: Compile, maker: MaskMaker, vocabulary: list[bytes]):
    """It may be indented: one line end between two signs, and then no other before the next."""
    schema = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
    grammar, free = compiled("json_schema", schema), compiled("regex", r"\{[ \n]*x")
    assert isinstance(grammar, Compiled)
    assert isinstance(free, Compiled)
    breaks = {i for i, token in enumerate(vocabulary) if b"\n" in token}
    brace, line, space = (vocabulary.index(sign) for sign in (b"{", b"\n", b" "))
    number, other = maker.open(grammar), maker.open(free)
    for last, may_break in ((brace, True), (space, True), (line, False), (space, False)):
        assert maker.fill([(number, [last]), (other, [last])]) == [ALLOWED] * 2
        allowed = row_of(maker, 0)
        assert bool(allowed & breaks) == may_break
        assert {vocabulary.index(b'"'), space} <= allowed
        assert row_of(maker, 1) & breaks
    for sign in (b'"', b"a", b'"', b":"):
        maker.fill([(number, [vocabulary.index(sign)])])
    assert row_of(maker, 0) & breaks


def test_where_lines_end_in_a_token():
    texts = [b"\n", b"\r\n", b" \n ", b"{\n ", b"\n}", b",\n\n", b'\n \n"', b"\r\r", b" ", b"a\nb"]
    assert [has_blank_line(t) for t in texts] == [t in texts[5:8] for t in texts]
    assert [ends_line_first(t) for t in texts] == [
        t in (*texts[:3], *texts[4:5], *texts[6:8]) for t in texts
    ]
    assert [ends_line_last(t) for t in texts] == [
        t in (*texts[:4], *texts[5:6], *texts[7:8]) for t in texts
    ]
