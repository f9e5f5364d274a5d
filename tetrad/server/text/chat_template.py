"""The chat template: messages to the prompt text, by Jinja in a sandbox.

The environment offers what templates of published models were written against: trimmed blocks,
loop controls, `tojson` without escaping, `raise_exception` and `strftime_now`.
"""

from __future__ import annotations

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tetrad.core.errors import ConfigError, RequestError, unreadable
from tetrad.core.jsonfile import read_json_object

RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "raise_exception"})
"""Variables that the server sets; `chat_template_kwargs` cannot."""

End = Literal["turn", "closed", "open"]
"""How a prompt ends: with the beginning of the assistant's turn, with the end of the last message,
or within it, for the model to go on there."""


class ChatTemplate:
    """A compiled template. `source` is its text."""

    def __init__(self, source: str, variables: dict[str, Any] | None = None) -> None:
        """`variables`: what the template sees besides the messages, such as bos_token.

        Raises jinja2.TemplateSyntaxError.
        """
        self.source = source
        self._variables = variables or {}
        self._template = _environment().from_string(source)

    @classmethod
    def from_folder(cls, folder: Path, override: Path | None = None) -> ChatTemplate | None:
        """The template of `override`, else of the model folder; None when the model has none."""
        path = folder / "tokenizer_config.json"
        settings = read_json_object(path) if path.is_file() else {}
        source = _source(folder, override, settings)
        if source is None:
            return None
        try:
            return cls(source, _special_tokens(settings))
        except jinja2.TemplateSyntaxError as error:
            where = override or folder
            raise ConfigError(
                f"The chat template of {where} is not valid Jinja: {error.message} "
                f"(line {error.lineno})."
            ) from None

    def mentions(self, *names: str) -> bool:
        """Whether any of these variables is a word of it; if not, they change no prompt."""
        return re.search(rf"\b(?:{'|'.join(names)})\b", self.source) is not None

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        variables: dict[str, Any] | None = None,
        end: End = "turn",
    ) -> str:
        """The prompt. `variables`: more for the template to see, under any names.

        Raises RequestError when the template refuses these messages.
        """
        try:
            prompt = self._template.render(
                {
                    **self._variables,
                    **(variables or {}),
                    "messages": messages,
                    "tools": tools,
                    "add_generation_prompt": end == "turn",
                }
            )
        except _RENDER_ERRORS as error:
            detail = str(error) or type(error).__name__
            raise RequestError(
                f"The model's chat template refused these messages: {detail}", param="messages"
            ) from None
        return _cut_behind(prompt, messages[-1]["content"]) if end == "open" else prompt


def _cut_behind(prompt: str, text: str) -> str:
    """The prompt up to the end of its last message, whose text a template may have stripped."""
    for shown in (text, text.rstrip(), text.strip()):
        if (at := prompt.rfind(shown)) >= 0:
            return prompt[: at + len(shown)]
    raise RequestError(
        "The model's chat template does not show the last message as it is, so it cannot be "
        "continued.",
        param="continue_final_message",
    )


_RENDER_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What a template's expressions raise when messages are not as it expects."""


def _source(folder: Path, override: Path | None, settings: dict[str, Any]) -> str | None:
    if override is not None:
        return _read(override)
    if (path := folder / "chat_template.jinja").is_file():
        return _read(path)
    source = settings.get("chat_template")
    if isinstance(source, list):
        named = {entry["name"]: entry["template"] for entry in source}
        source = named.get("default")
    return source


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(unreadable(f"The chat template {path}", error)) from None


def _special_tokens(settings: dict[str, Any]) -> dict[str, Any]:
    """bos_token, eos_token and so on, as text: files hold either the text or an object with it."""
    tokens = {}
    for name, value in settings.items():
        if name.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                tokens[name] = text
    return tokens


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own `tojson` escapes HTML, which would change what the model reads."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().astimezone().strftime(layout)
