"""What each API is asked, and what its answer says.

Three protocols: SGLang's native /generate, OpenAI's completions, OpenAI's chat. An answer is read
into a `Reading`, event by event; a whole answer without streaming is one event.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tetrad.bench.options.serve import BenchServeConfig
from tetrad.bench.workload.requests import Prompt
from tetrad.core.errors import ConfigError
from tetrad.core.records import Failure

Body = dict[str, Any]
MOST_TOKENS = 10**9
"""Of one request; no context is as long."""


@dataclass(slots=True)
class Reading:
    """What one answer has said so far."""

    text: str = ""
    """Reasoning, answer and tool-call arguments in the order they came."""
    stamps: list[tuple[float, int]] = field(default_factory=list)
    """(seconds since the start of the run, tokens this event brought), for events with tokens."""
    answer_s: float | None = None
    """When the first token after reasoning came; None when there was no reasoning."""
    has_reasoned: bool = False
    counts_tokens: bool = False
    """True: the server says how many tokens each event brings. False: every event counts as one."""
    output_tokens: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    finish: str | None = None
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Protocol:
    """One API: where requests go, how they are written, how an event is read."""

    path: str
    write: Callable[[BenchServeConfig, str | None, Prompt], Body]
    read: Callable[[Reading, float, Body], None]


def protocol(backend: str) -> Protocol:
    """The protocol a `--backend` speaks."""
    if backend in ("tetrad", "sglang", "sglang-native"):
        return NATIVE
    return CHAT if backend.endswith("-chat") else COMPLETIONS


def knows_ignore_eos(backend: str) -> bool:
    """Plain OpenAI servers may refuse the field; the inference servers know it."""
    return not backend.startswith("openai")


def ignores_eos(body: Body) -> bool:
    """Whether this body makes the server go on past end tokens."""
    return bool({**body, **body.get("sampling_params", {})}.get("ignore_eos"))


def most_tokens(body: Body) -> int | None:
    """How many tokens this body lets the server give at most; None when it does not say."""
    fields = {**body, **body.get("sampling_params", {})}
    names = ("max_new_tokens", "max_tokens", "max_completion_tokens")
    limits = [fields[name] for name in names if isinstance(fields.get(name), int)]
    return max(limits) * (fields.get("n") or 1) if limits else None


def write_body(config: BenchServeConfig, model: str | None, prompt: Prompt) -> Body:
    """The whole request body: the API's, over it what the prompt's line of a file asks for, over
    that `--extra-request-body`, merged one level deep."""
    body = protocol(config.backend).write(config, config.served_model_name or model, prompt)
    body |= prompt.extra or {}
    for key, value in config.extra_body.items():
        old = body.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        body[key] = {**old, **value} if both and isinstance(old, dict) else value
    return body


# --- Native ---------------------------------------------------------------------------------------


def write_native(config: BenchServeConfig, _model: str | None, prompt: Prompt) -> Body:
    """Token ids go as they are, so their number is exact."""
    if prompt.messages is not None:
        raise ConfigError(
            f"Backend {config.backend} takes no messages; use sglang-oai-chat, vllm-chat or "
            "openai-chat, or --apply-chat-template."
        )
    content: Body = {"text": prompt.text} if prompt.ids is None else {"input_ids": prompt.ids}
    sampling: Body = {
        "temperature": config.temperature,
        "max_new_tokens": prompt.output_tokens,
        "ignore_eos": not config.disable_ignore_eos,
    }
    if config.top_p != 1:
        sampling["top_p"] = config.top_p
    body = {**content, "sampling_params": sampling, "stream": not config.disable_stream}
    return body | _native_wishes(config)


def _native_wishes(config: BenchServeConfig) -> Body:
    wishes: Body = {}
    if config.return_logprob:
        wishes = {
            "return_logprob": True,
            "top_logprobs_num": config.top_logprobs_num,
            "logprob_start_len": config.logprob_start_len,
        }
        if config.token_ids_logprob:
            wishes["token_ids_logprob"] = config.token_ids_logprob
    if config.return_routed_experts:
        wishes["return_routed_experts"] = True
    return wishes


def read_native(reading: Reading, time_s: float, body: Body) -> None:
    """Text and counts are cumulative."""
    meta = body["meta_info"]
    total = _count(meta["completion_tokens"]) or 0
    if (new := total - (reading.output_tokens or 0)) > 0:
        reading.stamps.append((time_s, new))
    reading.counts_tokens = True
    reading.output_tokens = total
    reading.text = _text(body.get("text")) or reading.text
    _read_prompt(reading, meta.get("prompt_tokens"), meta.get("cached_tokens"))
    if reason := meta.get("finish_reason"):
        is_named = isinstance(reason, dict)
        reading.finish = _text(reason["type"] if is_named else reason)
        if reading.finish in ("abort", "error"):
            said = _text(reason.get("message")) if is_named else None
            reading.failure = Failure(kind="aborted", message=said or "the server gave it up")


# --- OpenAI ---------------------------------------------------------------------------------------


def _openai_body(config: BenchServeConfig, model: str | None, limit: Body) -> Body:
    body = {
        "model": model,
        **limit,
        "temperature": config.temperature,
        "stream": not config.disable_stream,
    }
    if config.top_p != 1:
        body["top_p"] = config.top_p
    if not config.disable_stream:
        body["stream_options"] = {"include_usage": True}
    if not config.disable_ignore_eos and knows_ignore_eos(config.backend):
        body["ignore_eos"] = True
    return body


def write_completion(config: BenchServeConfig, model: str | None, prompt: Prompt) -> Body:
    """A list of token ids is a prompt too, and an exact one."""
    if prompt.messages is not None:
        raise ConfigError(
            f"Backend {config.backend} takes no messages; use {config.backend}-chat, or "
            "--apply-chat-template."
        )
    content = prompt.text if prompt.ids is None else prompt.ids
    limit = {"max_tokens": prompt.output_tokens}
    wishes = {"logprobs": config.top_logprobs_num} if config.return_logprob else {}
    return {"prompt": content, **_openai_body(config, model, limit), **wishes}


def write_chat(config: BenchServeConfig, model: str | None, prompt: Prompt) -> Body:
    """Text becomes one user turn."""
    if prompt.ids is not None:
        raise ConfigError(
            f"Backend {config.backend} takes no input_ids; use the backend without -chat."
        )
    messages = prompt.messages or ({"role": "user", "content": prompt.text},)
    limit = {"max_completion_tokens": prompt.output_tokens}
    wishes: Body = {}
    if config.return_logprob:
        wishes = {"logprobs": True, "top_logprobs": config.top_logprobs_num}
    return {"messages": messages, **_openai_body(config, model, limit), **wishes}


def read_completion(reading: Reading, time_s: float, body: Body) -> None:
    """An event with a choice is a token even when its text is still held back."""
    _read_usage(reading, body)
    for choice in body.get("choices") or ():
        text = _text(choice.get("text"))
        _take(reading, time_s, text, is_token=bool(text) or not choice.get("finish_reason"))
        _read_finish(reading, choice)


def read_chat(reading: Reading, time_s: float, body: Body) -> None:
    """Reasoning (both names that servers use), content and tool calls are all tokens."""
    _read_usage(reading, body)
    for choice in body.get("choices") or ():
        delta = choice.get("delta") or choice.get("message") or {}
        calls = [call.get("function") or {} for call in delta.get("tool_calls") or ()]
        called = "".join(f"{c.get('name') or ''}{c.get('arguments') or ''}" for c in calls)
        thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
        text = thought + (delta.get("content") or "") + called
        _take(reading, time_s, text, is_token=bool(text) or bool(calls))
        reading.has_reasoned |= bool(thought)
        if reading.has_reasoned and reading.answer_s is None and len(text) > len(thought):
            reading.answer_s = time_s
        _read_finish(reading, choice)


def _take(reading: Reading, time_s: float, text: str, *, is_token: bool) -> None:
    reading.text += text
    if is_token:
        reading.stamps.append((time_s, 1))


def _read_finish(reading: Reading, choice: Body) -> None:
    if reason := choice.get("finish_reason"):
        reading.finish = _text(reason)
        if reason in ("abort", "error"):
            reading.failure = Failure(kind="aborted", message=f"finish reason {reason!r}")


def _read_usage(reading: Reading, body: Body) -> None:
    if usage := body.get("usage"):
        if (total := _count(usage.get("completion_tokens"))) is not None:
            reading.output_tokens = total
        details = usage.get("prompt_tokens_details") or {}
        _read_prompt(reading, usage.get("prompt_tokens"), details.get("cached_tokens"))


def _read_prompt(reading: Reading, prompt_tokens: Any, cached_tokens: Any) -> None:
    """The last value that a server gives counts; null gives none."""
    if (total := _count(prompt_tokens)) is not None:
        reading.prompt_tokens = total
    if (cached := _count(cached_tokens)) is not None:
        reading.cached_tokens = cached


def _count(value: Any) -> int | None:
    """A number of tokens as a server says it. Raises ValueError for anything that is none: one
    wrong number would spoil every sum."""
    if value is None or (type(value) is int and 0 <= value <= MOST_TOKENS):
        return value
    raise ValueError(f"{value!r} is no number of tokens")


def _text(value: Any) -> str:
    """A text as a server gives it; null is none. Raises TypeError."""
    if value is None or isinstance(value, str):
        return value or ""
    raise TypeError(f"{value!r} is no text")


NATIVE = Protocol("/generate", write_native, read_native)
COMPLETIONS = Protocol("/v1/completions", write_completion, read_completion)
CHAT = Protocol("/v1/chat/completions", write_chat, read_chat)
