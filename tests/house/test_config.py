"""One field, one description, one range, one flag."""

from __future__ import annotations

import types
import typing
from pathlib import Path

import pytest

from tests.house.all_flags import all_flags
from tests.house.source import ROOT
from tetrad.bench.compare.options import BenchCompareConfig
from tetrad.bench.kernels.options import BenchKernelsConfig
from tetrad.bench.options.serve import BenchServeConfig
from tetrad.bench.rank.options import BenchRankConfig
from tetrad.bench.sweep.options import BenchSweepConfig
from tetrad.core.config import ServeConfig
from tetrad.core.option import Config
from tetrad.formats.options import QuantizeConfig

FLAGS = Path(__file__).with_name("flags.txt")


def numeric(annotation: object) -> bool:
    """Is the field a number (bool is not)?"""
    if annotation in (int, float):
        return True
    is_union = (
        isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union
    )
    return is_union and any(numeric(a) for a in typing.get_args(annotation))


@pytest.mark.parametrize(
    "config",
    [
        *(ServeConfig, BenchServeConfig, BenchSweepConfig, BenchKernelsConfig, BenchRankConfig),
        *(QuantizeConfig, BenchCompareConfig),
    ],
)
def test_every_field_has_a_description_and_every_number_a_range(config: type[Config]):
    assert config.model_fields
    for name, field in config.model_fields.items():
        assert field.description, name
        assert field.description.endswith((".", "!", "?")), name
        if numeric(field.annotation):
            assert field.metadata, f"{name} has no range"


def test_no_field_is_dead():
    """Every field of ServeConfig is read somewhere outside its declaration."""
    source = "\n".join(
        p.read_text() for p in (ROOT / "tetrad").rglob("*.py") if p.name != "config.py"
    )
    dead = [name for name in ServeConfig.model_fields if f"config.{name}" not in source]
    assert not dead, f"declared but read nowhere: {dead}"


def test_flags_change_only_on_purpose():
    """A new or removed flag is an edit of flags.txt, seen in review."""
    assert all_flags() == FLAGS.read_text().split()
