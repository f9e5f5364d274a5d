"""The lines that tell a person how fast a checkpoint is read."""

from __future__ import annotations

import io

import pytest

from tetrad.formats.progress import ByteProgress, ConsoleProgress


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_lines_show_share_size_and_rate():
    clock, lines = Clock(), list[str]()
    with ByteProgress("Loading", lines.append, every_s=1.0, clock=clock) as progress:
        progress(10**9, 4 * 10**9)
        clock.now_s += 2.0
        progress(2 * 10**9, 4 * 10**9)
        clock.now_s += 0.5
        progress(3 * 10**9, 4 * 10**9)
        clock.now_s += 1.5
        progress(4 * 10**9, 4 * 10**9)
    assert len(lines) == 3
    assert "50%  2.00 GB / 4.00 GB  1.00 GB/s" in lines[0]
    assert lines[0].count("█") == lines[0].count("░") == 12
    assert "100%  4.00 GB / 4.00 GB" in lines[1]
    assert lines[2] == "Loading: 4.00 GB in 4.0 s (1.00 GB/s)"


def test_small_models_are_told_in_smaller_units():
    clock, lines = Clock(), list[str]()
    with ByteProgress("Loading", lines.append, clock=clock) as progress:
        clock.now_s += 0.5
        progress(5_000_000, 10_000_000)
    assert "5.00 MB / 10.00 MB  10.00 MB/s" in lines[0]


def test_a_failure_has_no_summary():
    lines: list[str] = []
    with pytest.raises(ZeroDivisionError), ByteProgress("Loading", lines.append):
        raise ZeroDivisionError
    assert lines == []


def test_nothing_to_read_is_no_division_by_zero():
    clock, lines = Clock(), list[str]()
    with ByteProgress("Loading", lines.append, every_s=0.0, clock=clock) as progress:
        progress(0, 0)
    assert "100%" in lines[0]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_is_redrawn_in_place():
    stream = Terminal()
    with ConsoleProgress("Loading", stream):
        pass
    assert stream.getvalue().startswith("\rLoading: 0.00 MB in")
    assert stream.getvalue().endswith("\n")
    assert stream.getvalue().count("\n") == 1


def test_a_file_gets_plain_lines():
    stream = io.StringIO()
    with ConsoleProgress("Loading", stream):
        pass
    assert stream.getvalue().startswith("Loading: ")
    assert stream.getvalue().count("\n") == 1
    assert "\r" not in stream.getvalue()
