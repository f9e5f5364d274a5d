"""What each figure is, once: `--help` and docs/benchmark.md show these very lines."""

from __future__ import annotations

DEFINITIONS: dict[str, str] = {
    "success": "the stream ended properly, with a finish reason and with tokens; with all that "
    "were asked for where end tokens are ignored. Only these enter the figures.",
    "duration": "first request due until last answer complete.",
    "throughput": "requests, prompt tokens or output tokens of successes / duration.",
    "TTFT": "first token read - request sent.",
    "sent": "given to an open connection, or its own connection begun: connections are opened "
    "ahead for what is due in the first second and used again, so most requests find one.",
    "E2E": "last token read - request sent.",
    "TPOT": "(E2E - TTFT) / (output tokens - 1); requests with one token are left out.",
    "ITL": "gap before an event / tokens it brought, once for each of them; between events where "
    "the server does not say how many they bring.",
    "ITL per chunk": "gap before an event.",
    "TTAT": "first token of the answer read - request sent, for requests that reasoned first.",
    "normalised latency": "E2E / output tokens.",
    "concurrency": "sum of E2E of successes / duration (Little's law).",
    "in flight": "sum of the times between sent and ended of all requests / duration.",
    "peak output": "most tokens, not events, in one of the run's seconds [0, 1), [1, 2), ...",
    "goodput": "successes that keep every bound of --goodput / duration; attainment is their "
    "share.",
    "steady window": "from the first to the last instant at which at least 90 % of the largest "
    "number of requests were between their first and last token.",
    "interval": "2.5th to 97.5th percentile of the medians of 10,000 draws with replacement from "
    "the repetitions.",
    "read lag": "token stamped - beginning of the round of reads it came in, or of the round "
    "before when nothing woke the client in between.",
    "send lag": "request sent - due and below --max-concurrency.",
    "server's figures": "what /metrics (else /server_info) told at each look; totals are after "
    "the run - before it.",
    "cache hits": "cached / prompt tokens of the server's totals; of vLLM hits / tokens looked up.",
    "energy": "the GPUs' energy counters at the run's end - at its start, on the line between "
    "two looks; of a GPU without one its power integrated over time.",
    "energy per token": "energy / output tokens of successes.",
    "lower clocks": "looks within the run at which the driver named a reason other than idleness "
    "or a person's setting / looks.",
}


def help_text() -> str:
    """One line for each figure."""
    return "Figures:\n" + "\n".join(f"- {name}: {text}" for name, text in DEFINITIONS.items())
