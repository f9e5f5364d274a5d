"""Which kernels a step of GLM-5 launches on a Hopper GPU, found without one: nothing is computed,
nothing compiled, and every launch is looked at."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.kernels.compile_helpers import pretended_gpu
from tetrad.core.hardware import DeviceSnapshot
from tetrad.core.keys import KeyFormat
from tetrad.core.plan import StepPlan
from tetrad.core.presets import preset
from tetrad.engine.runner import Runner
from tetrad.formats.weights import NVFP4_BLOCK, DenseWeight, Nvfp4Weight, Weight
from tetrad.kernels.experts.grouping import cores_of
from tetrad.kernels.registry import OPS
from tetrad.kernels.select import OP_NAMES, OpSet
from tetrad.layers.cache import KvCache
from tetrad.layers.source import WeightLedger, WeightSource
from tetrad.models.registry import build

H200 = DeviceSnapshot("NVIDIA H200", "cuda", (9, 0), 141 << 30, 132)
NUM_PAGES = 40


class Unfilled(TorchDispatchMode):
    """Results have shapes, strides and addresses, but nobody's numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            return kwargs.get("out", args[0])
        if func.is_view or not any(isinstance(a, Tensor) for a in tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        args, kwargs = tree_map_only(Tensor, lambda each: _like(each, "meta"), (args, kwargs))
        if "device" in kwargs:
            kwargs["device"] = torch.device("meta")
        return tree_map_only(Tensor, lambda each: _like(each, "cpu"), func(*args, **kwargs))


def _like(tensor: Tensor, device: str) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


@dataclass(frozen=True)
class Hollow:
    """A checkpoint of which nothing but sizes is known; experts are NVFP4."""

    is_quantised: bool
    """Are linears too?"""

    def tensor(self, _name: str, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape)

    def linear(self, _module: str, shape: tuple[int, ...]) -> Weight:
        if self.is_quantised and shape[-1] % NVFP4_BLOCK == 0:
            return self._nvfp4(shape)
        return DenseWeight(torch.empty(shape, dtype=torch.bfloat16))

    def linears(self, modules: Sequence[str], shape: tuple[int, int]) -> Weight:
        return self._nvfp4((len(modules), *shape))

    def _nvfp4(self, shape: tuple[int, ...]) -> Weight:
        *stack, width = shape
        codes = torch.empty(*stack, width // 2, dtype=torch.uint8)
        scales = torch.empty(*stack, width // NVFP4_BLOCK, dtype=torch.float8_e4m3fn)
        return Nvfp4Weight(codes, scales, torch.empty(shape[:-2]))


@dataclass
class Launches:
    """Runs steps of a model of two layers, the second with experts."""

    runner: Runner
    _seen: set[tuple[Any, ...]] = field(default_factory=set)

    def of(self, plan: StepPlan) -> set[tuple[Any, ...]]:
        """What Triton would compile for this step, were it the first: kernel, types and
        alignments, constants, options."""
        self._seen.clear()
        self.runner.launch(plan)
        return set(self._seen)

    def note(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        """Stands in for `JITFunction.run`."""
        from triton import knobs
        from triton.runtime import driver

        kwargs["debug"] = False
        for name in ("instrumentation_mode", "fpsan_homomorphic_casts"):
            if hasattr(knobs.compilation, name):
                kwargs[name] = getattr(knobs.compilation, name)
        bind = kernel.device_caches[driver.active.get_current_device()][-1]
        bound, specialised, options = bind(*args, **kwargs)
        known = tuple(zip(bound, map(str, specialised), strict=True))
        self._seen.add((kernel.__name__, known, str(sorted(options.items(), key=str))))


@contextmanager
def launches(keys: KeyFormat, *, is_quantised: bool = False, **chosen: str) -> Iterator[Launches]:
    """`chosen`: op → backend; the others get the first that an H200 can run."""
    from triton.runtime.jit import JITFunction

    arch = preset("glm-5")
    arch = replace(arch, num_layers=2, moe=replace(arch.moe, first_dense_layers=1))
    with pytest.MonkeyPatch.context() as patch, pretended_gpu(90), Unfilled():
        patch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
        _everywhere(patch, cores_of, lambda _device: H200.num_cores)
        ops = OpSet(**{name: _backend(name, chosen) for name in OP_NAMES}, choices=())
        source = WeightSource(Hollow(is_quantised), ops, torch.bfloat16, WeightLedger())
        cache = KvCache(arch, NUM_PAGES, "cpu", torch.bfloat16, keys)
        found = Launches(Runner(build(arch, source), cache, ops, torch.device("cpu")))
        patch.setattr(
            JITFunction, "run", lambda kernel, *args, **kw: found.note(kernel, *args, **kw)
        )
        yield found


def _backend(name: str, chosen: dict[str, str]) -> Any:
    backends = OPS[name].backends
    able = (b for b in backends.values() if b.why_not(H200) is None and b.rounding is None)
    return backends[chosen[name]] if name in chosen else next(able)


def _everywhere(patch: pytest.MonkeyPatch, function: Any, other: Callable[..., Any]) -> None:
    """In every module that has imported it by name."""
    name = function.__name__
    for module in list(sys.modules.values()):
        if getattr(module, name, None) is function:
            patch.setattr(module, name, other)
