"""A whole block of experts, from the router to the residual, made of the layer that serves.

It is timed like an op: its backends are those of the experts, and every other op takes the first
backend that can run on the device. Weights are drawn: NVFP4 experts, all else bf16.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tetrad.core.arch import ModelArch
from tetrad.core.ranks import Ranks
from tetrad.core.records import BlockTime, LaunchTime
from tetrad.formats.weights import Weight
from tetrad.kernels import quick_weights
from tetrad.kernels.backend import Backend, Check, Op
from tetrad.kernels.contract import BITS_PER_WEIGHT, Argument, Case, Contract
from tetrad.kernels.device import snapshot
from tetrad.kernels.draw import Draw
from tetrad.kernels.experts import gluon, triton
from tetrad.kernels.experts.gluon_persistent import persistent_product
from tetrad.kernels.experts.triton_fp4 import fp4_product
from tetrad.kernels.experts.triton_quantize import quantize_kernel
from tetrad.kernels.reduce_experts.triton import reduce_kernel
from tetrad.kernels.registry import OPS
from tetrad.kernels.route import check as route
from tetrad.kernels.select import OP_NAMES, OpSet
from tetrad.kernels.shapes import Load
from tetrad.kernels.sort_tokens.triton import sort_kernel
from tetrad.layers.moe import Moe
from tetrad.layers.norm import formed
from tetrad.layers.source import WeightLedger, WeightSource

NAME = "moe_block"
SKEW = 0.2
"""Standard deviation of the router's bias where routing is skewed: that of its scores."""
CLEAR_GAP = 2e-5
"""Between the score of the last expert chosen and the next; fp32 sums differ by a tenth of it."""
SORT, SUM = sort_kernel.__name__, reduce_kernel.__name__
QUANTISE = quantize_kernel.__name__
_KERNELS = (gluon.grouped_product, persistent_product, triton.grouped_product, fp4_product)
PRODUCTS = {kernel.__name__ for kernel in _KERNELS}
"""Launches as a profiler names them."""
TARGET_RATIO, TARGET_US = 1.15, 12.0
"""What a block may take: so many times its grouped products, and so much more."""


def block_cases(arch: ModelArch, ranks: Ranks, load: Load) -> list[Case]:
    """One layer on rank 0, which sees all tokens and holds its part of the experts.

    Of the shared expert it computes what `tp` leaves it; under `ep` also, as a second case, the
    part it has where the ranks of `ep` deal out its columns too. () for even routing, which no
    router gives.
    """
    moe = arch.moe
    local = moe.num_experts // ranks.ep
    dealt = max(ranks.tp, ranks.ep)
    widths = dict.fromkeys(moe.shared_intermediate // parts for parts in (ranks.tp, dealt))
    if load.routing == "uniform":
        return []
    return [
        Case(
            f"{local} experts, {load.routing}, shared {width}",
            {
                "T": load.tokens,
                "D": arch.hidden,
                "E": moe.num_experts,
                "K": moe.experts_per_token,
                "F": moe.intermediate // ranks.expert_tp,
                "held": (0, local),
                "shared": width,
                "routing": load.routing,
            },
            is_large=True,
        )
        for width in widths
    ]


@dataclass(frozen=True, eq=False)
class DrawnLayer:
    """Random weights of a layer, each drawn when it is first asked for and then kept."""

    arch: ModelArch
    case: Case
    dtype: torch.dtype
    device: torch.device
    _drawn: dict[str, Weight] = field(default_factory=dict)

    @property
    def held(self) -> range:
        """The rank's experts."""
        return range(*self.case["held"])

    @property
    def nbytes(self) -> int:
        """Bytes of all, drawn or not."""
        return int(_weight_bytes(self.case, self.dtype.itemsize, len(self.held)))

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The router's bias: 0, or of the scores' size."""
        std = SKEW if self.case["routing"] == "skewed" else 0.0
        return torch.randn(shape, generator=self._seeded(name), device=self.device) * std

    def linear(self, module: str, shape: tuple[int, int]) -> Weight:
        """In the activations' type."""
        return self._draw(module, "bf16", shape)

    def linears(self, modules: Sequence[str], shape: tuple[int, int]) -> Weight:
        """NVFP4."""
        return self._draw(modules[0], "nvfp4", (len(modules), *shape))

    def _draw(self, name: str, stored: str, shape: tuple[int, ...]) -> Weight:
        if name not in self._drawn:
            generator = self._seeded(name)
            self._drawn[name] = quick_weights.draw(generator, self.dtype, stored, shape)
        return self._drawn[name]

    def _seeded(self, name: str) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()))


