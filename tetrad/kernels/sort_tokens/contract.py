"""Grouping the slots of a step by expert, so that each expert reads its weights once.

An expert's n slots are dealt evenly to k tiles, ceil(n / k) to each, the last may have fewer: to
as few tiles of `block` as can be, if that leaves at most a fifth of them empty, else to as few of
`small_block`. A kernel that has several sizes of tile then pads little. Full tiles come first, so
that the longest work is not begun last.
"""

from __future__ import annotations

from tetrad.kernels.contract import Argument, Case, Contract, case

FEWEST_FILLED = (4, 5)
"""The part of its large tiles that an expert must fill to get any."""


def max_tiles(num_slots: int, num_experts: int, small_block: int) -> int:
    """Tiles that any choice of experts can need: one each as far as slots go, then full ones."""
    used = min(num_slots, num_experts)
    return used + (num_slots - used) // small_block


def max_small_tiles(num_experts: int, block: int, small_block: int) -> int:
    """Small tiles that so many experts can need where there are large ones too: from some number of
    slots on, whatever is left fills a large tile well enough."""
    filled, parts = FEWEST_FILLED
    most_large = (parts - 1) // (parts - filled)
    most_slots = (most_large * block * filled - 1) // parts
    return num_experts * -(-most_slots // small_block)


def _bytes(case: Case, _size: int) -> float:
    num_slots = case["T"] * case["K"]
    tiles = max_tiles(num_slots, case["E"], case["small_block"])
    return float(8 * num_slots + 4 * tiles * (case["block"] + 1) + 8)


def _case(name: str, **values: object) -> Case:
    defaults = {"used": values["E"], "dropped": 0.0, "small_block": values["block"]}
    return case(name, **(defaults | values))


CONTRACT = Contract(
    name="sort_tokens",
    summary="slots sorted by expert, dealt evenly to padded tiles; sizes fixed by shapes",
    arguments=(
        Argument(
            "ids",
            "[T, K]",
            "int64",
            "a token's experts, all different; below 0: dropped. int32 will do",
        ),
        Argument("num_experts", "", "int", "E; every id is below it"),
        Argument("block", "", "int", "positions of a tile"),
        Argument("small_block", "", "int", "slots of a small tile: `block`, or less than 4/5"),
    ),
    results=(
        Argument(
            "rows",
            "[max_tiles * block]",
            "int32",
            "slot t * K + k at each position, rising within an expert; -1: padding of a tile",
        ),
        Argument(
            "tile_expert",
            "[max_tiles]",
            "int32",
            "expert of each tile, by falling ceil(n / k), then by expert; -1: not used",
        ),
        Argument("num_tiles", "[2]", "int32", "tiles of more than small_block; tiles in use"),
    ),
    cases=(
        _case("some dropped", T=9, K=3, E=6, block=4, dropped=0.3),
        _case("fewer slots than experts", T=1, K=2, E=8, block=16),
        _case("everything dropped", T=4, K=2, E=8, block=16, dropped=1.0),
        _case("one expert has every token", T=70, K=1, E=5, block=16, used=1),
        _case("uneven tiles", T=53, K=2, E=3, block=16),
        _case("small tiles too", T=61, K=3, E=7, block=32, small_block=8, dropped=0.4),
        _case("small tiles alone", T=90, K=1, E=1, block=64, small_block=16),
        _case("odd block", T=40, K=4, E=12, block=48, dropped=0.5),
        _case("glm", T=33, K=8, E=256, block=16),
        _case("glm rank", T=600, K=8, E=32, block=64),
        _case("many experts, read in pieces", T=520, K=8, E=65, block=16),
        _case("few experts, read in pieces", T=16500, K=1, E=3, block=256, small_block=144),
        _case("glm prompt", T=700, K=8, E=32, block=256, small_block=144),
    ),
    flops=lambda _case: 0.0,
    bytes=_bytes,
    tolerance={"float32": 0.0, "bfloat16": 0.0},
)
