"""Triton without a GPU: kernels compiled for one, as their wrappers launch them, or interpreted."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tetrad.kernels.triton_support import triton

CAPABILITIES = (80, 90, 100, 120)
"""Ampere, Hopper, Blackwell for data centres, Blackwell for workstations."""


@dataclass(frozen=True)
class Compiled:
    """One kernel, compiled for one capability."""

    name: str
    ptx: str
    num_registers: int
    """Per thread."""
    stack_bytes: int
    """Per thread: spilled registers and arrays that were indexed at run time."""
    shared_bytes: int
    """Per program; the largest a program may have differs between GPUs (99 KiB on sm_120)."""


def compile_launches(
    call: Callable[[], Any], capability: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> list[Compiled]:
    """Run `call` on CPU tensors; compile what it would have launched, and launch nothing.

    So pointers, strides and constants are specialised exactly as they will be on a GPU.
    """
    from triton.runtime.jit import JITFunction

    found: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        found.append(run(self, *args, grid=grid, warmup=True, **kwargs))

    with pretended_gpu(capability):
        monkeypatch.setattr(JITFunction, "run", compile_only)
        call()
        monkeypatch.setattr(JITFunction, "run", run)
    for kernel in found:
        _check_chain(kernel, capability)
    return [_inspect(kernel, folder) for kernel in found]


def _check_chain(kernel: Any, capability: int) -> None:
    """A kernel that is placed while the one before ends must wait before it touches memory."""
    ptx = kernel.asm["ptx"]
    assert kernel.metadata.launch_pdl <= (capability >= 90)
    assert ("griddepcontrol" in ptx) <= (capability >= 90)
    if kernel.metadata.launch_pdl:
        touched = re.search(r"\b(ld|st|atom|red)\.[\w.]*global|cp\.async|\bld\.volatile", ptx)
        assert touched, kernel.name
        assert 0 <= ptx.find("griddepcontrol.wait") < touched.start(), kernel.name


@contextmanager
def pretended_gpu(capability: int) -> Iterator[None]:
    """Triton takes this process to have a GPU of `capability` (90 for 9.0)."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    target = GPUTarget("cuda", capability, 32)
    before = driver._active
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target,
            get_current_device=lambda: f"pretended {capability}",
            get_current_stream=lambda _device: 0,
        )
    )
    try:
        yield
    finally:
        driver._active = before


def _inspect(kernel: Any, folder: Path) -> Compiled:
    path = folder / f"{kernel.hash}.cubin"
    path.write_bytes(kernel.asm["cubin"])
    told = subprocess.run(
        [_cuobjdump(), "--dump-resource-usage", path], capture_output=True, text=True, check=True
    ).stdout
    usage = dict(re.findall(r"(REG|STACK|SHARED):(\d+)", told))
    return Compiled(
        kernel.name,
        kernel.asm["ptx"],
        int(usage["REG"]),
        int(usage["STACK"]),
        kernel.metadata.shared,
    )


def _cuobjdump() -> str:
    from triton import knobs

    return str(knobs.nvidia.cuobjdump.path)


def ptxas_complaints(kernel: Compiled, folder: Path) -> list[str]:
    """Warnings of ptxas for sm_90a; C75xx says that it made wgmma wait where it need not."""
    from triton.backends.nvidia.compiler import get_ptxas

    source = folder / "kernel.ptx"
    source.write_text(kernel.ptx)
    told = subprocess.run(
        [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", source, "-o", folder / "kernel.cubin"],
        capture_output=True, text=True, check=True,
    ).stderr  # fmt: skip
    return re.findall(r"C7\d\d\d.*", told)


INTERPRETED_S = 900
"""For all cases of a file together: the largest take minutes on a busy core."""


def run_interpreted(file: Path, *arguments: str) -> None:
    """Run the tests of a file in a process where Triton interprets kernels instead of compiling.

    Triton reads the switch once, when it is imported.
    """
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7):
        pytest.skip("the interpreter of Triton 3.6 fails on loops with NumPy 2.4 and later")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
    done = subprocess.run(
        [*command, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