def block_op(arch: ModelArch) -> Op:
    """The block as an op of `arch`'s layers."""

    def inputs(case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        draw = Draw.of(case, dtype, device)
        tokens, hidden = case["T"], case["D"]
        moe = replace(arch.moe, intermediate=case["F"], shared_intermediate=case["shared"])
        layer = DrawnLayer(replace(arch, moe=moe), case, dtype, device)
        # A small residual: errors of the experts are not to drown in it.
        residual = draw.normal(tokens, hidden, std=0.1)
        x = _without_ties(draw.normal(tokens, hidden), layer)
        return {"x": x, "residual": residual, "weight": layer}

    return Op(
        _CONTRACT,
        Check(inputs, _expected),
        {
            name: Backend(
                name, _run, experts.why_not, _prepare_for(experts), rounding=experts.rounding
            )
            for name, experts in OPS["experts"].backends.items()
        },
    )


def _without_ties(x: Tensor, layer: DrawnLayer) -> Tensor:
    """Rows whose choice of experts hangs on rounding become copies of one whose does not: two right
    sums of 6144 fp32 products may choose differently."""
    moe, hidden = layer.arch.moe, layer.arch.hidden
    router = layer.linear("gate", (moe.num_experts, hidden)).dequantize(torch.float64)
    bias = layer.tensor("gate.e_score_correction_bias", (moe.num_experts,))
    choice = (x.double() @ router.T).sigmoid() + bias
    best = choice.topk(moe.experts_per_token + 1).values
    is_clear = best[:, -2] - best[:, -1] > CLEAR_GAP
    return x.where(is_clear[:, None], x[is_clear][:1])


def _run(x: Tensor, residual: Tensor, weight: Moe) -> Tensor:
    return formed(weight(x, residual))


def _prepare_for(experts: Backend) -> Any:
    def prepare(layer: DrawnLayer, dtype: torch.dtype) -> Moe:
        ops = ops_with(experts, layer.device)
        return Moe(layer.arch, WeightSource(layer, ops, dtype, WeightLedger()), layer.held)

    return prepare


def ops_with(experts: Backend, device: torch.device) -> OpSet:
    """Each op's first backend that can run on `device`; all plain torch where the experts are."""
    here = snapshot(device)
    chosen = {
        name: OPS[name].backends["torch"]
        if experts.name == "torch"
        else next(
            backend
            for backend in OPS[name].backends.values()
            if backend.rounding is None and backend.why_not(here) is None
        )
        for name in OP_NAMES
    }
    return OpSet(**chosen | {"experts": experts}, choices=())


def _expected(inputs: dict[str, Any]) -> tuple[Tensor, ...]:
    """Row by row in float64, on the device: real experts would take a CPU minutes."""
    layer: DrawnLayer = inputs["weight"]
    moe, hidden = layer.arch.moe, layer.arch.hidden

    def values(name: str, out: int, width: int) -> Tensor:
        return layer.linear(name, (out, width)).dequantize(torch.float64)

    x, out = inputs["x"].double(), inputs["residual"].double().clone()
    width = moe.shared_intermediate
    gate, up = (values(f"shared_experts.{n}_proj", width, hidden) for n in ("gate", "up"))
    out += _gated(x, gate, up) @ values("shared_experts.down_proj", hidden, width).T
    weights, ids = route.expected(
        {
            "logits": x @ values("gate", moe.num_experts, hidden).T,
            "bias": layer.tensor("gate.e_score_correction_bias", (moe.num_experts,)),
            "experts_per_token": moe.experts_per_token,
            "num_groups": moe.num_groups,
            "groups_per_token": moe.groups_per_token,
            "normalise": moe.normalise_weights,
            "scaling": moe.scaling,
            "held": layer.held,
        }
    )
    for row, experts in enumerate(ids.tolist()):
        for slot, expert in enumerate(experts):
            if expert >= 0:
                gate, up, down = _expert(layer, expert)
                out[row] += weights[row, slot].item() * (down @ _gated(x[row], gate, up))
    return (out.cpu(),)


def _gated(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    gated = x @ gate.T
    return gated / (1.0 + (-gated).exp()) * (x @ up.T)


def _expert(layer: DrawnLayer, expert: int) -> list[Tensor]:
    """Gate, up and down of one expert of the rank."""
    hidden, width = layer.arch.hidden, layer.arch.moe.intermediate
    found = []
    for name, shape in (
        ("gate", (width, hidden)),
        ("up", (width, hidden)),
        ("down", (hidden, width)),
    ):
        stack = layer.linears([f"experts.{e}.{name}_proj" for e in layer.held], shape)
        parts = {field: tensor[expert] for field, tensor in stack.tensors().items()}
        found.append(type(stack)(**parts).dequantize(torch.float64))
    return found


def _dense_weights(case: Case) -> float:
    """Numbers in router and shared expert."""
    return float(case["D"] * (case["E"] + 3 * case["shared"]))


def _weight_bytes(case: Case, size: int, num_experts: float) -> float:
    experts = num_experts * 3 * case["D"] * case["F"] * BITS_PER_WEIGHT["nvfp4"] / 8
    return float(experts + _dense_weights(case) * size)


def _flops(case: Case) -> float:
    slots = case["T"] * case["K"] * len(range(*case["held"])) / case["E"]
    return float(2 * case["T"] * _dense_weights(case) + 6 * slots * case["D"] * case["F"])


def _bytes(case: Case, size: int) -> float:
    missed = (1.0 - case["K"] / case["E"]) ** case["T"]
    touched = len(range(*case["held"])) * (1.0 - missed)
    return float(_weight_bytes(case, size, touched) + 3 * case["T"] * case["D"] * size)


_CONTRACT = Contract(
    name=NAME,
    summary="router, routed experts and shared expert, added to the residual",
    arguments=(
        Argument("x", "[T, D]", "activation", "rows"),
        Argument("residual", "[T, D]", "activation", "added last"),
        Argument("weight", "", "layer", "of all experts"),
    ),
    results=(Argument("y", "[T, D]", "activation", "rounded once"),),
    cases=(),
    flops=_flops,
    bytes=_bytes,
    tolerance={"float32": 1e-5, "bfloat16": 6e-3},
    prepared="weight",
)


def block_time(launches: Sequence[LaunchTime], median_us: float) -> BlockTime | None:
    """A block compared with its two grouped products, which run between sorting and the last sum,
    each in one launch or two. None where a backend does not sort so, or quantises in between."""
    names = [launch.name for launch in launches]
    if SORT not in names:
        return None
    last = max((place for place, name in enumerate(names) if name == SUM), default=0)
    between = launches[names.index(SORT) + 1 : last]
    others = {launch.name for launch in between} - PRODUCTS
    if others == {QUANTISE}:
        return None
    if others or not between:
        raise AssertionError(f"PRODUCTS must name what runs between sort and sum: {names}")
    grouped_us = sum(launch.us for launch in between)
    return BlockTime(
        grouped_us=grouped_us,
        ratio=median_us / grouped_us,
        target_us=TARGET_RATIO * grouped_us + TARGET_US,
    )
