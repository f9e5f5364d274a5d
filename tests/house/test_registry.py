"""Every op folder is registered, and nothing else is."""

from __future__ import annotations

from tests.house.source import PACKAGE
from tetrad.kernels.registry import OPS

PARTS = {"contract.py", "reference.py", "check.py"}


def test_the_registry_equals_the_folders():
    folders = {path.parent.name for path in (PACKAGE / "kernels").glob("*/__init__.py")}
    assert folders
    assert set(OPS) == folders


def test_every_op_has_a_contract_a_reference_and_a_check():
    for name in OPS:
        files = {path.name for path in (PACKAGE / "kernels" / name).glob("*.py")}
        assert files >= PARTS, name
