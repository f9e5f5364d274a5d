"""What is known of the HTTP request that is being served.

`requests.RequestDoor` makes one for each; whoever serves it finds it with `arrival()`, since the
routes between the two have no use for it. It begins with what the request's head says, is told what
its body asks for, and ends as the line of the access log and as the trace.
"""

from __future__ import annotations

import math
import time
from contextvars import ContextVar

from tetrad.core.config import ServeConfig
from tetrad.core.errors import DeadlineError, RequestError
from tetrad.server.door.gate import Admission

LONGEST_TIMEOUT_S = 7 * 24 * 3600.0


class Arrival:
    """One HTTP request, from its first line to its last byte."""

    __slots__ = (
        "admission",
        "began_at",
        "cached_tokens",
        "completion_tokens",
        "config",
        "finish",
        "first_token_at",
        "handed_over_at",
        "is_late",
        "is_over_by",
        "key_name",
        "priority",
        "prompt_tokens",
        "queue_s",
        "request_id",
        "traceparent",
        "warnings",
    )

    def __init__(
        self,
        request_id: str = "",
        config: ServeConfig | None = None,
        began_at: float | None = None,
    ) -> None:
        """`began_at`: by the monotonic clock, if it has not come just now."""
        self.request_id = request_id
        """Its X-Request-Id."""
        self.config = config or ServeConfig()
        self.began_at = time.monotonic() if began_at is None else began_at
        self.is_over_by: float | None = None
        """When its time is up, by the monotonic clock."""
        self.is_late = False
        """Whether it has been told that its time is up."""
        self.priority = 0
        """Higher goes first, whatever the flag says."""
        self.key_name = ""
        """Of the API key it came with."""
        self.traceparent = ""
        """Of the trace that it is part of (W3C)."""
        self.warnings: list[str] = []
        """Sentences about what it asks for in vain, for a header of the answer."""
        self.prompt_tokens = self.cached_tokens = self.completion_tokens = 0
        self.handed_over_at = self.began_at
        """When its body was read and its prompt tokenised, and the engine was given it."""
        self.queue_s = 0.0
        """How long its first sequence waited before it ran."""
        self.first_token_at: float | None = None
        self.admission: Admission | None = None
        """Where it was let in before it begins: who begins takes it."""
        self.finish = ""
        """Why its last sequence ended, or how the request went wrong."""
        self.allow(self.config.request_timeout)

    def allow(self, timeout_s: float | None) -> None:
        """It may take so long from its arrival, or less if that was said before."""
        if timeout_s is not None:
            until = self.began_at + timeout_s
            self.is_over_by = until if self.is_over_by is None else min(self.is_over_by, until)

    def ask_timeout(self, text: str) -> None:
        """The header X-Request-Timeout. Raises RequestError."""
        try:
            timeout_s = float(text)
        except ValueError:
            timeout_s = math.nan
        if not 0.0 < timeout_s <= LONGEST_TIMEOUT_S:
            raise RequestError(
                f"X-Request-Timeout must be seconds, above 0 and at most {LONGEST_TIMEOUT_S:g}, "
                f"not {text[:32]!r}.",
                param="X-Request-Timeout",
            )
        self.allow(timeout_s)

    def ask_name(self, request_id: str | None) -> None:
        """Its body has an id of its own, which goes before that of its head."""
        self.request_id = request_id or self.request_id

    def ask(self, priority: int | None, timeout_s: float | None) -> None:
        """What its body asks for. Raises RequestError."""
        self.allow(timeout_s)
        if priority is None:
            return
        config = self.config
        if config.enable_priority_scheduling:
            self.priority = -priority if config.schedule_low_priority_values_first else priority
        elif config.abort_on_priority_when_disabled:
            raise RequestError(
                "This server was started without --enable-priority-scheduling; leave priority out.",
                param="priority",
            )

    @property
    def seconds_left(self) -> float | None:
        """Until its time is up; None if it has no end."""
        return None if self.is_over_by is None else self.is_over_by - time.monotonic()

    def too_late(self) -> DeadlineError:
        """What its client is told when its time is up."""
        self.is_late = True
        self.finish = "timeout"
        assert self.is_over_by is not None
        return DeadlineError(
            f"The request was not finished within its {self.is_over_by - self.began_at:g} s; what "
            "it would have got was not computed further."
        )


_current: ContextVar[Arrival] = ContextVar("arrival")


def arrival() -> Arrival:
    """Of the request that is being served in this task; a blank one outside of any."""
    return _current.get(None) or Arrival()


def begin(now: Arrival) -> None:
    """Serve this one in this task and those it starts."""
    _current.set(now)
