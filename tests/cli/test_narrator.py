"""What a long command tells where nobody sees a bar."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tetrad.cli import narrator as module
from tetrad.cli.narrator import Narrator


def test_what_stays_as_it_is_is_told_once(capsys: pytest.CaptureFixture[str]):
    narrator = Narrator()
    for number in (1, 2):
        narrator.say(f"run {number}")
        narrator.say_once("a plan")
        narrator.say_once(f"a part of run {number}")
        narrator.say("go")
    told = ["run 1", "a plan", "a part of run 1", "go", "run 2", "a part of run 2", "go"]
    assert capsys.readouterr().err.splitlines() == told


@pytest.mark.parametrize("show_bar", [True, False])
def test_a_log_gets_a_line_now_and_then(
    show_bar: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    now = 5.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    narrator = Narrator(show_bar=show_bar)
    narrator.begin(40)
    for number in range(8):
        now += 4.0
        narrator.finished(has_failed=number == 3)
    narrator.end()
    narrator.begin(2)
    narrator.finished(has_failed=False)
    lines = ["3 of 40 requests, 12 s", "6 of 40 requests, 1 failed, 24 s"]
    assert capsys.readouterr().err.splitlines() == (lines if show_bar else [])
