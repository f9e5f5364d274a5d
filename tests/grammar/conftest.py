"""One grammar process for all tests of this folder, on a vocabulary of single bytes and words."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.grammar import hasty_foundry
from tetrad.data import embedded_model
from tetrad.grammar.compiler import Compiled, Compiler, Refused
from tetrad.grammar.vocabulary import VocabularySource, read_vocabulary

ROOT = str(Path(__file__).resolve().parents[2])
SOURCE = VocabularySource(str(embedded_model()), 520, (491, 498, 500))
"""More rows than the vocabulary has tokens."""


class HastyCompiler(Compiler):
    module = hasty_foundry.__name__


def make_compiler() -> Compiler:
    return HastyCompiler(SOURCE, {**os.environ, "PYTHONPATH": ROOT})


@pytest.fixture(scope="session")
def compiler() -> Iterator[Compiler]:
    made = make_compiler()
    yield made
    made.stop()


Compile = Callable[[str, str], Compiled | Refused]


@pytest.fixture
def compiled(compiler: Compiler) -> Compile:
    """Asks and waits."""

    def compile_(kind: str, text: str) -> Compiled | Refused:
        key = compiler.ask(kind, text)
        assert key is not None
        deadline = time.monotonic() + 60
        while (outcome := compiler.outcome(key)) is None:
            assert time.monotonic() < deadline
            compiler.look()
            time.sleep(0.002)
        return outcome

    return compile_


@pytest.fixture(scope="session")
def vocabulary() -> list[bytes]:
    return read_vocabulary(SOURCE)
