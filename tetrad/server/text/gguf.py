"""Tokenizer and chat template of a GGUF file."""

from __future__ import annotations

import jinja2

from tetrad.core.errors import ConfigError
from tetrad.core.gguf import GgufFile
from tetrad.data.gguf_tokenizer import encoder_of, special_tokens
from tetrad.server.text.chat_template import ChatTemplate
from tetrad.server.text.tokenizer import Tokenizer


def tokenizer_of(file: GgufFile) -> Tokenizer:
    """Raises CheckpointError for a vocabulary that is not byte-level BPE, or that is damaged."""
    return Tokenizer(encoder_of(file))


def template_of(file: GgufFile) -> ChatTemplate | None:
    """None where the file has none. Raises ConfigError for one that is no Jinja."""
    source = file.get("tokenizer.chat_template", str, "")
    if not source:
        return None
    try:
        return ChatTemplate(source, special_tokens(file))
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"The chat template of {file.path} is not valid Jinja: {error.message} "
            f"(line {error.lineno})."
        ) from None
