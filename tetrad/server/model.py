"""What the API process reads of the model folder: shapes, tokenizer, template, defaults."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from tetrad.core.architectures import Arch
from tetrad.core.config import ServeConfig
from tetrad.core.errors import RequestError, nearest
from tetrad.core.gguf import GgufFile, is_gguf
from tetrad.core.jsonfile import read_json_object
from tetrad.core.presets import served_shapes
from tetrad.core.quantization import check_scheme
from tetrad.data import model_folder, text_folder
from tetrad.server.bodies.sampling import SamplingDefaults
from tetrad.server.parsers import reasoning
from tetrad.server.parsers.reasoning import REASONING_FORMATS, ReasoningFormat
from tetrad.server.parsers.tools import formats as tools
from tetrad.server.parsers.tools.events import ToolParser
from tetrad.server.parsers.tools.formats import TOOL_FORMATS
from tetrad.server.text.chat_template import ChatTemplate, End
from tetrad.server.text.gguf import template_of, tokenizer_of
from tetrad.server.text.tokenizer import Tokenizer

LONG_TEXT_CHARACTERS = 4_000
"""Longer texts are tokenised in a thread, so that other requests do not wait."""
MANY_TEXTS = 32
"""So are more texts."""
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
    reasoning_parser: str | None
    """SGLang's name of the parser in use."""
    tool_call_parser: str | None
    architectures: tuple[str, ...]

    @classmethod
    def load(cls, config: ServeConfig) -> ServedModel:
        """Read the folder or file. Raises CheckpointError or ConfigError with a sentence."""
        folder = model_folder(config.model)
        folder_of_text = text_folder(folder, config.load_format)
        arch = served_shapes(folder, config.load_format)
        if config.load_format != "null":
            check_scheme(config.quantization, arch, is_drawn=config.load_format == "dummy")
        tokenizer, template = _text(config, folder, folder_of_text)
        source = template.source if template is not None else ""
        return cls(
            name=config.served_model_name or model_name(folder),
            folder=folder,
            text_folder=folder_of_text,
            arch=arch,
            tokenizer=tokenizer,
            template=template,
            defaults=SamplingDefaults.of(config.sampling_defaults, folder_of_text),
            reasoning_parser=_chosen(config.reasoning_parser, reasoning.guessed_format(source)),
            tool_call_parser=_chosen(config.tool_call_parser, tools.guessed_format(source)),
            architectures=_architectures(folder),
        )

    @property
    def reasoning_format(self) -> ReasoningFormat | None:
        """How reasoning is split from the answer, if it is."""
        return REASONING_FORMATS[self.reasoning_parser] if self.reasoning_parser else None

    @property
    def tool_format(self) -> type[ToolParser] | None:
        """How tool calls are read, if they are."""
        return TOOL_FORMATS[self.tool_call_parser] if self.tool_call_parser else None

    def check_name(self, name: str | None) -> None:
        """Raise RequestError (404) when a request names another model."""
        if name is None or name in (self.name, str(self.folder), *ANY_NAMES):
            return
        raise RequestError(
            f"The model {name!r} is not served here; {self.name!r} is.{nearest(name, [self.name])}",
            http_status=404,
            param="model",
            code="model_not_found",
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
        if sum(map(len, texts)) < LONG_TEXT_CHARACTERS and len(texts) <= MANY_TEXTS:
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
        return self._unmarked_ids

    @cached_property
    def _unmarked_ids(self) -> frozenset[int]:
        """Control tokens that are no part of a marker."""
        markers: tuple[str, ...] = reasoning.MARKERS if self.reasoning_parser else ()
        markers += self.tool_format.markers if self.tool_format else ()
        bytes_of = self.tokenizer.token_bytes
        return frozenset(
            token_id
            for token_id in self.tokenizer.special_ids
            if not any(bytes_of(token_id) in marker.encode() for marker in markers)
        )


def model_name(model: Path) -> str:
    """Of a folder, or of a file without its suffix."""
    path = model.resolve()
    return path.stem if is_gguf(path) else path.name


def _text(
    config: ServeConfig, folder: Path, folder_of_text: Path
) -> tuple[Tokenizer, ChatTemplate | None]:
    """Of a GGUF file its own, unless --chat-template replaces the latter."""
    if not is_gguf(folder_of_text):
        template = ChatTemplate.from_folder(folder_of_text, config.chat_template)
        return Tokenizer.from_folder(folder_of_text, is_lent=folder_of_text != folder), template
    file = GgufFile.read(folder_of_text)
    if config.chat_template is not None:
        return tokenizer_of(file), ChatTemplate.from_folder(folder_of_text, config.chat_template)
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


def _chosen(parser: str, guessed: str | None) -> str | None:
    """The parser that is used: as configured, else by what the template writes."""
    return guessed if parser == "auto" else None if parser == "none" else parser
