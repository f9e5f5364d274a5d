"""A checkpoint that no device here could hold is refused by its headers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.factories import tiny_glm_folder
from tetrad.core.architectures import arch_of
from tetrad.core.config import ServeConfig
from tetrad.core.errors import ConfigError
from tetrad.engine import load
from tetrad.engine.load import load_engine
from tetrad.formats.checkpoint import Checkpoint
from tetrad.kernels.host import Memory
from tetrad.models.loader import is_ignorable
from tetrad.models.room import CUT_SHARE, check_room


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_glm_folder(tmp_path_factory.mktemp("tiny"))


def bytes_of(folder: Path, num_layers: int | None = None) -> int:
    arch, checkpoint = arch_of(folder).first_layers(num_layers), Checkpoint.open(folder)
    kept = (name for name in checkpoint.names if not is_ignorable(name, arch))
    return sum(checkpoint.stored(name).nbytes for name in kept)


def test_what_is_left_out_needs_no_room(folder: Path):
    arch, whole = arch_of(folder), bytes_of(folder)
    check_room(folder, arch, whole)
    with pytest.raises(ConfigError, match=r"take .* GB, and this version runs on one device"):
        check_room(folder, arch, whole - 1)
    cut = bytes_of(folder, 2)
    assert cut < whole
    check_room(folder, arch.first_layers(2), cut)
    with pytest.raises(ConfigError):
        check_room(folder, arch.first_layers(2), cut - 1)


def test_as_many_layers_are_offered_as_leave_room_for_a_cache(folder: Path):
    two, three = (bytes_of(folder, layers) / CUT_SHARE for layers in (2, 3))
    assert two < bytes_of(folder)
    for there in (two + 1, three - 1):
        with pytest.raises(ConfigError, match=r": --num-layers 2 serves its first layers"):
            check_room(folder, arch_of(folder), min(int(there), bytes_of(folder) - 1))
    with pytest.raises(ConfigError, match=r"GB: `tetrad bench rank` measures one rank"):
        check_room(folder, arch_of(folder), 1)


def test_it_is_refused_before_kernels_are_tried(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(load, "device_memory", lambda _device: Memory(1000, 1000))
    monkeypatch.setattr(load, "_choose_ops", lambda *_: pytest.fail("kernels were tried"))
    with pytest.raises(ConfigError, match="runs on one device"):
        load_engine(ServeConfig(model=folder, device="cpu"))
