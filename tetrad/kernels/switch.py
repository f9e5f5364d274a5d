"""Ops whose backend can be replaced while a model runs, and looked at while it computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tetrad.kernels.backend import Backend
from tetrad.kernels.select import OP_NAMES, OpSet


class Switch:
    """What stands behind one op of an `OpSet`."""

    def __init__(self, op: str, backend: Backend) -> None:
        self.op = op
        self.backend = backend
        """What runs."""
        self.watch: Callable[[Switch, tuple[Any, ...], dict[str, Any]], Any] | None = None
        """Called instead, with the op's arguments, where somebody wants to look."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.watch is not None:
            return self.watch(self, args, kwargs)
        return self.backend.run(*args, **kwargs)


def switchable(ops: OpSet) -> tuple[OpSet, dict[str, Switch]]:
    """The same ops, each behind a switch; and the switches by op."""
    switches = {name: Switch(name, getattr(ops, name)) for name in OP_NAMES}
    behind: dict[str, Any] = {
        name: replace(switch.backend, run=switch) for name, switch in switches.items()
    }
    return replace(ops, **behind), switches
