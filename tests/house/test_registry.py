"""Every op folder is registered and whole, and nothing else is registered."""

from __future__ import annotations

from tests.house.source import PACKAGE
from tetrad.core.backend_names import ATTENTION, EXPERTS
from tetrad.kernels.registry import OPS
from tetrad.kernels.select import OP_NAMES

PARTS = {"contract.py", "reference.py", "check.py"}


def test_the_registry_is_what_lies_on_disk():
    root = PACKAGE / "kernels"
    folders = {path.parent.name for path in root.glob("*/contract.py")}
    assert folders == set(OPS) == set(OP_NAMES)
    for name, op in OPS.items():
        assert op.contract.name == name
        assert {path.name for path in (root / name).glob("*.py")} >= PARTS, name
        assert op.backends["torch"] is list(op.backends.values())[-1]


def test_the_names_that_flags_take_are_the_registry_s():
    assert sorted(EXPERTS) == sorted(OPS["experts"].backends)
    assert set(ATTENTION) == {*OPS["mla"].backends, *OPS["gqa"].backends}
