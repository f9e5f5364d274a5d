"""What every verb can be told."""

from __future__ import annotations

from collections.abc import Iterator

from cyclopts import App

from tetrad.cli.main import app


def all_flags() -> list[str]:
    """Every flag of every verb as `verb:--flag`, sorted; help and version left out."""
    return sorted(_flags_below(app, ()))


def _flags_below(verb_app: App, chain: tuple[str, ...]) -> Iterator[str]:
    hidden = {*verb_app.help_flags, *verb_app.version_flags}
    if verb_app.default_command is not None:
        for argument in verb_app.assemble_argument_collection():
            yield from (f"{'/'.join(chain)}:{n}" for n in argument.names if n.startswith("--"))
    for name in verb_app:
        if name not in hidden:
            yield from _flags_below(verb_app[name], (*chain, name))
