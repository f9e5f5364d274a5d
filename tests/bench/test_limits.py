"""A load that the system cannot carry is refused before it starts; one that it can is let in."""

from __future__ import annotations

import resource

import pytest

from tetrad.bench.load import limits
from tetrad.core.errors import ConfigError


@pytest.fixture
def files(monkeypatch):
    """Limits of open files that are only noted."""
    held = [1024, 4096]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(held))
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: held.__setitem__(0, both[0]))
    return held


def test_the_soft_limit_is_raised_as_far_as_needed(files):
    limits.make_room(100, 1)
    assert files[0] == 1024
    limits.make_room(3000, 1)
    assert files[0] == 3256


def test_more_than_the_hard_limit_is_refused_unless_processes_share_it(files):
    with pytest.raises(ConfigError, match=r"5000 requests in flight need 5256 open files"):
        limits.make_room(5000, 1)
    limits.make_room(5000, 2)
    assert files[0] == 2756


def test_more_than_there_are_ports_is_refused(files, tmp_path, monkeypatch):
    ports = tmp_path / "range"
    ports.write_text("32768\t33767\n")
    monkeypatch.setattr(limits, "PORTS", ports)
    assert limits.local_ports() == 1000
    limits.make_room(1000, 1)
    with pytest.raises(ConfigError, match="1001 requests in flight to one address need as many"):
        limits.make_room(1001, 1)
    monkeypatch.setattr(limits, "PORTS", tmp_path / "none")
    assert limits.local_ports() is None
