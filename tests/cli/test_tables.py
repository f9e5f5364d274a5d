"""Tables on narrow terminals, on wide ones and on none."""

from __future__ import annotations

import pytest
from rich.table import Table

from tetrad.cli.tables import show

HEADINGS = ("op", "p10 to p90", "launches", "error")


def shown(capsys, monkeypatch, width: int | None, spare: tuple[int, ...] = (1, 3)) -> str:
    monkeypatch.setattr("sys.stdout.isatty", lambda: width is not None)
    monkeypatch.setenv("COLUMNS", str(width or 20))
    table = Table()
    for place, heading in enumerate(HEADINGS):
        table.add_column(heading, no_wrap=place > 0)
    table.add_row("rms_norm of some", "1.0 to 2.0", "7", "1e-7")
    show(table, spare)
    return str(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("width", "left_out"),
    [
        (None, ()),
        (60, ()),
        (50, ("p10 to p90",)),
        (36, ("p10 to p90", "error")),
    ],
)
def test_as_many_columns_go_as_it_takes(capsys, monkeypatch, width, left_out):
    out = shown(capsys, monkeypatch, width)
    heading = out.splitlines()[1]
    assert [name for name in HEADINGS if name not in heading] == list(left_out)
    told = f"{width} columns have no room for {', '.join(left_out)}: " if left_out else "no room"
    assert (told in out) == bool(left_out)


def test_then_words_wrap_and_no_number_is_cut(capsys, monkeypatch):
    out = shown(capsys, monkeypatch, 28)
    assert "…" not in out
    assert "launches" in out
    assert "rms_norm" in out
