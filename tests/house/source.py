"""Reads the project's own source: files, functions, imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "tetrad"


def python_files(folder: Path = PACKAGE) -> list[Path]:
    """Every .py file below `folder`; finding none is a failure, so that no scan passes empty."""
    files = sorted(folder.rglob("*.py"))
    assert files, f"no Python files below {folder}"
    return files


def module_name(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@dataclass(frozen=True)
class Import:
    path: Path
    line: int
    module: str
    in_function: bool
    for_types_only: bool

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: imports {self.module}"


def imports(path: Path) -> list[Import]:
    """All imports of a file, those inside functions and TYPE_CHECKING blocks marked."""
    return list(_imports(ast.parse(path.read_text()), path, in_function=False, types_only=False))


def _imports(node: ast.AST, path: Path, *, in_function: bool, types_only: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(path, child.lineno, alias.name, in_function, types_only)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"{path}:{child.lineno}: relative import"
            assert child.module is not None
            for alias in child.names:
                full = f"{child.module}.{alias.name}"
                name = full if _is_module(full) else child.module
                yield Import(path, child.lineno, name, in_function, types_only)
        else:
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            guard = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            yield from _imports(
                child, path, in_function=in_function or is_function, types_only=types_only or guard
            )


def _is_module(dotted: str) -> bool:
    target = ROOT.joinpath(*dotted.split("."))
    return target.with_suffix(".py").is_file() or (target / "__init__.py").is_file()


def code_lines(path: Path) -> int:
    """Lines of a file that hold code: no blank lines, comments or docstrings."""
    source = path.read_text()
    prose: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            prose.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return sum(
        bool(text := line.strip()) and not text.startswith("#") and number not in prose
        for number, line in enumerate(source.splitlines(), start=1)
    )


@dataclass(frozen=True)
class Function:
    path: Path
    name: str
    line: int
    num_lines: int

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.name} has {self.num_lines} lines"


def functions(path: Path) -> list[Function]:
    """Every function of a file; the length is its statements without the docstring."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            num_lines = node.end_lineno - node.lineno + 1 - _docstring_lines(node)
            found.append(Function(path, node.name, node.lineno, num_lines))
    return found


def _docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    if ast.get_docstring(node) is None:
        return 0
    first = node.body[0]
    assert first.end_lineno is not None
    return first.end_lineno - first.lineno + 1
