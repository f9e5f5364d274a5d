"""Schemas of every day pass the trial, whatever texts it happens to try."""

from __future__ import annotations

import json
from typing import Any

import pytest
import xgrammar

from tests.grammar.conftest import SOURCE
from tetrad.grammar.compiling import RefusedError, _check_json, _compile, _try_out
from tetrad.grammar.vocabulary import read_vocabulary

NUMBER: dict[str, Any] = {"type": "number"}
FREE: dict[str, Any] = {"type": "object", "additionalProperties": True}
NODE = {
    "type": "object",
    "properties": {
        "value": NUMBER,
        "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
    },
    "required": ["value", "next"],
}
EVERYDAY: dict[str, Any] = {
    "number": NUMBER,
    "bounded number": {"type": "number", "minimum": 0.5, "maximum": 99},
    "array of anything": {"type": "array"},
    "array of numbers": {"type": "array", "items": NUMBER, "minItems": 1},
    "anything": {},
    "free object": {"type": "object"},
    "object with a free one": {
        "type": "object",
        "properties": {"meta": FREE, "n": NUMBER},
        "required": ["meta", "n"],
    },
    "map": {"type": "object", "additionalProperties": NUMBER},
    "string": {"type": "string"},
    "enum": {"enum": ["a", 1, 1e3, None]},
    "anyOf": {"anyOf": [NUMBER, {"type": "string"}, {"type": "boolean"}]},
    "nullable": {"type": ["number", "null"]},
    "references": {"$defs": {"node": NODE}, "$ref": "#/$defs/node"},
    "date": {"type": "string", "format": "date-time"},
    "address": {"type": "string", "format": "email"},
}
SEEDS = range(12)
BYTES = [bytes([byte]) for byte in range(256)]
PIECES = [b"999", b"00", b"e9", b"E-", b'\\ud8"', b"\\u", b'":', b"[[", b"}}", "ü".encode(), b""]


def _info(vocabulary: list[bytes], end: int) -> xgrammar.TokenizerInfo:
    return xgrammar.TokenizerInfo(
        vocabulary, xgrammar.VocabType.RAW, vocab_size=len(vocabulary), stop_token_ids=[end]
    )


VOCABULARIES = {
    "abacus": _info(read_vocabulary(SOURCE), SOURCE.end_ids[0]),
    "bytes": _info(BYTES + PIECES, len(BYTES + PIECES) - 1),
}


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("name", EVERYDAY)
def test_schemas_of_every_day_pass(name: str, vocabulary: str):
    info = VOCABULARIES[vocabulary]
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    compiled = _compile(compiler, "json_schema", json.dumps(EVERYDAY[name]))
    for seed in SEEDS:
        _try_out(compiled, info, is_json=True, seed=seed)


@pytest.mark.parametrize(
    "text", [b"5E659", b"-0.1e-9999", b"9" * 5000, rb'"\ud800"', rb'"\udc00x"']
)
def test_what_some_readers_refuse_is_json(text: bytes):
    _check_json(text)


@pytest.mark.parametrize("text", [b"NaN", b"-Infinity", b"01", b'"a\nb"', b'"\xff"', b'"a"b"', b""])
def test_what_is_no_json_is_found(text: bytes):
    with pytest.raises(RefusedError, match="need not be JSON"):
        _check_json(text)
