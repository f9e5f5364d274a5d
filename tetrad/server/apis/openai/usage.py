"""Token counts of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tetrad.server.stream.choices import Choice


def usage(choices: Sequence[Choice], num_each: int) -> dict[str, Any]:
    """OpenAI's `usage` of an answer with `num_each` choices per prompt; a prompt counts once."""
    sessions = [choice.session for choice in choices]
    prompt_tokens = sum(session.prompt_tokens for session in sessions[::num_each])
    completion_tokens = sum(session.completion_tokens for session in sessions)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": sum(s.cached_tokens for s in sessions[::num_each])
        },
        "completion_tokens_details": {
            "reasoning_tokens": sum(session.reasoning_tokens for session in sessions)
        },
    }
