"""The followers' process: reads what each constrained answer got, writes what it may get next.

Masks go to memory that it shares with the engine. It also writes there whom it works for, so that
the engine knows who was served when it stopped.
"""

from __future__ import annotations

import mmap
import os
import signal
import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import xgrammar

from tetrad.grammar.layout import ALLOWED, DEAD_END, HEADER_WORDS, NOBODY, REJECTED, mask_words
from tetrad.grammar.vocabulary import (
    BLANKS,
    breaks_json,
    ends_line_first,
    ends_line_last,
    has_blank_line,
)
from tetrad.grammar.wire import receive, send

MAX_BLANKS = 8
"""Tokens of nothing but white space in a row. JSON allows it without end between any two signs, and
some models then write nothing else."""


@dataclass
class Follower:
    """One answer."""

    matcher: xgrammar.GrammarMatcher
    is_json: bool
    num_blanks: int = 0
    """Of its last tokens, those of nothing but white space."""
    is_new_line: bool = False
    """Is there a line end behind its last sign?"""


class Followers:
    """State of all constrained answers, each known by a number."""

    def __init__(self, info: xgrammar.TokenizerInfo, masks: int) -> None:
        """`masks`: descriptor of the shared memory."""
        words = np.frombuffer(mmap.mmap(masks, os.fstat(masks).st_size), np.int32)
        self._info = info
        self._header = words[:HEADER_WORDS]
        self._rows = words[HEADER_WORDS:].reshape(-1, mask_words(info.vocab_size))
        self._compiled: dict[int, Future[xgrammar.CompiledGrammar]] = {}
        self._reader = ThreadPoolExecutor(1, "reader")
        """Reads grammars beside the masks: a large one takes a tenth of a second."""
        self._followers: dict[int, Follower] = {}
        vocabulary = info.decoded_vocab
        self._is_blank = [bool(token) and not token.strip(BLANKS) for token in vocabulary]
        self._not_blank = _bits([not blank for blank in self._is_blank], info.vocab_size)
        self._in_json = _bits(
            [not breaks_json(token) and not has_blank_line(token) for token in vocabulary],
            info.vocab_size,
        )
        self._same_line = _bits(
            [not ends_line_first(token) for token in vocabulary], info.vocab_size
        )
        self._ends_line = [ends_line_last(token) for token in vocabulary]

    def obey(
        self, message: list[Any], descriptors: list[int], tell: Callable[[list[Any]], None]
    ) -> None:
        """Do as told. `tell` answers, also from another thread."""
        match message:
            case ["load", key]:
                self._compiled[key] = self._reader.submit(self._load, descriptors[0])
                self._compiled[key].add_done_callback(lambda _: tell(["loaded", key]))
            case ["drop", key]:
                del self._compiled[key]
            case ["open", number, key, is_json]:
                self._work_for(number)
                matcher = xgrammar.GrammarMatcher(self._compiled[key].result())
                self._followers[number] = Follower(matcher, is_json)
                self._work_for(NOBODY)
            case ["read", number, token_ids]:
                self._work_for(number)
                self._read(self._followers[number], token_ids)
                self._work_for(NOBODY)
            case ["close", number]:
                del self._followers[number]
            case ["masks", rows]:
                states = [self._fill(*row) for row in rows]
                self._work_for(NOBODY)
                tell(["done", states])
            case _:
                raise ValueError(f"followers do not know {message[0]!r}")

    def _load(self, descriptor: int) -> xgrammar.CompiledGrammar:
        data = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        os.close(descriptor)
        return xgrammar.CompiledGrammar.deserialize_json(data.decode(), self._info)

    def _fill(self, row: int, number: int, token_ids: list[int]) -> int:
        self._work_for(number)
        follower = self._followers[number]
        if not self._read(follower, token_ids):
            return REJECTED
        mask = self._rows[row : row + 1]
        follower.matcher.fill_next_token_bitmask(mask, 0)
        if follower.is_json:
            mask &= self._in_json
            if follower.is_new_line:
                mask &= self._same_line  # blank lines are all that some models would write
        if follower.num_blanks >= MAX_BLANKS and (signs := mask & self._not_blank).any():
            mask[:] = signs
        return ALLOWED if mask.any() else DEAD_END

    def _read(self, follower: Follower, token_ids: list[int]) -> bool:
        """Tell a grammar of tokens; False if it does not allow one."""
        for token_id in token_ids:
            if not follower.matcher.accept_token(token_id):
                return False
            is_blank = self._is_blank[token_id]
            follower.num_blanks = follower.num_blanks + 1 if is_blank else 0
            was_new_line = is_blank and follower.is_new_line
            follower.is_new_line = was_new_line or self._ends_line[token_id]
        return True

    def _work_for(self, number: int) -> None:
        self._header[0] = number
        self._header[1] += 1


def _bits(is_set: list[bool], vocab: int) -> np.ndarray:
    """A row of which bit i is 1 if `is_set[i]`."""
    flags = np.zeros(mask_words(vocab) * 32, np.bool_)
    flags[: len(is_set)] = is_set[:vocab]
    return np.packbits(flags, bitorder="little").view(np.int32)


def main(info: xgrammar.TokenizerInfo, end: int, masks: int) -> int:
    """Serve until the engine is gone; the exit code."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    followers = Followers(info, masks)
    with socket.socket(fileno=end) as engine:
        tell = partial(send, engine)
        tell(["pid", os.getpid()])
        while True:
            try:
                message, descriptors = receive(engine)
            except EOFError:
                return 0
            followers.obey(message, descriptors, tell)
