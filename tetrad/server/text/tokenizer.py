"""Text to token ids and back, a token at a time.

The models served here have byte-level vocabularies: every token stands for some bytes, and a text
is the UTF-8 reading of the bytes of its tokens. So streaming needs no second decoding of a window
of tokens: an unfinished character, at most three bytes, is held back until its last byte is there.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable
from pathlib import Path

import tokenizers

from tetrad.core.errors import CheckpointError
from tetrad.core.token_bytes import bytes_of


class Tokenizer:
    """A model's tokenizer.json."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, *, is_lent: bool = False) -> None:
        """`is_lent`: to a model of a larger vocabulary, whose text means nothing."""
        self._tokenizer = tokenizer
        self._is_lent = is_lent
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        """Control tokens, which a reader does not want to see."""
        self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
        self._bytes: dict[int, bytes] = {}
        self.texts = _Texts(self)

    @classmethod
    def from_folder(cls, folder: Path, *, is_lent: bool = False) -> Tokenizer:
        """Read `folder`/tokenizer.json. Raises CheckpointError with a sentence."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(
                f"{folder} holds no tokenizer.json, without which text cannot be served."
            )
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # noqa: BLE001 - the binding raises bare Exception
            raise CheckpointError(f"{path} cannot be read as a tokenizer: {error}.") from None
        if (kind := _decoder_kind(tokenizer)) != "ByteLevel":
            raise CheckpointError(
                f"{path} has a decoder of type {kind}; Tetrad serves byte-level vocabularies "
                f"(decoder type ByteLevel), which GLM and DeepSeek have."
            )
        return cls(tokenizer, is_lent=is_lent)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`; special tokens written out in it become their ids."""
        # The binding lets other threads run while it encodes a batch, but not a single text.
        batch = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return batch[0].ids

    def encode_all(self, texts: Iterable[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Token ids of each text."""
        return [self.encode(text, add_special_tokens=add_special_tokens) for text in texts]

    def id_of(self, token: str) -> int | None:
        """Id of a token by its exact name."""
        return self._tokenizer.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; none for an id outside the vocabulary (padding rows),
        unless the tokenizer is lent: then those of another token, so that every token is text."""
        told = token_id % self.vocab_size if self._is_lent else token_id
        known = self._bytes.get(told)
        if known is not None:
            return known
        token = self._tokenizer.id_to_token(told)
        found = bytes_of(token or "")
        # Ids may come from a client: only so many are kept as there are tokens.
        if token is not None:
            self._bytes[told] = found
        return found

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text of all tokens at once, special ones included."""
        return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", errors="replace")


class _Texts(dict[int, str | None]):
    """By token id: its text, None where its bytes are not whole characters. Of what a model said,
    so no more than it has tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> str | None:
        piece = self._tokenizer.token_bytes(token_id)
        text, num_read = codecs.utf_8_decode(piece, "replace", False)
        self[token_id] = text if num_read == len(piece) else None
        return self[token_id]


class Detokenizer:
    """One growing text. Characters come out whole, as soon as their last byte is there."""

    def __init__(self, tokenizer: Tokenizer, hidden_ids: frozenset[int] = frozenset()) -> None:
        """Tokens in `hidden_ids` leave no trace in the text."""
        self._tokenizer = tokenizer
        self._texts = tokenizer.texts
        self._hidden_ids = hidden_ids
        self._begun = b""
        """Of a character that is not whole yet."""

    def feed(self, token_id: int) -> str:
        """The characters this token completes, often none or several."""
        if token_id in self._hidden_ids:
            return ""
        if not self._begun and (known := self._texts[token_id]) is not None:
            return known
        piece = self._begun + self._tokenizer.token_bytes(token_id)
        text, num_read = codecs.utf_8_decode(piece, "replace", False)
        self._begun = piece[num_read:]
        return text

    def flush(self) -> str:
        """The text ended: an unfinished character becomes U+FFFD."""
        piece, self._begun = self._begun, b""
        return codecs.utf_8_decode(piece, "replace", True)[0]


def _decoder_kind(tokenizer: tokenizers.Tokenizer) -> str:
    if tokenizer.decoder is None:
        return "none"
    return str(json.loads(tokenizer.decoder.__getstate__())["type"])
