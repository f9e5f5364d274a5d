"""Tokenizer and chat template out of a GGUF file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.llama import tiny_gguf, vocabulary
from tetrad.core.config import ServeConfig
from tetrad.core.errors import CheckpointError, ConfigError
from tetrad.core.gguf import GgufFile
from tetrad.server.model import ServedModel
from tetrad.server.text.gguf import template_of, tokenizer_of


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> GgufFile:
    return GgufFile.read(tiny_gguf(tmp_path_factory.mktemp("text") / "tiny.gguf", {}))


def changed(file: GgufFile, **values: Any) -> GgufFile:
    told = {f"tokenizer.{key.replace('__', '.')}": value for key, value in values.items()}
    return replace(file, metadata=file.metadata | told)


def names(file: GgufFile, text: str, **options: bool) -> list[str]:
    tokens, _, _ = vocabulary()
    special = options.get("add_special_tokens", False)
    return [tokens[i] for i in tokenizer_of(file).encode(text, add_special_tokens=special)]


def test_merges_apply_in_their_order_and_digits_stand_alone(file: GgufFile):
    """ "12" and "23" are tokens, but SmolLM2 cuts a number before it merges."""
    assert names(file, "the thing") == ["the", "Ġth", "ing"]
    assert names(file, "in 123") == ["in", "Ġ", "1", "2", "3"]
    assert names(changed(file, ggml__pre="gpt-2"), "in 123") == ["in", "Ġ", "12", "3"]


def test_control_tokens_are_found_and_hidden_and_a_users_are_shown(file: GgufFile):
    tokenizer = tokenizer_of(file)
    assert names(file, "<|im_start|>in<mark>") == ["<|im_start|>", "in", "<mark>"]
    assert tokenizer.special_ids == {0, 1, 2}
    text = "<|im_start|>the\n<mark> 12"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert tokenizer.vocab_size == 128


def test_a_first_token_is_added_where_the_file_says_so(file: GgufFile):
    assert names(file, "in", add_special_tokens=True) == ["in"]
    first = changed(file, ggml__add_bos_token=True)
    assert names(first, "in", add_special_tokens=True) == ["<|im_start|>", "in"]


def test_the_template_is_the_files(file: GgufFile):
    template = template_of(file)
    assert template is not None
    told = template.render([{"role": "user", "content": "in"}])
    assert told == "<|im_start|>user\nin<|im_end|>\n<|im_start|>assistant\n"
    assert template_of(changed(file, chat_template="")) is None
    with pytest.raises(ConfigError, match="is not valid Jinja"):
        template_of(changed(file, chat_template="{% for %}"))


def test_what_cannot_be_served_is_refused(file: GgufFile):
    with pytest.raises(CheckpointError, match="of the kind 'llama'"):
        tokenizer_of(changed(file, ggml__model="llama"))
    with pytest.raises(CheckpointError, match="in the manner of 'tekken'"):
        tokenizer_of(changed(file, ggml__pre="tekken"))
    with pytest.raises(CheckpointError, match="merges that do not fit"):
        tokenizer_of(changed(file, ggml__merges=["zz yy"]))
    with pytest.raises(CheckpointError, match="must be a list of texts"):
        tokenizer_of(changed(file, ggml__tokens=[1, 2]))
    with pytest.raises(CheckpointError, match="names token 999"):
        template_of(changed(file, ggml__eos_token_id=999))


def test_a_file_is_a_model(file: GgufFile):
    served = ServedModel.load(ServeConfig(model=Path(file.path)))
    assert served.name == "tiny"
    assert served.arch.eos_ids == (2, 0)
    assert served.architectures == ("LlamaForCausalLM",)
    assert served.template is not None
