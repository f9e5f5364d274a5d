"""Finding rows of logits that hold NaN or infinity."""

from __future__ import annotations

from tetrad.kernels.contract import Argument, Contract, case

CONTRACT = Contract(
    name="finite_rows",
    summary="which rows hold finite numbers alone; the others become 0, as no op may meet them",
    arguments=(
        Argument("logits", "[R, V]", "float32", "rows that are not finite are overwritten"),
    ),
    results=(
        Argument("logits", "[R, V]", "float32", "the argument"),
        Argument("is_finite", "[R]", "bool", "of each row as it came"),
    ),
    cases=(
        case("some rows spoiled", R=9, V=40, spoiled=True),
        case("spoiled in any stretch", R=6, V=9001, spoiled=True),
        case("one row", R=1, V=33, spoiled=False),
        case("healthy rows", R=5, V=5000, spoiled=False),
    ),
    flops=lambda _case: 0.0,
    bytes=lambda c, _size: 4.0 * c["R"] * c["V"],
    tolerance={"float32": 0.0, "bfloat16": 0.0},
)
