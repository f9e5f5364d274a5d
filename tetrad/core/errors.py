"""Every error Tetrad raises on purpose, and the exit code each one ends a command with.

    TetradError                      1   something went wrong that is not the user's doing
    ├── UserError                    2   what was asked cannot be; the text says what would work
    │   ├── ConfigError              2   a flag, a field or a combination of them
    │   ├── CheckpointError          2   a model folder that cannot be loaded as it is
    │   ├── UnsupportedError         2   a backend, device or layout that cannot run here
    │   └── RequestError             2   one request's body or limits (HTTP 4xx at the door)
    ├── CapacityError                3   the server is full or shutting down (HTTP 503)
    ├── DeadlineError                4   a request's time was up (HTTP 504)
    ├── AbortedError                 1   an operator ended a request (HTTP 500)
    ├── EngineDiedError              5   the engine process ended; the text carries its reason
    └── BenchFailure                 6   a benchmark ran but its figures must not be used

A `UserError` is printed as one sentence without a traceback. Anything outside this tree is a bug
and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class TetradError(Exception):
    """Root of the tree. `exit_code` is what the command line exits with."""

    exit_code = 1


class UserError(TetradError):
    """The user asked for something that cannot be; the message says what would work."""

    exit_code = 2


class ConfigError(UserError):
    """A flag or field is unknown, out of range, or contradicts another."""


class CheckpointError(UserError):
    """A checkpoint lacks a tensor, holds one too many, or holds one of another shape or dtype."""


class UnsupportedError(UserError):
    """A backend, device or layout was forced that cannot run here."""


class RequestError(UserError):
    """One request is refused at the door. `http_status` is 4xx; `param` names the field. `code`:
    what clients know the reason by, where the status does not say it."""

    def __init__(
        self,
        message: str,
        *,
        http_status: int = 400,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.http_status = http_status
        self.param = param
        self.code = code


class CapacityError(TetradError):
    """The server cannot take the request now. `retry_after_s` goes into the Retry-After header.
    With `is_share` it could, but this client has had its share of the queue."""

    exit_code = 3

    def __init__(self, message: str, *, retry_after_s: int = 1, is_share: bool = False) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.is_share = is_share


class DeadlineError(TetradError):
    """A request's time was up before it was finished."""

    exit_code = 4


class AbortedError(TetradError):
    """The server's operator ended a request whose API has no other word for that."""


class EngineDiedError(TetradError):
    """The engine process ended; the message carries its reason."""

    exit_code = 5


class BenchFailure(TetradError):
    """A benchmark finished, but requests failed or the measurement is not to be believed."""

    exit_code = 6


MAX_NAME_CHARACTERS = 500
"""A longer one is no misspelt name, and comparing it would take long."""


def unreadable(path: object, error: OSError | UnicodeDecodeError) -> str:
    """The sentence for a file that cannot be read as text, without Python's numbers."""
    why = (error.strerror or str(error)) if isinstance(error, OSError) else "it is no text in UTF-8"
    return f"{path} cannot be read: {why[:1].lower()}{why[1:]}."


def nearest(name: str, known: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the closest of `known`, or "" when nothing is close."""
    if len(name) > MAX_NAME_CHARACTERS:
        return ""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean '{matches[0]}'?" if matches else ""
