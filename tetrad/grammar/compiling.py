"""Compiling one grammar, in a process of its own with limits: what it costs nobody knows before.

What was compiled is tried before it is used: a grammar may be quick to compile and slow to follow.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import resource
import signal
import time

import numpy as np
import xgrammar

from tetrad.grammar.layout import JSON_KIND
from tetrad.grammar.schemas import check_pattern, enforced, enforced_tag
from tetrad.grammar.vocabulary import breaks_json

CPU_LIMIT_S = 15.0
WALL_LIMIT_S = 60.0
"""On processors that are busy; reaching it is no fault of the grammar."""
MEMORY_LIMIT_BYTES = 1 << 30
"""Beyond what the process has when it begins."""
MAX_COMPILED_BYTES = 16 << 20
"""Larger ones take the followers' process too long to read."""
NICENESS = 10
"""Those who serve go first."""
TRIAL_TOKENS = 96
TRIAL_WALKS = 4
SLOW_S, SLOW_VOCAB = 0.02, 25_000
"""Processor time that one token may take with a vocabulary of up to so many, in proportion beyond,
as a mask looks at each of them; all in a step wait for it. Most schemas take less than 1 ms, an
e-mail address by its format up to 20 ms with 49,152 tokens."""
MAX_REASON_CHARACTERS = 300


class RefusedError(Exception):
    """The grammar cannot be used; the text says why."""


def limit_myself() -> None:
    """The system ends this process when it goes too far; nothing of it must be able to object."""
    os.nice(NICENESS)
    for number in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(number, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)
    signal.setitimer(signal.ITIMER_REAL, WALL_LIMIT_S)
    with open("/proc/self/statm") as statm:
        now_bytes = int(statm.read().split()[0]) * resource.getpagesize()
    most = now_bytes + MEMORY_LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def compile_grammar(info: xgrammar.TokenizerInfo, kind: str, text: str) -> bytes:
    """The compiled grammar, serialised. Raises RefusedError."""
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    try:
        compiled = _compile(compiler, kind, text)
        data = compiled.serialize_json()
    except MemoryError:
        raise
    except RecursionError:
        raise RefusedError("it is nested too deeply; some hundred levels work") from None
    except Exception as error:  # noqa: BLE001 - the binding raises what it likes
        raise RefusedError(_reason(error)) from None
    if len(data) > MAX_COMPILED_BYTES:
        raise RefusedError(
            f"it is too large, {len(data) >> 20} MiB compiled of at most "
            f"{MAX_COMPILED_BYTES >> 20}; fewer optional properties, alternatives or repetitions "
            "work"
        )
    compiled = xgrammar.CompiledGrammar.deserialize_json(data, info)
    _try_out(compiled, info, is_json=kind == JSON_KIND)
    return data.encode()


def _compile(compiler: xgrammar.GrammarCompiler, kind: str, text: str) -> xgrammar.CompiledGrammar:
    match kind:
        case "json_schema":
            return compiler.compile_json_schema(_enforced(text))
        case "regex":
            check_pattern(text, "the regex")
            return compiler.compile_regex(text)
        case "ebnf":
            return compiler.compile_grammar(text)
        case "lark":
            return compiler.compile_lark(text)
        case "structural_tag":
            return compiler.compile_structural_tag(enforced_tag(json.loads(text)))
    raise RefusedError(f"there is no kind {kind!r}")


def _enforced(text: str) -> str:
    try:
        schema = json.loads(text)
    except json.JSONDecodeError:
        return text  # the compiler says what is wrong
    return json.dumps(enforced(schema))


def _reason(error: Exception) -> str:
    """xgrammar's sentence without the place in its source."""
    text = str(error).strip()
    if "bad_alloc" in text:
        raise MemoryError
    text = _PLACE.sub("", text)
    return " ".join(text.split())[:MAX_REASON_CHARACTERS].rstrip(".") or type(error).__name__


_PLACE = re.compile(r"\[[\d:]+\] \S+?:\d+: (Check failed: \(.*?\) is false: )?")
"""Time, file, line and condition in what the library says, sometimes one within another."""


def _try_out(
    compiled: xgrammar.CompiledGrammar,
    info: xgrammar.TokenizerInfo,
    *,
    is_json: bool,
    seed: int = 0,
) -> None:
    """Follow it along random texts. Raises RefusedError if it allows none, takes too long, or gives
    what is no JSON although it should be."""
    row = np.zeros((1, (info.vocab_size + 31) // 32), np.int32)
    draw = random.Random(seed)
    ends, vocabulary = set(info.stop_token_ids), info.decoded_vocab
    most_s = slow_s(info.vocab_size)
    for walk in range(TRIAL_WALKS):
        matcher, text = xgrammar.GrammarMatcher(compiled), b""
        for position in range(TRIAL_TOKENS):
            with _quick(most_s):
                matcher.fill_next_token_bitmask(row, 0)
            bits = np.unpackbits(row.view(np.uint8)[0], count=info.vocab_size, bitorder="little")
            allowed = np.flatnonzero(bits)
            if not len(allowed):
                if walk == position == 0:
                    raise RefusedError("no text matches it")
                break
            going_on = [i for i in _some(draw, allowed) if i not in ends]
            if is_json:
                if matcher.is_completed():
                    _check_json(text)
                going_on = [i for i in going_on if not breaks_json(vocabulary[i])]
            if not going_on:
                break
            with _quick(most_s):
                matcher.accept_token(going_on[0])
            text += vocabulary[going_on[0]]


def _check_json(text: bytes) -> None:
    """Numbers of any size and halves of surrogate pairs are JSON, though some refuse them."""
    try:
        json.loads(text, parse_int=str, parse_float=str, parse_constant=_no_json)
    except ValueError:
        raise RefusedError(
            "texts that match it need not be JSON: a pattern with a quote or a backslash in it is "
            "the usual reason"
        ) from None


def _no_json(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


def _some(draw: random.Random, allowed: np.ndarray) -> list[int]:
    """A few of them, so that an end is taken only where little else is allowed."""
    return [int(allowed[draw.randrange(len(allowed))]) for _ in range(8)]


def slow_s(vocab_size: int) -> float:
    """Seconds of processor time that one token of a trial may take."""
    return SLOW_S * max(1.0, vocab_size / SLOW_VOCAB)


@contextlib.contextmanager
def _quick(most_s: float):  # type: ignore[no-untyped-def]
    began_s = time.process_time()
    yield
    if time.process_time() - began_s > most_s:
        raise RefusedError(
            "it takes too long to follow: many ways of reading the same text, or very many counted "
            "repetitions, are the usual reason"
        )


def main(info: xgrammar.TokenizerInfo, kind: str, text: str, result: int, reasons: int) -> int:
    """Compile in a process that was forked for it; writes to the descriptors `result` or `reasons`.
    Returns the exit code."""
    limit_myself()
    try:
        data = compile_grammar(info, kind, text)
        with open(result, "wb", closefd=False) as file:
            file.write(data)
    except RefusedError as error:
        os.write(reasons, str(error).encode())
    except MemoryError:
        os.write(reasons, MEMORY_REASON.encode())
    except Exception as error:  # noqa: BLE001 - the process ends here, whatever it is
        os.write(reasons, f"compiling it fails: {type(error).__name__}: {error}".encode())
    return 0


MEMORY_REASON = f"compiling it takes more than {MEMORY_LIMIT_BYTES >> 30} GiB of memory"
