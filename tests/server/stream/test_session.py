"""One stream: counts, stop strings, log-probabilities and the two parsers together."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tetrad.core.request import Finish, RequestOutput, TokenLogprob
from tetrad.server.parsers.reasoning import REASONING_FORMATS, ReasoningParser
from tetrad.server.parsers.tools.glm import GlmParser
from tetrad.server.stream.session import Delta, GenerationError, Session
from tetrad.server.text.tokenizer import Tokenizer

EOS = 498
CALL = "<tool_call>now</tool_call>"
TOOLS = [{"type": "function", "function": {"name": "now"}}]


def outputs(
    ids: Sequence[int], num_per_step: int, finish: Finish, with_logprobs: bool = False
) -> list[RequestOutput]:
    pieces = [tuple(ids[i : i + num_per_step]) for i in range(0, len(ids), num_per_step)]
    found = []
    for i, piece in enumerate(pieces):
        logprobs = tuple(TokenLogprob(t, -0.25) for t in piece) if with_logprobs else ()
        end = finish if i == len(pieces) - 1 else None
        found.append(RequestOutput("r", piece, logprobs, end, prompt_tokens=5, cached_tokens=2))
    return found


def run(session: Session, steps: Sequence[RequestOutput]) -> Delta:
    """All deltas joined, up to the one that finishes."""
    whole = Delta()
    for output in steps:
        delta = session.feed(output)
        whole.content += delta.content
        whole.reasoning += delta.reasoning
        whole.tool_calls += delta.tool_calls
        whole.token_ids += delta.token_ids
        whole.entries += delta.entries
        whole.finish = delta.finish
        if delta.finish:
            break
    return whole


@pytest.mark.parametrize("num_per_step", [1, 2, 3, 100])
def test_reasoning_content_and_calls_whatever_the_steps(tokenizer: Tokenizer, num_per_step: int):
    ids = tokenizer.encode(f"three plus</think>Let me.\n{CALL}", add_special_tokens=False)
    session = Session(
        tokenizer,
        hidden_ids=tokenizer.special_ids,
        reasoning=ReasoningParser(REASONING_FORMATS["glm45"], "inside"),
        tools=GlmParser(TOOLS),
    )
    stop = Finish("stop", matched_token=EOS)
    whole = run(session, outputs([*ids, EOS], num_per_step, stop))
    assert (whole.reasoning, whole.content) == ("three plus", "Let me.")
    assert [delta.name for delta in whole.tool_calls if delta.name] == ["now"]
    assert whole.finish is not None
    assert (whole.finish.reason, whole.finish.matched) == ("tool_calls", EOS)
    assert session.completion_tokens == len(ids) + 1
    assert session.reasoning_tokens == len(
        tokenizer.encode("three plus</think>", add_special_tokens=False)
    )
    assert (session.prompt_tokens, session.cached_tokens) == (5, 2)


def test_the_end_token_is_never_text_even_if_special_tokens_are_shown(tokenizer: Tokenizer):
    session = Session(tokenizer)
    ids = tokenizer.encode("8", add_special_tokens=False)
    whole = run(session, outputs([*ids, EOS], 1, Finish("stop", matched_token=EOS)))
    assert whole.content == "8"
    assert whole.token_ids == [*ids, EOS]


def test_a_cut_answer_with_calls_is_still_cut(tokenizer: Tokenizer):
    ids = tokenizer.encode(CALL, add_special_tokens=False)
    session = Session(tokenizer, tools=GlmParser(TOOLS))
    whole = run(session, outputs(ids, 1, Finish("length")))
    assert whole.finish is not None
    assert whole.finish.reason == "length"


@pytest.mark.parametrize("num_per_step", [1, 4, 100])
def test_a_stop_string_ends_the_text_and_hides_its_tokens(tokenizer: Tokenizer, num_per_step: int):
    ids = tokenizer.encode("one two three", add_special_tokens=False)
    session = Session(tokenizer, stops=["wo t"])
    whole = run(session, outputs(ids, num_per_step, Finish("length"), with_logprobs=True))
    assert whole.content == "one t"
    assert whole.finish is not None
    assert (whole.finish.reason, whole.finish.matched) == ("stop", "wo t")
    # Tokens of one character each after the first word make the cut visible in the entries.
    shown = tokenizer.decode([entry.values.token_id for entry in whole.entries])
    assert shown.startswith("one t")
    assert len(shown) < len("one two t")


def test_held_back_text_comes_at_the_end(tokenizer: Tokenizer):
    ids = tokenizer.encode("one tw", add_special_tokens=False)
    whole = run(Session(tokenizer, stops=["two"]), outputs(ids, 1, Finish("length"), True))
    assert whole.content == "one tw"
    assert [entry.values.token_id for entry in whole.entries] == ids


def test_stop_strings_wait_for_the_least_number_of_tokens(tokenizer: Tokenizer):
    ids = tokenizer.encode("a.a.a.", add_special_tokens=False)
    steps = outputs(ids, 1, Finish("length"))
    assert run(Session(tokenizer, stops=["."]), steps).content == "a"
    assert run(Session(tokenizer, stops=["."], min_new_tokens=3), steps).content == "a.a"


def test_an_unfinished_character_becomes_one_replacement_at_the_end(tokenizer: Tokenizer):
    ids = tokenizer.encode("é", add_special_tokens=False)
    assert len(ids) == 2
    assert run(Session(tokenizer), outputs(ids[:1], 1, Finish("length"))).content == "\ufffd"


def test_text_offsets_count_characters(tokenizer: Tokenizer):
    ids = tokenizer.encode("é+5", add_special_tokens=False)
    whole = run(Session(tokenizer), outputs(ids, 1, Finish("length"), with_logprobs=True))
    assert [entry.text_offset for entry in whole.entries] == [0, 0, 1, 2]


def test_a_failed_request_raises_its_sentence(tokenizer: Tokenizer):
    failed = RequestOutput("r", (), finish=Finish("error", message="Logits were not finite."))
    with pytest.raises(GenerationError, match="not finite"):
        Session(tokenizer).feed(failed)


def test_an_aborted_request_keeps_what_it_had(tokenizer: Tokenizer):
    session = Session(tokenizer)
    session.feed(RequestOutput("r", tuple(tokenizer.encode("3", add_special_tokens=False))))
    delta = session.feed(RequestOutput("r", (), finish=Finish("abort")))
    assert delta.finish is not None
    assert (delta.finish.reason, session.completion_tokens) == ("abort", 1)
