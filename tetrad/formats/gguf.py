"""The tensors of a GGUF file under the names and in the order that a model here asks for.

Integers in blocks of one scale stay as stored; ggml's other types are decoded by the `gguf`
package. Rows of query and key projections are put back into the order they were trained in: ggml
rotates neighbours, so whoever wrote the file moved rows (i, i + W/2) of each head together.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from tetrad.core.errors import CheckpointError, ConfigError
from tetrad.core.extras import install
from tetrad.core.gguf import GgufFile, GgufTensor
from tetrad.core.llama_arch import LlamaArch
from tetrad.formats import integers
from tetrad.formats.catalogue import StoredTensor
from tetrad.formats.reader import Reader, empty_for
from tetrad.formats.weights import DenseWeight, Weight

_DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_TOP = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_IN_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OnBytes = Callable[[int, int], None]


class GgufWeights:
    """`StoredWeights` of one file."""

    def __init__(
        self, path: Path, arch: LlamaArch, device: str, on_bytes: OnBytes | None = None
    ) -> None:
        """Weights will be placed on `device`; `on_bytes` hears of bytes read and of all bytes.
        Raises CheckpointError."""
        self._file = GgufFile.read(path)
        self._arch, self._device, self._on_bytes = arch, device, on_bytes
        self._given: dict[str, tuple[str, str]] = {}
        """Names in the file, and the format that each was first given out in, of a linear also as
        which module."""
        self._reader = Reader()
        self._nbytes_total = sum(tensor.nbytes for tensor in self._file.tensors.values())
        self.nbytes_read = 0
        self.read_s = 0.0
        """Seconds that reading has taken."""

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A vector or a table, decoded."""
        stored = self._stored(name.removesuffix(".weight"), shape)
        self._given.setdefault(stored.name, (DenseWeight.format_name, ""))
        return _decoded(self._rows(stored), stored).view(shape).to(self._device)

    def linear(self, module: str, shape: tuple[int, int]) -> Weight:
        """A linear's weight [out, in]."""
        stored = self._stored(module, shape)
        rows = self._in_order(self._rows(stored), module)
        weight: Weight
        if stored.type_name in integers.GGML_INTEGERS and self._device == "cpu":
            weight = integers.from_ggml(rows, stored.type_name)
        else:
            weight = DenseWeight(_decoded(rows, stored).to(self._device))
        self._given.setdefault(stored.name, (weight.format_name, module))
        return weight

    def linears(self, modules: Sequence[str], shape: tuple[int, int]) -> Weight:
        """Nobody stacks matrices of such a model."""
        raise NotImplementedError

    def close(self) -> None:
        """End what reads."""
        self._reader.close()

    def unread(self) -> list[str]:
        """Names in the file that nobody asked for, sorted."""
        return sorted(set(self._file.tensors) - set(self._given))

    def file_bytes(self, made: Mapping[str, str]) -> Counter[str]:
        """Bytes in the file by the format that they were given out in, each tensor once; of modules
        in `made` by the one that was made of it."""
        found: Counter[str] = Counter()
        for name, (format_name, module) in self._given.items():
            found[made.get(module, format_name)] += self._file.tensors[name].nbytes
        return found

    def _stored(self, module: str, shape: tuple[int, ...]) -> GgufTensor:
        name = ggml_name(module)
        found = self._file.tensors.get(name)
        if found is None:
            raise CheckpointError(
                f"{self._file.path} lacks tensor '{name}' (expected {list(shape)})."
            )
        if found.shape != tuple(shape):
            raise CheckpointError(
                f"Tensor '{name}' has another shape: expected {list(shape)}, found "
                f"{list(found.shape)} in {self._file.path.name}."
            )
        return found

    def _rows(self, stored: GgufTensor) -> Tensor:
        """Its bytes, uint8 [rows, bytes of a row], in main memory."""
        started = time.monotonic()
        shape = (stored.nbytes // stored.row_bytes, stored.row_bytes)
        place = StoredTensor(
            stored.name, self._file.path, "U8", shape, stored.nbytes, stored.offset
        )
        rows = empty_for(place, "cpu")
        self._reader.fill([(place, rows)], self._on_piece)
        self.read_s += time.monotonic() - started
        return rows

    def _on_piece(self, _stored: StoredTensor, nbytes: int) -> None:
        self.nbytes_read += nbytes
        if self._on_bytes is not None:
            self._on_bytes(self.nbytes_read, self._nbytes_total)

    def _in_order(self, rows: Tensor, module: str) -> Tensor:
        """Of queries and keys each head's even rows, then its odd ones."""
        if not module.endswith((".q_proj", ".k_proj")):
            return rows
        heads = rows.view(-1, self._arch.gqa.head_dim // 2, 2, rows.shape[1])
        return heads.transpose(1, 2).reshape(rows.shape)


def ggml_name(module: str) -> str:
    """Our name of a module as ggml's name of its weight."""
    if module in _TOP:
        return f"{_TOP[module]}.weight"
    _, _, layer, inner = module.split(".", 3)
    return f"blk.{layer}.{_IN_LAYER[inner]}.weight"


def _decoded(rows: Tensor, stored: GgufTensor) -> Tensor:
    """The values of rows of bytes, [rows, in]: as stored, or fp32 of a quantised type."""
    if stored.type_name in _DENSE:
        return rows.view(_DENSE[stored.type_name])
    try:
        import gguf
    except ImportError:
        raise ConfigError(
            f"'{stored.name}' is stored as {stored.type_name}, which the package gguf decodes; "
            f"`{install('gguf')}` in Tetrad's folder brings it."
        ) from None
    kind = gguf.GGMLQuantizationType(stored.type_id)
    return torch.from_numpy(gguf.quants.dequantize(rows.numpy(), kind))
