"""A model's chat template, rendered by the client for APIs that take text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tetrad.core.errors import ConfigError
from tetrad.core.gguf import GgufFile, is_gguf
from tetrad.data.gguf_tokenizer import special_tokens


class ChatTemplate:
    """chat_template.jinja of a tokenizer's folder, else the one in tokenizer_config.json; of a GGUF
    file its own."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError when the folder has none, or one that is no template."""
        self.folder = folder
        self._config = _config(folder)
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _refuse
        environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
        try:
            self._template = environment.from_string(self._source())
        except TemplateError as error:
            raise ConfigError(f"The chat template of {folder} is no template: {error}.") from error

    def render(self, messages: Sequence[dict[str, Any]]) -> str:
        """The prompt up to where the answer begins, without the beginning-of-text token where
        the server adds it. Raises ConfigError with what the template says."""
        special = {name: _text(self._config.get(name)) for name in ("bos_token", "eos_token")}
        try:
            text = self._template.render(
                messages=list(messages), add_generation_prompt=True, **special
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise ConfigError(f"The chat template of {self.folder} failed: {error}.") from error
        adds_first = self._config.get("add_bos_token", True)
        return text.removeprefix(special["bos_token"]) if adds_first else text

    def _source(self) -> str:
        path = self.folder / "chat_template.jinja"
        if path.is_file():
            return path.read_text(encoding="utf-8")
        source = self._config.get("chat_template")
        if not isinstance(source, str):
            raise ConfigError(
                f"{self.folder} holds no chat template; leave --apply-chat-template out, or use a "
                "-chat backend, where the server has one."
            )
        return source


def _config(folder: Path) -> dict[str, Any]:
    if is_gguf(folder):
        file = GgufFile.read(folder)
        source = file.metadata.get("tokenizer.chat_template")
        adds_first = file.metadata.get("tokenizer.ggml.add_bos_token", False)
        return {"chat_template": source, "add_bos_token": adds_first, **special_tokens(file)}
    path = folder / "tokenizer_config.json"
    parsed = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return parsed if isinstance(parsed, dict) else {}


def _text(token: Any) -> str:
    """A special token as the file has it: text, or an object with the text."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else ""


def _refuse(message: str) -> None:
    raise TemplateError(message)
