"""Detokenising piece by piece gives the text of the whole, and never half a character."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tetrad.core.errors import CheckpointError
from tetrad.data import embedded_model
from tetrad.server.text import tokenizer as tokenizer_module
from tetrad.server.text.tokenizer import Detokenizer, Tokenizer

TOKENIZER = Tokenizer.from_folder(embedded_model())
HUGGING_FACE = tokenizers.Tokenizer.from_file(str(embedded_model() / "tokenizer.json"))

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
any_ids = st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=40)


def pieces(ids: list[int], hidden_ids: frozenset[int] = frozenset()) -> list[str]:
    detokenizer = Detokenizer(TOKENIZER, hidden_ids)
    return [*map(detokenizer.feed, ids), detokenizer.flush()]


@given(texts)
def test_pieces_of_a_text_join_to_it_without_broken_characters(text: str):
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    streamed = pieces(ids)
    assert "".join(streamed) == text
    assert sum(piece.count("\ufffd") for piece in streamed) == text.count("\ufffd")


def test_other_threads_run_while_a_long_text_is_tokenised():
    """The event loop is one of them."""
    num_ticks = 0
    is_over = threading.Event()

    def tick() -> None:
        nonlocal num_ticks
        while not is_over.wait(0.001):
            num_ticks += 1

    ticker = threading.Thread(target=tick)
    ticker.start()
    before = num_ticks
    TOKENIZER.encode("ab " * 300_000, add_special_tokens=False)
    during = num_ticks - before
    is_over.set()
    ticker.join()
    assert during >= 5


@given(any_ids)
def test_any_tokens_join_to_what_hugging_face_decodes(ids: list[int]):
    whole = HUGGING_FACE.decode(ids, skip_special_tokens=False)
    assert "".join(pieces(ids)) == whole
    assert TOKENIZER.decode(ids) == whole


@given(any_ids)
def test_hidden_tokens_leave_no_trace(ids: list[int]):
    whole = HUGGING_FACE.decode(ids, skip_special_tokens=True)
    assert "".join(pieces(ids, TOKENIZER.special_ids)) == whole


@settings(max_examples=30)
@given(any_ids)
@example([169, 94])
def test_no_more_than_an_unfinished_character_is_held_back(ids: list[int]):
    detokenizer = Detokenizer(TOKENIZER)
    shown = ""
    for i, token_id in enumerate(ids):
        shown += detokenizer.feed(token_id)
        held = detokenizer._begun
        assert len(held) <= 3
        # at the end each byte of what is no character shows as one of its own, at most
        whole = TOKENIZER.decode(ids[: i + 1])
        assert whole.startswith(shown)
        assert len(whole) - len(shown) <= len(held)


def test_markers_are_tokens_of_their_own_but_not_special():
    for marker in ("<think>", "</think>", "<tool_call>", "<arg_value>"):
        token_id = TOKENIZER.id_of(marker)
        assert token_id is not None
        assert token_id not in TOKENIZER.special_ids
    assert TOKENIZER.id_of("<|user|>") in TOKENIZER.special_ids


def test_a_special_token_that_is_a_marker_stays_visible(tmp_path: Path):
    added = tokenizers.AddedToken("<think>", special=True)
    tokenizer = tokenizers.Tokenizer.from_file(str(embedded_model() / "tokenizer.json"))
    tokenizer.add_special_tokens([added])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.from_folder(tmp_path).id_of("<think>") == TOKENIZER.id_of("<think>")


def test_a_lent_tokenizer_reads_each_token_of_its_own_once(monkeypatch: pytest.MonkeyPatch):
    """Ids of a larger vocabulary stand for its tokens over and over."""
    lent = Tokenizer.from_folder(embedded_model(), is_lent=True)
    own = [lent.token_bytes(token_id) for token_id in range(lent.vocab_size)]
    monkeypatch.setattr(tokenizer_module, "bytes_of", None)
    assert [lent.token_bytes(lent.vocab_size * 3 + i) for i in range(lent.vocab_size)] == own


def test_a_token_outside_the_vocabulary_is_silent():
    assert TOKENIZER.token_bytes(TOKENIZER.vocab_size + 5) == b""


def test_a_missing_tokenizer_is_a_sentence(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"holds no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def test_a_broken_tokenizer_is_a_sentence(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="cannot be read as a tokenizer"):
        Tokenizer.from_folder(tmp_path)


def test_another_kind_of_vocabulary_is_refused_by_name(tmp_path: Path):
    shutil.copy(embedded_model() / "tokenizer.json", tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    content["decoder"] = {"type": "Fuse"}
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="decoder of type Fuse"):
        Tokenizer.from_folder(tmp_path)
