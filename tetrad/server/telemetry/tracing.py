"""Traces by OpenTelemetry: a span for each request, and in it one each for waiting in the queue,
for the prompt, and for the answer. Needs the extra `otel`.

Spans are made when the request is over, from times that were taken anyway.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import tetrad
from tetrad.core.config import ServeConfig
from tetrad.core.errors import ConfigError
from tetrad.core.extras import install
from tetrad.server.door.arrival import Arrival

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

EXPORT_TIMEOUT_S = 5
FLUSH_MS = 2000
"""How long the end of the process may wait for the last spans to be sent."""


class Tracing:
    """Sends spans from a thread of its own, in batches."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("tetrad", tetrad.__version__)

    @classmethod
    def of(cls, config: ServeConfig) -> Tracing | None:
        """None unless asked for. Raises ConfigError without OpenTelemetry."""
        if config.otlp_traces_endpoint is None:
            return None
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError:
            raise ConfigError(
                "--otlp-traces-endpoint needs OpenTelemetry, which is not installed; "
                f"`{install('otel')}` in Tetrad's folder brings it."
            ) from None
        resource = Resource.create({"service.name": "tetrad"})
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(config.otlp_traces_endpoint, timeout=EXPORT_TIMEOUT_S)
        provider.add_span_processor(BatchSpanProcessor(exporter))
        return cls(provider)

    def tell(self, now: Arrival, method: str, route: str, status: int, duration_s: float) -> None:
        """A request is over."""
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        began_ns = time.time_ns() - int(duration_s * 1e9)
        parent = TraceContextTextMapPropagator().extract({"traceparent": now.traceparent})
        span = self._tracer.start_span(
            f"{method} {route}", parent, SpanKind.SERVER, _attributes(now, method, route, status),
            start_time=began_ns,
        )  # fmt: skip
        if status >= 500 or now.finish in ("error", "timeout"):
            span.set_status(Status(StatusCode.ERROR))
        if now.first_token_at is not None:
            self._phases(span, now, began_ns, duration_s)
        span.end(began_ns + int(duration_s * 1e9))

    def _phases(self, parent: Span, now: Arrival, began_ns: int, duration_s: float) -> None:
        from opentelemetry.trace import set_span_in_context

        assert now.first_token_at is not None
        first_s = now.first_token_at - now.began_at
        queued_s = min(now.queue_s, first_s)
        handed_s = max(0.0, min(now.handed_over_at - now.began_at, first_s - queued_s))
        runs_s = handed_s + queued_s
        context = set_span_in_context(parent)
        for name, start_s, end_s in (
            ("queue", handed_s, runs_s),
            ("prefill", runs_s, first_s),
            ("decode", first_s, duration_s),
        ):
            span = self._tracer.start_span(name, context, start_time=began_ns + int(start_s * 1e9))
            span.end(began_ns + int(end_s * 1e9))

    def close(self) -> None:
        """Send what is left, but not whatever it takes."""
        self._provider.force_flush(FLUSH_MS)


def _attributes(now: Arrival, method: str, route: str, status: int) -> dict[str, Any]:
    """By OpenTelemetry's conventions for HTTP and for generative models, where these have names."""
    attributes: dict[str, Any] = {
        "http.request.method": method,
        "http.route": route,
        "http.response.status_code": status,
        "tetrad.request_id": now.request_id,
        "tetrad.key_name": now.key_name,
    }
    if now.prompt_tokens:
        attributes |= {
            "gen_ai.usage.input_tokens": now.prompt_tokens,
            "gen_ai.usage.output_tokens": now.completion_tokens,
            "tetrad.cached_tokens": now.cached_tokens,
            "gen_ai.response.finish_reasons": [now.finish],
        }
    return attributes
