"""What each figure is, once: `--help` and docs/benchmark.md show these very lines."""

from __future__ import annotations

DEFINITIONS: dict[str, str] = {
    "success": "the stream ended properly, with a finish reason and with tokens; if end tokens "
    "are ignored, with as many tokens as requested. Only successes enter the figures.",
    "duration": "first request due until last answer complete.",
    "throughput": "requests, prompt tokens or output tokens of successes / duration.",
    "TTFT": "first token read - request sent.",
    "sent": "written to an open connection, or start of opening its own: connections for "
    "requests due in the first second are opened in advance and reused, so most requests find "
    "one.",
    "E2E": "last token read - request sent.",
    "TPOT": "(E2E - TTFT) / (output tokens - 1); requests with one token are excluded.",
    "ITL": "gap before an event / tokens in it, counted once per token; per event if the server "
    "does not report how many tokens it carries.",
    "ITL per chunk": "gap before an event.",
    "TTAT": "first token of the answer read - request sent, for requests that reason first.",
    "normalised latency": "E2E / output tokens.",
    "concurrency": "sum of E2E of successes / duration (Little's law).",
    "in flight": "sum of (ended - sent) over all requests / duration.",
    "peak output": "most tokens, not events, in any second [0, 1), [1, 2), ... of the run.",
    "goodput": "successes within every bound of --goodput / duration; attainment is their "
    "fraction.",
    "steady window": "first to last instant at which at least 90 % of the peak number of "
    "requests were between their first and last token.",
    "interval": "2.5th to 97.5th percentile of the medians of 10,000 bootstrap samples of the "
    "repetitions.",
    "read lag": "time a token was stamped - start of the round of reads it came in, or of the "
    "previous round if nothing woke the client in between.",
    "send lag": "request sent - request due and below --max-concurrency.",
    "server's figures": "what /metrics (else /server_info) reported at each sample; totals are "
    "value after the run - value before.",
    "cache hits": "cached / prompt tokens from the server's totals; for vLLM hits / tokens "
    "looked up.",
    "energy": "the GPUs' energy counters at the end of the run - at its start, interpolated "
    "between samples; for a GPU without a counter, power integrated over time.",
    "energy per token": "energy / output tokens of successes.",
    "lower clocks": "samples during the run in which the driver gave a throttle reason other "
    "than idle or a user setting / samples.",
}


def help_text() -> str:
    """One line for each figure."""
    return "Figures:\n" + "\n".join(f"- {name}: {text}" for name, text in DEFINITIONS.items())
