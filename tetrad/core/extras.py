"""How what only some users need is installed."""

from __future__ import annotations


def install(extra: str) -> str:
    """The command that brings an extra of pyproject.toml. Tetrad is on no index: it is installed
    from its own folder."""
    return f'pip install -e ".[{extra}]"'
