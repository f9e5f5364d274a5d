"""Stop strings: cut exactly, wherever the text is cut, and nothing of them is ever shown."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tetrad.server.text.stops import StopMatcher


def run(stops: Sequence[str], pieces: Sequence[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    shown = ""
    for piece in pieces:
        shown += matcher.feed(piece)
        if matcher.matched:
            return shown, matcher.matched
    return shown + matcher.flush(), None


def slow_twin(stops: Sequence[str], text: str) -> tuple[str, str | None]:
    """The definition: the match that ends first, and of those the longest."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            longest = max(ended, key=len)
            return text[: end - len(longest)], longest
    return text, None


letters = st.text("ab", max_size=14)


@given(st.lists(st.text("ab", min_size=1, max_size=5), max_size=4), st.lists(letters, max_size=6))
def test_any_cutting_gives_what_the_definition_says(stops: list[str], pieces: list[str]):
    assert run(stops, pieces) == slow_twin(stops, "".join(pieces))


@given(st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4), letters)
def test_what_is_shown_never_holds_the_start_of_a_match(stops: list[str], text: str):
    matcher = StopMatcher(stops)
    shown = ""
    for character in text:
        shown += matcher.feed(character)
        if matcher.matched:
            break
    final, _ = slow_twin(stops, text)
    assert final.startswith(shown)


def test_of_matches_that_end_together_the_longest_wins():
    assert run(["b", "ab"], ["xab"]) == ("x", "ab")


def test_held_back_text_comes_with_the_character_that_clears_it():
    matcher = StopMatcher(["END"])
    assert matcher.feed("the E") == "the "
    assert matcher.feed("N") == ""
    assert matcher.feed("N") == "ENN"
    assert matcher.flush() == ""


@pytest.mark.parametrize("split", range(len("one STOP two") + 1))
def test_a_match_across_pieces_is_cut_exactly(split: int):
    text = "one STOP two"
    assert run(["STOP"], [text[:split], text[split:]]) == ("one ", "STOP")


def test_what_matched_is_shown_if_asked_for():
    matcher = StopMatcher(["END", "D"], keep=True)
    assert matcher.feed("the E") + matcher.feed("NDx") == "the END"
    assert matcher.matched == "END"
