"""Which experts a token goes to, and with which weights."""

from __future__ import annotations

from tetrad.kernels.contract import Argument, Case, Contract, case


def _case(name: str, **values: object) -> Case:
    return case(name, **({"held": (0, values["E"]), "groups": 1, "chosen": 1} | values))


CONTRACT = Contract(
    name="route",
    summary="sigmoid scores; best K of E by score + bias in the best groups; weights from scores",
    arguments=(
        Argument("logits", "[T, E]", "float32", "router output"),
        Argument("bias", "[E]", "float32", "added for the choice only, never to the weights"),
        Argument("experts_per_token", "", "int", "K"),
        Argument("num_groups", "", "int", "experts are in this many equal groups; 1 = no groups"),
        Argument("groups_per_token", "", "int", "groups a token may choose from"),
        Argument("normalise", "", "bool", "divide the K weights by their sum"),
        Argument("scaling", "", "float", "multiplies the weights last"),
        Argument("held", "", "range", "experts of this rank; None: all"),
        Argument("weights_into", "[T, K]", "float32", "where the weights go; None: to new memory"),
        Argument("ids_into", "[T, K]", "int64", "where the ids go; None: to new memory"),
    ),
    results=(
        Argument("weights", "[T, K]", "float32", "weight of each slot"),
        Argument(
            "ids",
            "[T, K]",
            "int64",
            "expert of each slot, counted from the first one held, best first; ties to the lower "
            "id; -1: not held",
        ),
    ),
    cases=(
        _case("groups and ties", T=6, E=16, K=3, groups=4, chosen=2, normalise=True, held=(3, 11)),
        _case("one token", T=1, E=8, K=2, normalise=True),
        _case("not normalised", T=9, E=9, K=4, normalise=False, held=(2, 6), into=True),
        _case("glm", T=7, E=256, K=8, normalise=True),
        _case("glm, one rank of eight", T=7, E=256, K=8, normalise=True, held=(224, 256)),
        _case("deepseek", T=7, E=256, K=8, groups=8, chosen=4, normalise=True),
    ),
    flops=lambda c: 6.0 * c["T"] * c["E"],
    bytes=lambda c, _size: 4.0 * (c["T"] * c["E"] + c["E"]) + 12.0 * c["T"] * c["K"],
    tolerance={"float32": 1e-6, "bfloat16": 1e-6},
)
