"""Runs a Gluon kernel on torch, program by program: Gluon has no interpreter.

Layouts are ignored, nothing is rounded to 16 bits, and copies are done when they are started: so it
shows wrong addresses, masks and sums, but no race. Warpgroups are threads, so that one which is not
told of what it waits for waits in vain.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tetrad.kernels.triton_support import tl

Value = Tensor | int | float

EXACT = torch.float64
"""Stands for bf16 where a kernel computes."""
STORED = {EXACT: torch.bfloat16}
"""What it is in memory that is all bytes."""
IN_VAIN_S = 20.0
"""Whoever waits for longer has been forgotten."""


@dataclass(frozen=True)
class Pointer:
    """Addresses in a flat tensor."""

    base: Tensor
    offset: Value = 0

    def __add__(self, more: Value) -> Pointer:
        return Pointer(self.base, self.offset + more)

    def expand_dims(self, axis: int) -> Pointer:
        return Pointer(self.base, torch.as_tensor(self.offset).unsqueeze(axis))

    def to(self, dtype: torch.dtype) -> Pointer:
        """The same addresses, of numbers of another type."""
        step = dtype.itemsize // self.base.element_size()
        offset = torch.as_tensor(self.offset)
        assert not ((offset >= 0) & (offset % step != 0)).any(), "not aligned"
        whole = self.base[: len(self.base) // step * step]
        return Pointer(whole.view(dtype), offset.div(step, rounding_mode="floor"))


@dataclass(frozen=True)
class Shared:
    """A buffer in shared memory; full of NaN at first."""

    data: Tensor

    def index(self, which: int) -> Shared:
        return Shared(self.data[int(which)])

    def slice(self, first: int, length: int, dim: int) -> Shared:
        return Shared(self.data.narrow(dim, first, length))

    def permute(self, order: list[int]) -> Shared:
        return Shared(self.data.permute(order))

    def store(self, value: Tensor) -> None:
        self.data.copy_(value)

    def load(self, _layout: object) -> Tensor:
        return self.data


@dataclass
class Bar:
    """One mbarrier."""

    count: int = 0
    """Arrivals that end a phase."""
    missing: int = 0
    phase: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)


def init_bar(bar: Bar, count: int) -> None:
    bar.count = bar.missing = count


def arrive(bar: Bar, count: int = 1) -> None:
    with bar.changed:
        assert 0 < count <= bar.missing, "more arrive than a phase expects"
        bar.missing -= count
        if bar.missing == 0:
            bar.phase, bar.missing = bar.phase + 1, bar.count
            bar.changed.notify_all()


def wait_for(bar: Bar, phase: Value, pred: Value = True) -> None:
    """Until the phase of this parity has ended."""
    if pred:
        with bar.changed:
            assert bar.changed.wait_for(lambda: bar.phase % 2 != phase, IN_VAIN_S), "forgotten"


class Bars:
    """Several of them in shared memory."""

    def __init__(self, number: int) -> None:
        self._bars = [Bar() for _ in range(number)]

    def index(self, which: Value) -> Bar:
        return self._bars[int(which)]


def all_threads_arrive(bar: Bar, increment_count: bool) -> None:
    """When copies are done, which they are."""
    assert not increment_count
    arrive(bar, bar.count)


def warp_specialized(
    functions: list[tuple[Callable[..., None], tuple[Any, ...]]],
    worker_warps: list[int],
    worker_registers: list[int],
) -> None:
    assert len(functions) == len(worker_warps) + 1 == len(worker_registers) + 1
    with ThreadPoolExecutor(len(functions)) as pool:
        for each in [pool.submit(function, *arguments) for function, arguments in functions]:
            each.result()


def allocate(dtype: torch.dtype, shape: list[int], _layout: object) -> Shared | Bars:
    if dtype == torch.int64:
        return Bars(shape[0])
    return Shared(torch.full(shape, torch.nan))


def load(pointer: Pointer, mask: Value = True, other: Value = torch.nan) -> Tensor:
    offset, is_read = torch.broadcast_tensors(
        torch.as_tensor(pointer.offset), torch.as_tensor(mask)
    )
    assert not (is_read & (offset < 0)).any()
    found = pointer.base[torch.where(is_read, offset, 0).long()]
    return torch.where(is_read, found, torch.as_tensor(other, dtype=found.dtype))


def store(pointer: Pointer, value: Value, mask: Value = True) -> None:
    offset, values, is_written = torch.broadcast_tensors(
        torch.as_tensor(pointer.offset), torch.as_tensor(value), torch.as_tensor(mask)
    )
    assert not (is_written & (offset < 0)).any()
    pointer.base[offset[is_written].long()] = values[is_written].to(pointer.base.dtype)


def start_copy(target: Shared, pointer: Pointer, mask: Value = True) -> None:
    target.store(load(pointer, mask, 0.0))


def product(a: Shared, b: Shared, acc: Tensor, is_async: bool = False) -> Tensor:
    assert is_async
    return acc + a.data @ b.data


def fp8_numbers(_ptx: str, _operands: str, values: list[Tensor], **_options: object) -> Tensor:
    """What the only PTX of these kernels computes: e4m3 codes times scales."""
    codes, scales = values
    return codes.contiguous().view(torch.float8_e4m3fn).float() * scales


def language(program: int) -> SimpleNamespace:
    """What kernels call `gl`."""

    def nothing(*_arguments: object) -> None:
        return None

    return SimpleNamespace(
        constexpr=object, bfloat16=EXACT, float16=EXACT, float32=torch.float32,
        pointer_type=lambda kind: STORED.get(kind, kind), broadcast=torch.broadcast_tensors,
        inline_asm_elementwise=fp8_numbers,
        uint8=torch.uint8, int32=torch.int32, int64=torch.int64,
        join=lambda a, b: torch.stack([a, b], dim=-1), DistributedLinearLayout=nothing,
        BlockedLayout=nothing, SliceLayout=nothing, NVMMADistributedLayout=nothing,
        NVMMASharedLayout=nothing, SwizzledSharedLayout=nothing,
        static_range=range, num_warps=lambda: 4, warp_specialize=warp_specialized,
        program_id=lambda _axis: torch.tensor(program),
        arange=lambda first, end, layout: torch.arange(first, end),
        zeros=lambda shape, dtype, _layout: torch.zeros(shape, dtype=dtype),
        full=lambda shape, value, dtype, _layout: torch.full(shape, value, dtype=dtype),
        allocate_shared_memory=allocate,
        convert_layout=lambda value, _layout, assert_trivial=False: value,
        cdiv=lambda size, part: (size + part - 1) // part,
        minimum=lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)),
        maximum=lambda a, b: torch.maximum(torch.as_tensor(a), torch.as_tensor(b)),
        where=torch.where, exp2=torch.exp2, log2=torch.log2, sum=torch.sum, max=torch.amax,
        load=load, store=store,
    )  # fmt: skip


def nothing_to_wait_for(*_arguments: object) -> None:
    return None


HOPPER = SimpleNamespace(
    fence_async_shared=nothing_to_wait_for,
    warpgroup_mma=product,
    warpgroup_mma_wait=lambda _number, deps: deps[0],
)
COPY = SimpleNamespace(
    wait_group=nothing_to_wait_for,
    commit_group=nothing_to_wait_for,
    mbarrier_arrive=all_threads_arrive,
)
MBARRIER = SimpleNamespace(
    MBarrierLayout=nothing_to_wait_for, init=init_bar, arrive=arrive, wait=wait_for
)

CHAIN = SimpleNamespace(after_previous=nothing_to_wait_for, before_next=nothing_to_wait_for)


def on_torch(module: ModuleType, name: str) -> Any:
    """Stands in for the kernel `name` of `module`: `kernel[grid](...)` runs it here."""

    names = dict(vars(module))
    for kernel in [value for value in names.values() if hasattr(value, "arg_names")]:
        names = kernel.fn.__globals__ | names

    def run(grid: tuple[int], *arguments: Any, num_warps: int, **constants: Any) -> None:
        assert num_warps % 4 == 0
        given = [Pointer(a.view(-1)) if isinstance(a, Tensor) else a for a in arguments]
        for program in range(*grid):
            kernel = _plain_functions(names, program)[name]
            kernel(*given, **constants)

    class Kernel:
        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            return lambda *arguments, **constants: run(grid, *arguments, **constants)

    return Kernel()


def _plain_functions(names: dict[str, Any], program: int) -> dict[str, Any]:
    """A module's globals, with its kernels as Python functions."""
    found = names | {
        "gl": language(program), "hopper": HOPPER, "copy": COPY, "start_copy": start_copy,
        "barrier": nothing_to_wait_for, "chain": CHAIN, "mbarrier": MBARRIER,
    }  # fmt: skip
    found |= {name: value.value for name, value in names.items() if isinstance(value, tl.constexpr)}
    kernels = {name: value for name, value in found.items() if hasattr(value, "arg_names")}
    for name, value in kernels.items():
        found[name] = FunctionType(value.fn.__code__, found)
    found["same_bits"] = lambda values, _kind: values  # nothing has as many bits
    return found
