"""Grammars are compiled elsewhere, within limits, and once."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.grammar.conftest import ROOT, SOURCE, Compile, make_compiler
from tetrad.grammar import compiler as compiler_module
from tetrad.grammar.compiler import Compiled, Compiler, Refused
from tetrad.grammar.compiling import slow_s
from tetrad.grammar.foundry import _epitaph
from tetrad.grammar.vocabulary import VocabularySource, read_vocabulary

FINE = {
    "regex": r"\d{3}-[a-c]+",
    "json_schema": '{"type": "object", "properties": {"a": {"type": "integer"}}}',
    "ebnf": 'root ::= "yes" | "no"',
    "lark": 'start: "a" | "b"',
    "structural_tag": '{"type": "structural_tag", "format": {"type": "any_text"}}',
}
DEEP = '{"type":"object","properties":{"a":' * 400 + "{}" + "}}" * 400
BAD = [
    ("regex", "(a", "parenthesis is not closed"),
    ("regex", "(" * 3000 + "a" + ")" * 3000, "."),
    ("ebnf", "root ::= foo", '"foo" is not defined'),
    ("ebnf", "x ::= [", "."),
    ("ebnf", 'root ::= root root | "a" | "b" | [a-z]', "too long to follow"),
    ("ebnf", "root ::= a a a a a\na ::= a a | [a-z ]*", "too long to follow"),
    ("lark", "x", "."),
    ("json_schema", "nonsense", "parse JSON"),
    ("json_schema", '{"type": "strng"}', 'Unsupported type "strng"'),
    ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}', "minimum greater"),
    ("json_schema", '{"enum": []}', "must not be empty"),
    ("json_schema", "false", "cannot accept any value"),
    ("json_schema", '{"$ref": "#"}', "Circular"),
    ("json_schema", '{"$ref": "#/$defs/gone"}', "."),
    ("json_schema", r'{"type": "string", "pattern": "^a\"b$"}', "need not be JSON"),
    ("json_schema", DEEP, "longer than 1 s|too large"),
    ("json_schema", json.dumps({"enum": [f"v{i}" for i in range(14_000)]}), "longer|too large|GiB"),
    ("structural_tag", '{"a": 1}', "format"),
    ("structural_tag", "{}}", "."),
]


def test_a_larger_vocabulary_may_take_a_token_longer():
    assert slow_s(512) == slow_s(25_000) == 0.02
    assert slow_s(150_000) == pytest.approx(0.12)


@pytest.mark.parametrize("kind", FINE)
def test_what_means_something_compiles(compiled: Compile, kind: str):
    assert isinstance(compiled(kind, FINE[kind]), Compiled)


@pytest.mark.parametrize(("kind", "text", "reason"), BAD, ids=range(len(BAD)))
def test_what_does_not_is_refused_with_a_reason(
    compiled: Compile, kind: str, text: str, reason: str
):
    outcome = compiled(kind, text)
    assert isinstance(outcome, Refused)
    assert not outcome.is_ours
    assert 0 < len(outcome.reason) <= 300
    assert ".cc:" not in outcome.reason
    assert re.search(reason, outcome.reason), outcome.reason


def test_the_same_grammar_is_compiled_once(compiler: Compiler, compiled: Compile):
    first = compiled("regex", "a|b")
    assert compiler.ask("regex", "a|b") == first.key  # type: ignore[union-attr]
    assert compiler.ask("ebnf", "a|b") != first.key  # type: ignore[union-attr]


def test_others_are_not_held_up_by_some_that_take_long(compiler: Compiler, compiled: Compile):
    slow = [compiler.ask("json_schema", DEEP.replace('"a"', f'"{name}"')) for name in "bcd"]
    assert isinstance(compiled("regex", "quick"), Compiled)
    assert all(compiler.outcome(key or 0) is None for key in slow)


def test_old_grammars_are_forgotten_but_not_those_in_use(
    monkeypatch: pytest.MonkeyPatch, compiler: Compiler, compiled: Compile
):
    monkeypatch.setattr(compiler_module, "MAX_KEPT", 2)
    kept = [compiled("regex", f"[{letter}]") for letter in "abcd"]
    compiler.forget(frozenset({kept[0].key}))  # type: ignore[union-attr]
    left = [compiler.outcome(one.key) for one in kept]  # type: ignore[union-attr]
    assert left == [kept[0], None, kept[2], kept[3]]
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(kept[1].descriptor)  # type: ignore[union-attr]


def test_one_that_turns_out_to_be_unusable_is_kept_only_for_who_follows_it(
    compiler: Compiler, compiled: Compile
):
    found = compiled("regex", "unusable")
    assert isinstance(found, Compiled)
    compiler.refuse(found.key, "it is slow")
    assert compiled("regex", "unusable") == Refused("it is slow")
    compiler.forget({found.key})
    os.fstat(found.descriptor)
    compiler.forget(frozenset())
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(found.descriptor)


def test_who_waits_is_told_when_the_process_ends_and_the_next_starts_another():
    compiler = make_compiler()
    try:
        key = compiler.ask("regex", "a")
        assert key is not None
        assert compiler._process is not None
        os.kill(compiler._process.pid, signal.SIGKILL)
        while (outcome := compiler.outcome(key)) is None:
            compiler.look()
        assert outcome == Refused(compiler_module.ENDED, is_ours=True)
        compiler.forget(frozenset())
        again = compiler.ask("regex", "a")
        assert again is not None
        while (outcome := compiler.outcome(again)) is None:
            compiler.look()
            time.sleep(0.01)
        assert isinstance(outcome, Compiled)
    finally:
        compiler.stop()


def test_only_so_many_wait(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiler_module, "MAX_WAITING", 1)
    compiler = make_compiler()
    monkeypatch.setattr(compiler, "start", lambda: None)
    assert compiler.ask("regex", "a") is not None
    assert compiler.ask("regex", "b") is None
    assert compiler.ask("regex", "a") is not None


def test_what_ended_a_child_is_said():
    for status, words, is_ours in (
        (signal.SIGPROF, "longer than", False),
        (signal.SIGALRM, "busy with others; try again", True),
        (signal.SIGSEGV, "crashes .SIGSEGV", False),
        (signal.SIGABRT, "crashes .SIGABRT", False),
        (signal.SIGTERM, "from outside .SIGTERM.; try again", True),
        (1 << 8, "memory", False),
    ):
        reason, found = _epitaph(status)
        assert re.search(words, reason)
        assert found == is_ours


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def compiling_child(compiler: Compiler, text: str) -> tuple[int, int]:
    """Key of a grammar that takes long, and the process that compiles it."""
    key = compiler.ask("json_schema", text)
    assert key is not None
    assert compiler._process is not None
    while not (found := children(compiler._process.pid)):
        compiler.look()
        time.sleep(0.002)
    return key, found[0]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGALRM])
def test_a_child_ended_from_outside_blames_nobody_and_is_not_remembered(number: signal.Signals):
    compiler = make_compiler()
    try:
        key, pid = compiling_child(compiler, DEEP)
        os.kill(pid, number)
        while (outcome := compiler.outcome(key)) is None:
            compiler.look()
            time.sleep(0.002)
        assert isinstance(outcome, Refused)
        assert outcome.is_ours
        assert outcome.reason.endswith("try again.")
        compiler.forget(frozenset())
        assert compiler.ask("json_schema", DEEP) != key
    finally:
        compiler.stop()


def test_children_end_with_the_process_that_forked_them():
    compiler = Compiler(SOURCE, {**os.environ, "PYTHONPATH": ROOT})
    try:
        _, pid = compiling_child(compiler, DEEP)
        assert compiler._process is not None
        time.sleep(0.1)
        os.kill(compiler._process.pid, signal.SIGKILL)
        compiler._process.wait()
        deadline = time.monotonic() + 3
        while Path(f"/proc/{pid}").exists() and _state(pid) != "Z":
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        compiler.stop()


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "Z"


def test_control_tokens_and_rows_without_a_token_are_no_text():
    known = read_vocabulary(SOURCE)
    assert len(known) == 520
    assert known[512:] == [b""] * 8
    assert known[491:501] == [b""] * 10
    assert known[502] == b"</think>"
    assert b"{" in known
    lent = read_vocabulary(VocabularySource(SOURCE.path, 1000, (1,), is_lent=True))
    assert lent == (known[:512] * 2)[:1000]
    assert len(read_vocabulary(VocabularySource(SOURCE.path, 100, (1,)))) == 100
