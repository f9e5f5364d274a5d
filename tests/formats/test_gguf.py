"""GGUF files: headers that lie cost one sentence, blocks keep their values."""

from __future__ import annotations

import contextlib
import random
import struct
import tracemalloc
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from tests.llama import tiny_gguf
from tetrad.core.errors import CheckpointError
from tetrad.core.gguf import TYPES, GgufFile
from tetrad.core.gguf_arch import arch_of_gguf
from tetrad.formats import integers
from tetrad.formats.gguf import GgufWeights


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return tiny_gguf(tmp_path_factory.mktemp("good") / "tiny.gguf", {"attn_q": "Q4_1"}).read_bytes()


def refused(tmp_path: Path, data: bytes) -> str:
    """The one sentence; nothing large was allocated for it."""
    path = tmp_path / "hostile.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError) as error:
            arch_of_gguf(GgufFile.read(path))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * len(data) + (8 << 20)
    sentence = str(error.value)
    assert "\n" not in sentence
    return sentence


def number(value: int, kind: str = "Q") -> bytes:
    return struct.pack(f"<{kind}", value)


def text(value: str) -> bytes:
    return number(len(value)) + value.encode()


def header(num_tensors: int, num_values: int, rest: bytes = b"") -> bytes:
    return b"GGUF" + number(3, "I") + number(num_tensors) + number(num_values) + rest


def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    sizes = b"".join(map(number, shape))
    return text(name) + number(len(shape), "I") + sizes + number(kind, "I") + number(offset)


def test_what_gguf_wrote_is_read_back(tmp_path: Path, good: bytes):
    path = tmp_path / "good.gguf"
    path.write_bytes(good)
    ours, theirs = GgufFile.read(path), gguf.GGUFReader(path)
    assert set(ours.tensors) == {tensor.name for tensor in theirs.tensors}
    for found in theirs.tensors:
        mine = ours.tensors[found.name]
        assert (mine.offset, mine.nbytes) == (found.data_offset, found.n_bytes)
        assert mine.shape == tuple(int(size) for size in found.shape)[::-1]
    for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "llama.rope.freq_base"):
        assert ours.metadata[key] == theirs.fields[key].contents()


def test_the_table_of_types_is_ggmls():
    for number_of, (name, block, nbytes) in TYPES.items():
        kind = gguf.GGMLQuantizationType(number_of)
        assert (kind.name, gguf.GGML_QUANT_SIZES[kind]) == (name, (block, nbytes))


HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "wants 4 bytes at byte 0"),
    "another file": (b"PK\x03\x04 zip", "is no GGUF file"),
    "other byte order": (b"GGUF" + struct.pack(">I", 3) + bytes(16), "another byte order"),
    "many tensors": (header(2**60, 0), "claims 1152921504606846976 entries"),
    "many values": (header(0, 2**63), "claims 9223372036854775808 entries"),
    "long key": (header(0, 1, number(2**40) + bytes(64)), "claims a text of 1099511627776 bytes"),
    "long text": (
        header(0, 1, text("k") + number(8, "I") + number(2**26 - 1)),
        "its header wants",
    ),
    "long array": (
        header(0, 1, text("k") + number(9, "I") + number(0, "I") + number(2**50)),
        "entries",
    ),
    "array beyond the end": (
        header(0, 1, text("k") + number(9, "I") + number(4, "I") + number(1000)),
        "claims 1000 entries",
    ),
    "array of arrays": (
        header(0, 1, text("k") + number(9, "I") + number(9, "I") + number(9)),
        "an array of values of type 9",
    ),
    "unknown value": (header(0, 1, text("k") + number(99, "I") + bytes(8)), "a value of type 99"),
    "unknown type": (header(1, 0, tensor("t", (32,), 77, 0) + bytes(64)), "ggml's type 77"),
    "many axes": (header(1, 0, tensor("t", (1,) * 9, 0, 0)), "has 9 axes"),
    "huge shape": (header(1, 0, tensor("t", (2**40, 2**40), 0, 0)), "has the shape"),
    "no rows": (header(1, 0, tensor("t", (0, 4), 0, 0)), "has the shape"),
    "half a block": (header(1, 0, tensor("t", (33,), 3, 0)), "has the shape"),
    "far offset": (header(1, 0, tensor("t", (32,), 0, 2**62)), "is truncated"),
    "twice": (
        header(2, 0, tensor("t", (8,), 0, 0) + tensor("t", (8,), 0, 32) + bytes(128)),
        "names 't' twice",
    ),
    "overlap": (
        header(2, 0, tensor("t", (32,), 0, 0) + tensor("u", (32,), 0, 64) + bytes(512)),
        "lies over another",
    ),
    "alignment": (
        header(0, 1, text("general.alignment") + number(4, "I") + number(0, "I")),
        "its alignment is 0",
    ),
    "number of parts": (
        header(0, 1, text("split.count") + number(8, "I") + text("two")),
        "its split.count is no number",
    ),
}


