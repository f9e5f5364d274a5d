"""Imports go one way. The table is the picture of docs/architecture.md."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.house.source import PACKAGE, Import, imports, module_name, python_files

MAY_IMPORT: dict[str, set[str]] = {
    "core": set(),
    "data": {"core"},
    "formats": {"core"},
    "grammar": {"core"},
    "kernels": {"core", "formats"},
    "distributed": {"core"},
    "layers": {"core", "formats", "kernels", "distributed"},
    "models": {"core", "formats", "kernels", "layers", "distributed"},
    "engine": {"core", "data", "grammar", "kernels", "layers", "models", "distributed"},
    "server": {"core", "engine", "data"},
    "bench": {"core", "data"},
    "roofline": {"core"},
    "cli": {
        *("core", "data", "formats", "kernels", "models", "engine", "server", "bench"),
        *("distributed", "roofline"),
    },
}
TIMERS: dict[str, set[str]] = {
    "kernels": {"formats", "kernels", "layers"},
    "rank": {"formats", "kernels", "layers", "models", "distributed", "roofline"},
}
"""These folders of `bench` time kernels, and the layer made of them, or one rank's program. They
may import what they time, and torch; but not their options, which `--help` reads."""
COSTS = "roofline"
"""This room reads ops' contracts, and nothing else of `kernels`."""
TORCH_FREE_ENGINE = {
    "admission",
    "blocks",
    "cache_layout",
    "calls",
    "child",
    "client",
    "engine",
    "forecast",
    "grammars",
    "ledger",
    "line",
    "link",
    "loop",
    "outboxes",
    "philox",
    "prefix",
    "process",
    "rows",
    "running",
    "scheduler",
    "sequence",
    "share",
    "wire",
    "work",
}
SERVER_ORDER = (
    *("shared", "text", "parsers", "wire", "engine_port", "door", "bodies", "telemetry", "model"),
    *("service", "stream", "apis", "requests", "app", "http", "process"),
)
"""The folders and files of `server`. Each may import those before it."""
STANDARD = set(sys.stdlib_module_names)


def room(module: str) -> str:
    """The room of a dotted name inside tetrad; "" for the package itself. `python -m tetrad` is the
    door."""
    parts = module.split(".")
    if parts[1:] == ["__main__"]:
        return "cli"
    return parts[1] if len(parts) > 1 else ""


def timed(path: Path) -> set[str]:
    """The rooms that a file of `bench` times; none but for the timers."""
    folder = path.parent
    if folder.parent != PACKAGE / "bench" or path.stem in ("options", "__init__"):
        return set()
    return TIMERS.get(folder.name, set())


def may_import(path: Path) -> set[str]:
    """The rooms that a file may import besides its own."""
    return MAY_IMPORT[room(module_name(path))] | timed(path)


def is_contract(module: str) -> bool:
    """A contract, or what contracts are made of?"""
    return module.startswith("tetrad.kernels.") and module.split(".")[-1] == "contract"


def tetrad_imports() -> list[Import]:
    found = [i for path in python_files() for i in imports(path)]
    return [i for i in found if i.module.split(".")[0] == "tetrad"]


def test_every_room_is_in_the_table():
    rooms = {p.parent.name for p in PACKAGE.glob("*/__init__.py")}
    assert rooms == set(MAY_IMPORT)


def test_no_import_runs_back_up():
    wrong = [
        str(i)
        for i in tetrad_imports()
        if (target := room(i.module))
        and (home := room(module_name(i.path)))
        and target != home
        and target not in may_import(i.path)
        and not (home == COSTS and is_contract(i.module))
    ]
    assert not wrong, "\n".join(wrong)


def server_part(module: str) -> int | None:
    """Where a module stands in the order of `server`; None outside of it."""
    parts = module.split(".")
    is_part = parts[1:2] == ["server"] and len(parts) > 2
    return SERVER_ORDER.index(parts[2]) if is_part else None


