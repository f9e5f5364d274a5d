"""FlashInfer read as text: importing it takes a CUDA build of torch and much else.

The sources are those of the installed package, or of a wheel that lies unopened in the environment
(`make test` puts it there).
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

KINDS = inspect.Parameter
WHEELS = Path(sys.prefix) / "wheels"


@functools.cache
def text_of(path: str) -> str:
    """A file of the package, such as "fused_moe/core.py"; skips the test where there is none."""
    found = importlib.util.find_spec("flashinfer")
    if found is not None and found.submodule_search_locations:
        return (Path(found.submodule_search_locations[0]) / path).read_text()
    for wheel in sorted(WHEELS.glob("flashinfer_python-*.whl")):
        with zipfile.ZipFile(wheel) as package:
            return package.read(f"flashinfer/{path}").decode()
    pytest.skip(f"flashinfer-python is neither installed nor in {WHEELS}; `make test` gets it")


@functools.cache
def _module(path: str) -> ast.Module:
    return ast.parse(text_of(path))


def function(path: str, name: str) -> ast.FunctionDef:
    """The function of this name at the top of a file."""
    (found,) = (
        node
        for node in _module(path).body
        if isinstance(node, ast.FunctionDef) and node.name == name
    )
    return found


def signature_of(path: str, name: str) -> inspect.Signature:
    """What a call has to fit, defaults without their values."""
    arguments = function(path, name).args
    positional = [*arguments.posonlyargs, *arguments.args]
    num_required = len(positional) - len(arguments.defaults)
    parameters = [
        KINDS(
            each.arg,
            KINDS.POSITIONAL_OR_KEYWORD,
            default=KINDS.empty if index < num_required else None,
        )
        for index, each in enumerate(positional)
    ]
    parameters += [
        KINDS(each.arg, KINDS.KEYWORD_ONLY, default=KINDS.empty if default is None else None)
        for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    return inspect.Signature(parameters)


def constant(path: str, name: str) -> Any:
    """The value of a literal at the top of a file."""
    (found,) = (
        node.value
        for node in _module(path).body
        if isinstance(node, ast.Assign)
        and [ast.unparse(target) for target in node.targets] == [name]
    )
    return ast.literal_eval(found)


def run_alone(path: str, *names: str, **known: Any) -> Callable[..., Any]:
    """The first of some functions of a file, with nothing but the others, torch and `known`."""
    space: dict[str, Any] = {"torch": torch} | known
    for name in names:
        definition = function(path, name)
        definition.decorator_list = []
        code = ast.unparse(definition)
        exec(f"from __future__ import annotations\n{code}", space)
    found: Callable[..., Any] = space[names[0]]
    return found
