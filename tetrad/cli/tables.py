"""Wide tables, on terminals that may be narrow."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

WHOLE_WIDTH = 10_000
"""Columns where there is no terminal: enough for any table."""


def show(table: Table, spare: Sequence[int] = ()) -> None:
    """Print it; on a terminal that it is too wide for without as many of the `spare` columns, the
    first named first, as it takes, which is said."""
    from rich.console import Console

    whole = Console(width=WHOLE_WIDTH)
    console = Console() if sys.stdout.isatty() else whole
    left_out = []
    for column in [table.columns[place] for place in spare]:
        if whole.measure(table).maximum <= console.width:
            break
        table.columns.remove(column)
        left_out.append(str(column.header))
    console.print(table)
    if left_out:
        print(
            f"{console.width} columns have no room for {', '.join(dict.fromkeys(left_out))}: a "
            "wider terminal, a pipe and files have all."
        )
