"""Remembers what backends took and which crashed, so that a server tries them once and not at every
start.

One JSON file in the user's cache folder. What it holds is looked up by everything a time depends
on: GPU, driver, package versions, the kernels' own source, op, shapes and dtype.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, ValidationError

FILE_NAME = "kernel_choices.json"

Tell = Callable[[str], None]


class Remembered(BaseModel):
    """Times of one op's backends."""

    model_config = ConfigDict(extra="forbid")

    about: dict[str, Any]
    """What the key was made of, for a reader."""
    times_us: dict[str, dict[int, PositiveFloat]]
    """Backend → tokens of the step → microseconds; as many sizes as were timed."""
    failures: dict[str, str] = {}
    """Backend → how it failed at the model's shapes."""


class Trial(BaseModel):
    """What became of backends in a process of their own."""

    model_config = ConfigDict(extra="forbid")

    about: dict[str, Any]
    crashes: dict[Annotated[str, Field(pattern="^[^/]+/[^/]+$")], str]
    """"op/backend" → what happened; empty when all went well."""
    is_complete: bool
    """Was everything tried? Not where the time for compiling and timing did not suffice."""


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    schema_version: int = 1
    entries: dict[str, Remembered] = {}
    trials: dict[str, Trial] = {}


def cache_folder() -> Path:
    """$TETRAD_CACHE_DIR, else `tetrad` in $XDG_CACHE_HOME or ~/.cache."""
    if own := os.environ.get("TETRAD_CACHE_DIR"):
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "tetrad"


def key_of(about: Mapping[str, Any]) -> str:
    """The same for equal facts, whatever their order."""
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:32]


def source_digest(folder: Path) -> str:
    """Changes with any Python file below `folder`."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


class ChoiceCache:
    """The file. Reading and writing never fail: `tell` hears what went wrong, and life goes on."""

    def __init__(self, path: Path, tell: Tell) -> None:
        self.path = path
        self._tell = tell
        self._file: _File | None = None

    def get(self, about: Mapping[str, Any]) -> Remembered | None:
        """What was measured, or None when nobody measured this yet."""
        return self._known().entries.get(key_of(about))

    def put(
        self,
        about: Mapping[str, Any],
        times_us: dict[str, dict[int, float]],
        failures: dict[str, str],
    ) -> None:
        """Add one op's times to what the file holds by now."""
        file = self._read()
        file.entries[key_of(about)] = Remembered(
            about=dict(about), times_us=times_us, failures=failures
        )
        self._write(file)

    def trial(self, about: Mapping[str, Any]) -> Trial | None:
        """What became of a trial, or None when nobody tried yet."""
        return self._known().trials.get(key_of(about))

    def put_trial(
        self, about: Mapping[str, Any], crashes: dict[str, str], *, is_complete: bool
    ) -> None:
        """Add a trial's outcome to what the file holds by now."""
        file = self._read()
        file.trials[key_of(about)] = Trial(
            about=dict(about), crashes=crashes, is_complete=is_complete
        )
        self._write(file)

    def _known(self) -> _File:
        if self._file is None:
            self._file = self._read()
        return self._file

    def _write(self, file: _File) -> None:
        self._file = file
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _replace(self.path, file.model_dump_json(indent=1))
        except OSError as error:
            self._tell(f"kernel times could not be kept in {self.path}: {error}")

    def _read(self) -> _File:
        try:
            return _File.model_validate_json(self.path.read_bytes())
        except FileNotFoundError:
            return _File()
        except (OSError, ValidationError) as error:
            reason = str(error).splitlines()[0]
            self._tell(f"{self.path} is not readable and is ignored: {reason}")
            return _File()


def _replace(path: Path, text: str) -> None:
    """All of it or nothing, also when several processes write."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    Path(name).replace(path)
