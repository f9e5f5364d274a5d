"""The tokenizer of the server under load, read from its folder or GGUF file."""

from __future__ import annotations

import json
import os
import random
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tetrad.core.errors import ConfigError
from tetrad.core.gguf import GgufFile, is_gguf
from tetrad.data.gguf_tokenizer import encoder_of

REPAIRS = 40
LOOSE_END = 16
"""Tokens at the end of a text that may change so that its length comes out."""


class Vocabulary:
    """Ordinary token ids, exact-length text and token counts."""

    def __init__(self, folder: Path) -> None:
        """Read `folder`/tokenizer.json, or the GGUF file that `folder` is. Raises ConfigError or
        CheckpointError when it is not there or not readable."""
        self.folder = folder
        self._tokenizer = _read(folder)
        self.ordinary_ids = ordinary_ids(json.loads(self._tokenizer.to_str()))

    def count(self, text: str) -> int:
        """Tokens of `text`, without any the tokenizer would add around it."""
        return len(self.encode(text))

    def draw_ids(self, rng: random.Random, num_tokens: int) -> list[int]:
        """Random ordinary ids: special tokens would end turns or call tools."""
        return rng.choices(self.ordinary_ids, k=num_tokens)

    def draw_text(self, rng: random.Random, num_tokens: int, beginning: str = "") -> str:
        """Random text of exactly `num_tokens` tokens in all that begins as told, verified by
        encoding it.

        Decoding and encoding again rarely gives the same length, so the text is cut or grown until
        it does. Raises ConfigError when this tokenizer does not get there.
        """
        begun = self.encode(beginning) if beginning else []
        ids = begun + self._draw_words(rng, num_tokens - len(begun))
        for _ in range(REPAIRS):
            text = self._tokenizer.decode(ids)
            if not text.startswith(beginning):
                text = beginning + self._tokenizer.decode(ids[len(begun) :])
            ids = self.encode(text)
            if len(ids) == num_tokens and text.startswith(beginning):
                return text
            ids = ids[:num_tokens] + self._draw_words(rng, num_tokens - len(ids))
        raise ConfigError(
            f"No text of exactly {num_tokens} tokens was found with the tokenizer of "
            f"{self.folder}; --dataset-name random-ids has exact lengths by construction."
        )

    def fit_text(self, rng: random.Random, text: str, num_tokens: int) -> str:
        """`text`, repeated or cut to exactly `num_tokens` tokens; a random end where it takes one.
        Raises ConfigError as `draw_text` does."""
        ids = self.encode(text) or self._draw_words(rng, 1)
        repeated = (ids * (num_tokens // len(ids) + 1))[:num_tokens]
        fitted = self._tokenizer.decode(repeated)
        if self.count(fitted) == num_tokens:
            return fitted
        kept = repeated[: max(0, num_tokens - LOOSE_END)]
        return self.draw_text(rng, num_tokens, self._tokenizer.decode(kept))

    def _draw_words(self, rng: random.Random, num_tokens: int) -> list[int]:
        return rng.choices(self._text_ids, k=max(0, num_tokens))

    @cached_property
    def _text_ids(self) -> list[int]:
        """Ordinary ids whose text encodes to themselves; the bytes of half a character do not."""
        texts = self._tokenizer.decode_batch([[i] for i in self.ordinary_ids])
        encoded = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        both = zip(self.ordinary_ids, encoded, strict=True)
        return [i for i, encoding in both if encoding.ids == [i]]

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without any the tokenizer would add around it."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


def has_tokenizer(model: Path) -> bool:
    """Is this a folder with a tokenizer.json, or a GGUF file, on this machine?"""
    # A server names what it likes; unlike Path's, these look-ups raise for no name.
    is_folder = os.path.isfile(model / "tokenizer.json")
    return is_folder or (model.suffix == ".gguf" and os.path.isfile(model))


def _read(model: Path) -> Tokenizer:
    if is_gguf(model):
        return encoder_of(GgufFile.read(model))
    path = model / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(
            f"{model} holds no tokenizer.json; --tokenizer names its folder, or a GGUF file."
        )
    return Tokenizer.from_str(path.read_text(encoding="utf-8"))


def ordinary_ids(parsed: dict[str, Any]) -> list[int]:
    """Ids of the vocabulary that are no added token, ascending, from a parsed tokenizer.json."""
    vocab = parsed["model"]["vocab"]
    ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
    added = {token["id"] for token in parsed.get("added_tokens", [])}
    unknown = parsed["model"].get("unk_token")
    if isinstance(vocab, dict) and unknown in vocab:
        added.add(vocab[unknown])
    return sorted(set(ids) - added)