def test_the_server_s_parts_import_one_way():
    found = {p.relative_to(PACKAGE / "server").parts[0] for p in python_files(PACKAGE / "server")}
    assert {name.removesuffix(".py") for name in found} == {*SERVER_ORDER, "__init__"}
    wrong = [
        str(i)
        for i in tetrad_imports()
        if (home := server_part(module_name(i.path))) is not None
        and (target := server_part(i.module)) is not None
        and target > home
    ]
    assert not wrong, "\n".join(wrong)


def test_only_the_timers_may_import_kernels_in_bench():
    bench = PACKAGE / "bench"
    rooms = {"core", "data", "formats", "kernels", "layers"}
    assert may_import(bench / "kernels/check.py") == rooms
    assert may_import(bench / "kernels/options.py") == {"core", "data"}
    assert may_import(bench / "rank/options.py") == {"core", "data"}
    assert may_import(bench / "load/client.py") == {"core", "data"}
    assert "models" in may_import(bench / "rank/trace.py")
    assert "engine" not in may_import(bench / "rank/run.py")
    assert not timed(bench / "kernels/__init__.py")
    assert not timed(PACKAGE / "cli" / "bench_kernels.py")
    assert all((bench / name / "options.py").is_file() for name in TIMERS)


def test_the_cost_model_reads_contracts_only():
    assert is_contract("tetrad.kernels.contract")
    assert is_contract("tetrad.kernels.linear.contract")
    assert not is_contract("tetrad.kernels.shapes")


def test_no_import_of_tetrad_hides_inside_a_function_outside_cli():
    wrong = [
        str(i) for i in tetrad_imports() if i.in_function and room(module_name(i.path)) != "cli"
    ]
    assert not wrong, "\n".join(wrong)


def test_core_needs_only_the_standard_library_pydantic_and_msgspec():
    """But for the columns of a step, which no API process loads."""
    allowed = STANDARD | {"msgspec", "pydantic", "tetrad"}
    wrong = [
        str(i)
        for path in python_files(PACKAGE / "core")
        for i in imports(path)
        if i.module.split(".")[0] not in allowed | ({"numpy"} if path.stem == "plan" else set())
    ]
    assert not wrong, "\n".join(wrong)


def test_what_must_not_know_torch_does_not():
    files: list[Path] = [
        *python_files(PACKAGE / "server"),
        *(path for path in python_files(PACKAGE / "bench") if not timed(path)),
        *python_files(PACKAGE / "roofline"),
        *python_files(PACKAGE / "grammar"),
        *sorted((PACKAGE / "kernels").glob("*/contract.py")),
        *(PACKAGE / "engine" / f"{name}.py" for name in sorted(TORCH_FREE_ENGINE)),
    ]
    wrong = [
        str(i)
        for path in files
        for i in imports(path)
        if i.module.split(".")[0] in {"torch", "triton", "transformers"}
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_imports_the_oracle():
    wrong = [
        str(i)
        for path in python_files()
        for i in imports(path)
        if i.module.split(".")[0] == "transformers"
    ]
    assert not wrong, "\n".join(wrong)


def test_no_import_cycles():
    graph: dict[str, set[str]] = {module_name(p): set() for p in python_files()}
    for i in tetrad_imports():
        if not i.for_types_only and i.module in graph:
            graph[module_name(i.path)].add(i.module)
    cycle = find_cycle(graph)
    assert not cycle, " -> ".join(cycle)


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    """One cycle as a list of modules, or []."""
    done: set[str] = set()

    def visit(node: str, trail: list[str]) -> list[str]:
        if node in trail:
            return [*trail[trail.index(node) :], node]
        if node in done:
            return []
        for nxt in sorted(graph[node]):
            if cycle := visit(nxt, [*trail, node]):
                return cycle
        done.add(node)
        return []

    for start in sorted(graph):
        if cycle := visit(start, []):
            return cycle
    return []


def test_find_cycle_finds_one():
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == ["a", "b", "c", "a"]
    assert find_cycle({"a": {"b"}, "b": set()}) == []
