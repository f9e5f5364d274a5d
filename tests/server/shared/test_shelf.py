"""What is kept can be found until it is too old or too many came, by every process."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.house.source import ROOT
from tetrad.core.errors import CapacityError
from tetrad.server.shared import shelf as shelf_module
from tetrad.server.shared.shelf import Shelf

NAMES = [f"{number:032x}" for number in range(1, 9)]


class SlowTwin:
    """A list of pairs, oldest first; it may keep what the shelf had to evict."""

    def __init__(self, num_slots: int) -> None:
        self.pairs: list[tuple[str, bytes]] = []
        self._num_slots = num_slots

    def drop(self, name: str) -> None:
        self.pairs = [pair for pair in self.pairs if pair[0] != name]

    def put(self, name: str, value: bytes) -> None:
        self.drop(name)
        self.pairs = [*self.pairs, (name, value)][-self._num_slots :]


steps = st.lists(
    st.tuples(st.sampled_from(NAMES), st.none() | st.integers(0, 120)), min_size=1, max_size=60
)


@settings(max_examples=200)
@given(steps)
def test_nothing_is_ever_mixed_up(steps: list[tuple[str, int | None]]):
    """A value that is there is the one put last; the newest is always there; and those that are
    missing are the oldest."""
    shelf, twin = Shelf(4, 200), SlowTwin(4)
    for number, (name, length) in enumerate(steps):
        if length is None:
            shelf.drop(name)
            twin.drop(name)
        else:
            value = bytes([number % 251 + 1]) * length
            assert shelf.put(name, value)
            assert shelf.get(name) == value
            twin.put(name, value)
        expected = dict(twin.pairs)
        found = [known for known, _ in twin.pairs if shelf.get(known) is not None]
        assert all(shelf.get(known) == expected[known] for known in found)
        assert found == [known for known, _ in twin.pairs][len(twin.pairs) - len(found) :]
        assert all(shelf.get(other) is None for other in set(NAMES) - expected.keys())


def test_what_fits_stays():
    shelf = Shelf(3, 1000)
    for name in NAMES[:4]:
        shelf.put(name, name.encode())
    assert [shelf.get(name) is not None for name in NAMES[:4]] == [False, True, True, True]
    assert not shelf.put(NAMES[0], bytes(1001))
    assert shelf.get("no name") is None
    assert shelf.get("") is None
    assert shelf.get("00") is None
    assert shelf.get("0" * 32) is None


def test_what_is_old_is_gone(monkeypatch: pytest.MonkeyPatch):
    shelf = Shelf(3, 1000)
    monkeypatch.setattr(shelf_module, "LIFETIME_S", -1.0)
    shelf.put(NAMES[0], b"old")
    assert shelf.get(NAMES[0]) is None


def test_what_is_old_makes_room(monkeypatch: pytest.MonkeyPatch):
    shelf = Shelf(3, 1000)
    monkeypatch.setattr(shelf_module, "LIFETIME_S", -1.0)
    for name in NAMES[:2]:
        shelf.put(name, b"secret")
    monkeypatch.setattr(shelf_module, "LIFETIME_S", 60.0)
    shelf.put(NAMES[2], b"x")
    assert b"secret" not in bytes(shelf._memory)
    assert shelf.get(NAMES[2]) == b"x"


def test_what_is_dropped_leaves_no_trace():
    shelf = Shelf(3, 1000)
    shelf.put(NAMES[0], b"secret")
    assert b"secret" in bytes(shelf._memory)
    assert shelf.drop(NAMES[0])
    assert not shelf.drop(NAMES[0])
    assert b"secret" not in bytes(shelf._memory)


def test_a_mark_says_that_it_is_not_wanted():
    shelf = Shelf(3, 1000)
    shelf.put(NAMES[0], b"x")
    assert shelf.is_wanted(NAMES[0])
    shelf.mark(NAMES[0])
    assert not shelf.is_wanted(NAMES[0])
    assert shelf.get(NAMES[0]) == b"x"
    shelf.put(NAMES[0], b"y")
    assert shelf.is_wanted(NAMES[0])


OTHER = """
import sys
from tetrad.core.errors import CapacityError
from tetrad.server.shared.shelf import Shelf
shelf = Shelf(4, 1000, file=int(sys.argv[1]))
assert shelf.get(sys.argv[2]) == b"ours"
shelf.put(sys.argv[3], b"theirs")
"""


def test_another_process_sees_the_same():
    shelf = Shelf.shared(4, 1000)
    ours, theirs = uuid.uuid4().hex, uuid.uuid4().hex
    shelf.put(ours, b"ours")
    subprocess.run(
        [sys.executable, "-c", OTHER, str(shelf.file), ours, theirs],
        cwd=ROOT,
        pass_fds=(shelf.file,),
        check=True,
    )
    assert shelf.get(theirs) == b"theirs"
    os.close(shelf.file)


HANG = """
import fcntl, sys, time
fcntl.lockf(int(sys.argv[1]), fcntl.LOCK_EX)
print(flush=True)
time.sleep(60)
"""


def test_a_process_that_hangs_with_the_lock_is_not_waited_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tetrad.server.shared.shelf.PATIENCE_S", 0.1)
    shelf = Shelf.shared(4, 1000)
    command = [sys.executable, "-c", HANG, str(shelf.file)]
    with subprocess.Popen(command, pass_fds=(shelf.file,), stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(CapacityError, match="try again later"):
            shelf.get("0" * 32)
        holder.kill()
    assert shelf.get("0" * 32) is None
