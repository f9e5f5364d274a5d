"""The embedded model without NVFP4: something small to try `tetrad quantize` on.

PYTHONPATH=. python examples/abacus/unpack.py NVFP4_FOLDER BF16_FOLDER
"""

import argparse
from pathlib import Path

import torch
from checkpoint import SPLIT, read_tensors, save_bf16
from nvfp4 import dequantise
from torch import Tensor


def unpacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Routed experts in bf16; all other tensors as they were."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if SPLIT.fullmatch(name):
            scales = tensors[f"{name}_scale"], tensors[f"{name}_scale_2"]
            found[name] = dequantise(tensor, *scales).to(torch.bfloat16)
        elif not name.endswith(("weight_scale", "weight_scale_2")):
            found[name] = tensor
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    tensors = unpacked(read_tensors(arguments.source))
    save_bf16(tensors, arguments.source, arguments.out, num_shards=1)


if __name__ == "__main__":
    main()
