"""What is told of each request when it is over: a line of the access log, a trace.

Nothing here runs while tokens stream. Neither holds what a client wrote but the id that it gave
its request: no body, no query, no header, no path but those of routes.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

from starlette.routing import Match
from starlette.types import Scope

from tetrad.core.config import ServeConfig
from tetrad.core.messages import LogSettings
from tetrad.core.operation_options import AccessLog
from tetrad.server.door.arrival import Arrival
from tetrad.server.telemetry.tracing import Tracing

_access = logging.getLogger("tetrad.access")


class Reporter:
    """Of one API process."""

    def __init__(self, config: ServeConfig) -> None:
        """Raises ConfigError when traces are asked for and cannot be."""
        self.access_log: AccessLog = config.access_log
        self.tracing = Tracing.of(config)

    def over(self, scope: Scope, now: Arrival, status: int, duration_s: float) -> None:
        """A request has ended."""
        if self.access_log == "off" and self.tracing is None:
            return
        route = _route(scope)
        if self.tracing is not None:
            self.tracing.tell(now, scope["method"], route, status, duration_s)
        if self.access_log != "off":
            self._write(_facts(scope, now, route, status, duration_s))

    def obey(self, settings: LogSettings) -> None:
        """What the operator wants logged from now on."""
        if settings.log_level is not None:
            logging.getLogger().setLevel(settings.log_level.upper())
        match settings.access_log:
            case "off" | "text" | "json" as kind:
                self.access_log = kind

    def close(self) -> None:
        """The process ends."""
        if self.tracing is not None:
            self.tracing.close()

    def _write(self, facts: dict[str, Any]) -> None:
        if self.access_log == "json":
            _access.info(json.dumps(facts))
        else:
            _access.info(" ".join(f"{name}={_word(value)}" for name, value in facts.items()))


def set_up_access_log() -> None:
    """Lines of their own on stderr, with nothing before them, at any level of the log."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    _access.handlers = [handler]
    _access.setLevel(logging.INFO)
    _access.propagate = False


def _route(scope: Scope) -> str:
    """Where it went, or was going when it was refused; never the client's own text."""
    candidates = (route for route in scope["app"].routes if route.matches(scope)[0] != Match.NONE)
    route = scope.get("route") or next(candidates, None)
    return str(getattr(route, "path", "other"))


def _facts(
    scope: Scope, now: Arrival, route: str, status: int, duration_s: float
) -> dict[str, Any]:
    """Times are milliseconds; those of tokens are left out where there were none."""
    client = scope.get("client")
    facts: dict[str, Any] = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "client": client[0] if client else "",
        "key": now.key_name,
        "request_id": now.request_id,
        "method": scope["method"],
        "route": route,
        "status": status,
        "duration_ms": round(duration_s * 1e3, 1),
    }
    if now.prompt_tokens:
        facts |= {
            "queue_ms": round(now.queue_s * 1e3, 1),
            "prompt_tokens": now.prompt_tokens,
            "cached_tokens": now.cached_tokens,
            "completion_tokens": now.completion_tokens,
        }
    if now.first_token_at is not None:
        facts["first_token_ms"] = round((now.first_token_at - now.began_at) * 1e3, 1)
    return facts | ({"finish": now.finish} if now.finish else {})


def _word(value: Any) -> str:
    """One word; nothing in it can end the line or begin another field."""
    text = str(value)
    return text if text and text.isascii() and not set(text) & set(' "=\\') else json.dumps(text)