@pytest.mark.parametrize(("data", "found"), HOSTILE.values(), ids=HOSTILE)
def test_a_header_that_lies_costs_a_sentence(tmp_path: Path, data: bytes, found: str):
    assert found in refused(tmp_path, data)


@pytest.mark.parametrize("share", [0.001, 0.02, 0.1, 0.5, 0.999])
def test_a_truncated_file_costs_a_sentence(tmp_path: Path, good: bytes, share: float):
    refused(tmp_path, good[: int(len(good) * share)])


def test_damage_anywhere_in_the_header_is_refused_or_harmless(tmp_path: Path, good: bytes):
    draw = random.Random(0)
    path, num_refused = tmp_path / "damaged.gguf", 0
    for _ in range(200):
        at, junk = draw.randrange(12_000), draw.randbytes(draw.randint(1, 12))
        path.write_bytes(good[:at] + junk + good[at + len(junk) :])
        with contextlib.suppress(CheckpointError):
            arch_of_gguf(GgufFile.read(path))
            num_refused -= 1
        num_refused += 1
    assert 20 < num_refused < 190


@pytest.mark.parametrize(
    ("name", "found"),
    [("falcon", "of architecture 'falcon'"), ("llama", "lacks llama.embedding_length")],
)
def test_other_models_are_refused(tmp_path: Path, name: str, found: str):
    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(path, name)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=found):
        arch_of_gguf(GgufFile.read(path))


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("tokenizer.ggml.eos_token_id", 60_000, "eos_token_id is 60000, and the model's vocabu"),
        ("tokenizer.ggml.eot_token_id", -1, "eot_token_id is -1, and the model's vocabulary of"),
        ("tokenizer.ggml.eos_token_id", "end", "eos_token_id has a value of another type"),
        ("tokenizer.ggml.bos_token_id", 128, "vocabulary of 128 tokens ends with 127"),
        ("llama.rope.freq_base", float("nan"), "The model's rotary base is nan; it must be"),
        ("llama.rope.freq_base", 0.0, "The model's rotary base is 0.0; it must be above 0"),
        ("llama.attention.layer_norm_rms_epsilon", float("inf"), "epsilon of its norms is inf"),
        ("llama.attention.layer_norm_rms_epsilon", 0.0, "epsilon of its norms is 0.0"),
    ],
)
def test_numbers_that_no_model_has_are_refused(
    tmp_path: Path, good: bytes, key: str, value: object, found: str
):
    """An end token outside the vocabulary would end the engine at the first min_tokens."""
    path = tmp_path / "tiny.gguf"
    path.write_bytes(good)
    file = GgufFile.read(path)
    told = {"tokenizer.ggml.add_bos_token": True, key: value}
    assert arch_of_gguf(file).eos_ids == (2, 0)
    with pytest.raises(CheckpointError, match=found):
        arch_of_gguf(replace(file, metadata=file.metadata | told))


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0"])
def test_blocks_of_integers_keep_every_value(name: str):
    values = np.random.default_rng(0).normal(size=(6, 96)).astype(np.float32)
    kind = gguf.GGMLQuantizationType[name]
    blocks = gguf.quants.quantize(values, kind)
    stored = integers.from_ggml(torch.from_numpy(blocks), name)
    truth = torch.from_numpy(gguf.quants.dequantize(blocks, kind))
    torch.testing.assert_close(stored.dequantize(torch.float32), truth, rtol=0, atol=1e-7)


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q5_0", "Q5_1", "Q6_K", "Q4_K"])
def test_other_types_are_decoded(tmp_path: Path, name: str):
    """Of widths that the type's blocks allow."""
    path, kind = tmp_path / "one.gguf", gguf.GGMLQuantizationType[name]
    rng = np.random.default_rng(0)
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    if name in ("Q6_K", "Q4_K"):
        data = rng.integers(0, 60, size=(4, 256 // block * nbytes), dtype=np.uint8)
    else:
        data = gguf.quants.quantize(rng.normal(size=(4, 256)).astype(np.float32), kind)
    whole = tiny_gguf(tmp_path / "tiny.gguf", {})
    arch = arch_of_gguf(GgufFile.read(whole))
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("output.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    weight = GgufWeights(path, arch, "cpu").linear("lm_head", (4, 256))
    truth = torch.from_numpy(gguf.quants.dequantize(data, kind)).float()
    torch.testing.assert_close(weight.dequantize(torch.float32), truth, equal_nan=True)
