"""What the API process reads of the model folder: shapes, tokenizer, template, defaults."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tetrad.core.architectures import Arch
from tetrad.core.config import ServeConfig
from tetrad.core.errors import RequestError, nearest
from tetrad.core.gguf import GgufFile, is_gguf
from tetrad.core.jsonfile import read_json_object
from tetrad.core.presets import served_shapes
from tetrad.data import embedded_model, model_folder
from tetrad.server import reasoning, tools
from tetrad.server.chat_template import ChatTemplate, End
from tetrad.server.gguf_text import template_of, tokenizer_of
from tetrad.server.sampling import SamplingDefaults
from tetrad.server.text import Tokenizer

LONG_TEXT_CHARACTERS = 4_000
"""Longer texts are tokenised in a thread, so that other requests do not wait."""
MOST_CHARACTERS_PER_TOKEN = 32
"""No text that means anything has more on average; most languages have 1 to 5."""
ANY_NAMES = ("default",)
"""Model names that mean "whatever is served" (SGLang's clients send this one)."""


@dataclass(frozen=True)
class ServedModel:
    """One model, as the server knows it."""

    name: str
    folder: Path
    text_folder: Path
    """Where tokenizer and template come from: `folder`, if it has them."""
    arch: Arch
    tokenizer: Tokenizer
    template: ChatTemplate | None
    defaults: SamplingDefaults
    splits_reasoning: bool
    reads_tool_calls: bool
    architectures: tuple[str, ...]

    @classmethod
    def load(cls, config: ServeConfig) -> ServedModel:
        """Read the folder or file. Raises CheckpointError or ConfigError with a sentence."""
        folder = model_folder(config.model)
        text_folder = _text_folder(folder, config.load_format)
        arch = served_shapes(folder, config.load_format)
        tokenizer, template = _text(config, folder, text_folder)
        source = template.source if template is not None else ""
        return cls(
            name=config.served_model_name or model_name(folder),
            folder=folder,
            text_folder=text_folder,
            arch=arch,
            tokenizer=tokenizer,
            template=template,
            defaults=SamplingDefaults.of(config.sampling_defaults, text_folder),
            splits_reasoning=_chosen(config.reasoning_parser, reasoning.OPEN, source),
            reads_tool_calls=_chosen(config.tool_call_parser, tools.OPEN, source),
            architectures=_architectures(folder),
        )

    @property
    def reasoning_parser(self) -> str | None:
        """SGLang's name of the parser in use."""
        return "glm45" if self.splits_reasoning else None

    @property
    def tool_call_parser(self) -> str | None:
        """SGLang's name of the parser in use."""
        return "glm47" if self.reads_tool_calls else None

    def check_name(self, name: str | None) -> None:
        """Raise RequestError (404) when a request names another model."""
        if name is None or name in (self.name, str(self.folder), *ANY_NAMES):
            return
        raise RequestError(
            f"The model {name!r} is not served here; {self.name!r} is.{nearest(name, [self.name])}",
            http_status=404,
            param="model",
        )

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        variables: dict[str, Any],
        end: End = "turn",
    ) -> str:
        """Messages as a prompt. Raises RequestError."""
        if self.template is None:
            raise RequestError(
                f"The model {self.name!r} has no chat template; use /v1/completions, or start the "
                "server with --chat-template.",
                param="messages",
            )
        return self.template.render(messages, tools, variables, end)

    async def encode(
        self, texts: Sequence[str], *, add_special_tokens: bool, context_tokens: int
    ) -> list[list[int]]:
        """Token ids of each text. Raises RequestError for one that is hopelessly long."""
        _check_lengths(texts, context_tokens)
        encode = partial(self.tokenizer.encode_all, texts, add_special_tokens=add_special_tokens)
        if sum(map(len, texts)) < LONG_TEXT_CHARACTERS:
            return encode()
        return await asyncio.to_thread(encode)

    async def prompt_ids(
        self,
        prompts: Sequence[str] | Sequence[list[int]],
        context_tokens: int,
        *,
        add_special_tokens: bool = True,
    ) -> list[list[int]]:
        """Prompts as ids: texts are tokenised, special tokens of the tokenizer's own added."""
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        ids = [prompt for prompt in prompts if not isinstance(prompt, str)]
        return ids or await self.encode(
            texts, add_special_tokens=add_special_tokens, context_tokens=context_tokens
        )

    def hidden_ids(self, *, skip_special: bool) -> frozenset[int]:
        """Tokens a reader does not see. Markers that a parser reads are never among them."""
        if not skip_special:
            return frozenset()
        markers: tuple[str, ...] = reasoning.MARKERS if self.splits_reasoning else ()
        markers += tools.MARKERS if self.reads_tool_calls else ()
        return self.tokenizer.special_ids - {self.tokenizer.id_of(marker) for marker in markers}


def model_name(model: Path) -> str:
    """Of a folder, or of a file without its suffix."""
    path = model.resolve()
    return path.stem if is_gguf(path) else path.name


def _text_folder(folder: Path, load_format: str) -> Path:
    """Where tokenizer and template are: a model of drawn weights may lend the embedded one's."""
    has_none = not ((folder / "tokenizer.json").is_file() or is_gguf(folder))
    return embedded_model() if load_format != "auto" and has_none else folder


def _text(
    config: ServeConfig, folder: Path, text_folder: Path
) -> tuple[Tokenizer, ChatTemplate | None]:
    """Of a GGUF file its own, unless --chat-template replaces the latter."""
    if not is_gguf(text_folder):
        template = ChatTemplate.from_folder(text_folder, config.chat_template)
        return Tokenizer.from_folder(text_folder, is_lent=text_folder != folder), template
    file = GgufFile.read(text_folder)
    if config.chat_template is not None:
        return tokenizer_of(file), ChatTemplate.from_folder(text_folder, config.chat_template)
    return tokenizer_of(file), template_of(file)


def _architectures(folder: Path) -> tuple[str, ...]:
    if is_gguf(folder):
        return ("LlamaForCausalLM",)
    path = folder / "config.json"
    return tuple(read_json_object(path).get("architectures", ())) if path.is_file() else ()


def _check_lengths(texts: Sequence[str], context_tokens: int) -> None:
    """Tokenising takes much time and memory: a text far beyond the context is not worth either."""
    longest, limit = max(map(len, texts)), context_tokens * MOST_CHARACTERS_PER_TOKEN
    if longest > limit:
        raise RequestError(
            f"The prompt has {longest} characters; a context of {context_tokens} tokens is for "
            f"{limit} characters at the very most.",
            param="prompt",
        )


def _chosen(parser: str, marker: str, template: str) -> bool:
    """Whether a parser is used: as configured, else by what the template writes."""
    return marker in template if parser == "auto" else parser != "none"
