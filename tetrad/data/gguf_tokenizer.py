"""The tokenizer of a GGUF file, from its own vocabulary and merges."""

from __future__ import annotations

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
)

from tetrad.core.errors import CheckpointError
from tetrad.core.gguf import GgufFile
from tetrad.core.gguf_arch import CONTROL

USER_DEFINED = 4
"""Token type of a token that is never split and is yet a text's."""

_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    """What `pattern` finds stays whole; then bytes become characters."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _GPT2])
_SPLITS: dict[str, pre_tokenizers.PreTokenizer] = {
    "gpt-2": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
    "llama-bpe": _split(_LLAMA3),
    "llama3": _split(_LLAMA3),
    "qwen2": _split(_QWEN2),
}
"""tokenizer.ggml.pre → how a text is cut before merges apply, as llama.cpp cuts it."""


def encoder_of(file: GgufFile) -> Tokenizer:
    """Raises CheckpointError for a vocabulary that is not byte-level BPE, or that is damaged."""
    if (kind := file.get("tokenizer.ggml.model", str)) != "gpt2":
        raise CheckpointError(
            f"{file.path} has a vocabulary of the kind {kind!r}; Tetrad serves byte-level ones "
            "('gpt2'), which Llama 3 and SmolLM2 have."
        )
    cut = file.get("tokenizer.ggml.pre", str)
    if cut not in _SPLITS:
        raise CheckpointError(
            f"{file.path} cuts texts in the manner of {cut!r} before it merges; "
            f"{', '.join(_SPLITS)} are known."
        )
    tokens = _texts(file, "tokenizer.ggml.tokens")
    parts = (merge.partition(" ") for merge in _texts(file, "tokenizer.ggml.merges"))
    merges = [(left, right) for left, _, right in parts]
    try:
        encoder = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    except Exception as error:  # noqa: BLE001 - the binding raises bare Exception
        raise CheckpointError(f"{file.path} has merges that do not fit: {error}.") from None
    encoder.pre_tokenizer = _SPLITS[cut]
    encoder.decoder = decoders.ByteLevel()
    _add_special(file, encoder, tokens)
    if file.metadata.get("tokenizer.ggml.add_bos_token", False):
        bos = file.get("tokenizer.ggml.bos_token_id", int)
        encoder.post_processor = _with_first(_token(file, tokens, bos), bos)
    return encoder


def special_tokens(file: GgufFile) -> dict[str, str]:
    """bos_token and eos_token, where the file names them. Raises CheckpointError."""
    tokens = _texts(file, "tokenizer.ggml.tokens")
    return {
        f"{name}_token": _token(file, tokens, file.metadata[key])
        for name in ("bos", "eos")
        if isinstance(file.metadata.get(key := f"tokenizer.ggml.{name}_token_id"), int)
    }


def _texts(file: GgufFile, key: str) -> list[str]:
    found = file.get(key, list)
    if not all(isinstance(text, str) for text in found):
        raise CheckpointError(f"{file.path}: {key} must be a list of texts.")
    return list(found)


def _token(file: GgufFile, tokens: list[str], token_id: int) -> str:
    if not 0 <= token_id < len(tokens):
        raise CheckpointError(
            f"{file.path} names token {token_id} of a vocabulary of {len(tokens)}."
        )
    return tokens[token_id]


def _add_special(file: GgufFile, encoder: Tokenizer, tokens: list[str]) -> None:
    """Control tokens are found whole in a text and are not shown; user-defined ones are."""
    kinds = file.metadata.get("tokenizer.ggml.token_type")
    pairs = list(zip(tokens, kinds if isinstance(kinds, list) else [], strict=False))
    for wanted in (CONTROL, USER_DEFINED):
        found = [token for token, kind in pairs if kind == wanted and token]
        special = wanted == CONTROL
        encoder.add_tokens(
            [AddedToken(token, special=special, normalized=False) for token in found]
        )


def _with_first(token: str, token_id: int) -> processors.PostProcessor:
    """Puts a token before every text."""
    escaped = token.replace(":", "\\:")
    if escaped != token:
        raise CheckpointError(f"The first token {token!r} holds a colon, which cannot be added.")
    return processors.TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A $B", special_tokens=[(token, token_id)]
    )
