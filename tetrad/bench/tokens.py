"""The tokenizer of the server under load, read from its folder."""

from __future__ import annotations

import json
import random
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tetrad.core.errors import ConfigError

REPAIRS = 40


class Vocabulary:
    """Ordinary token ids, exact-length text and token counts."""

    def __init__(self, folder: Path) -> None:
        """Read `folder`/tokenizer.json. Raises ConfigError when it is not there or not readable."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"{folder} holds no tokenizer.json; --tokenizer names its folder.")
        parsed = json.loads(path.read_text(encoding="utf-8"))
        self.folder = folder
        self.ordinary_ids = ordinary_ids(parsed)
        self._tokenizer = Tokenizer.from_str(json.dumps(parsed))

    def count(self, text: str) -> int:
        """Tokens of `text`, without any the tokenizer would add around it."""
        return len(self._encode(text))

    def draw_ids(self, rng: random.Random, num_tokens: int) -> list[int]:
        """Random ordinary ids: special tokens would end turns or call tools."""
        return rng.choices(self.ordinary_ids, k=num_tokens)

    def draw_text(self, rng: random.Random, num_tokens: int) -> str:
        """Random text of exactly `num_tokens` tokens, verified by encoding it.

        Decoding and encoding again rarely gives the same length, so the text is cut or grown until
        it does. Raises ConfigError when this tokenizer does not get there.
        """
        ids = rng.choices(self._text_ids, k=num_tokens)
        for _ in range(REPAIRS):
            text = self._tokenizer.decode(ids)
            ids = self._encode(text)
            if len(ids) == num_tokens:
                return text
            missing = num_tokens - len(ids)
            ids = ids[:num_tokens] + rng.choices(self._text_ids, k=max(0, missing))
        raise ConfigError(
            f"No text of exactly {num_tokens} tokens was found with the tokenizer of "
            f"{self.folder}; --dataset-name random-ids has exact lengths by construction."
        )

    @cached_property
    def _text_ids(self) -> list[int]:
        """Ordinary ids whose text encodes to themselves; the bytes of half a character do not."""
        texts = self._tokenizer.decode_batch([[i] for i in self.ordinary_ids])
        encoded = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        both = zip(self.ordinary_ids, encoded, strict=True)
        return [i for i, encoding in both if encoding.ids == [i]]

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


def ordinary_ids(parsed: dict[str, Any]) -> list[int]:
    """Ids of the vocabulary that are no added token, ascending, from a parsed tokenizer.json."""
    vocab = parsed["model"]["vocab"]
    ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
    added = {token["id"] for token in parsed.get("added_tokens", [])}
    unknown = parsed["model"].get("unk_token")
    if isinstance(vocab, dict) and unknown in vocab:
        added.add(vocab[unknown])
    return sorted(set(ids) - added)
