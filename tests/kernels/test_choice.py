"""Choosing by time: fake times, a cache that may be missing, stale or broken, and what is told."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.factories import TINY_GLM
from tetrad.core.arch import ModelArch
from tetrad.core.errors import UnsupportedError
from tetrad.core.hardware import DeviceSnapshot
from tetrad.core.records import CallTime
from tetrad.kernels import choice as choice_module
from tetrad.kernels.backend import Backend, Op
from tetrad.kernels.choice import TOKENS, Contest
from tetrad.kernels.choice_cache import FILE_NAME, ChoiceCache, cache_folder, source_digest
from tetrad.kernels.contenders import Regime, by_rows, reason, winners
from tetrad.kernels.registry import OPS
from tetrad.kernels.select import choose, resolve_ops

ARCH = ModelArch.from_config(TINY_GLM)
GPU = DeviceSnapshot("Fake GPU", "cuda", (9, 0), 1 << 34, 100, {"torch": "2.11", "driver": "580"})


class FakeTimer:
    """Gives each backend the times that a table says, by backend and tokens."""

    cache_bytes = 0

    def __init__(self, table: Mapping[str, Sequence[float]]) -> None:
        self.table = table
        self.num_calls = 0

    def time(self, calls: Sequence[Any], budget_s: float) -> CallTime:
        (call,) = calls
        name = call.func.__name__
        tokens = len(call.keywords["x"])
        self.num_calls += 1
        value = self.table[name][TOKENS.index(tokens)]
        if value < 0:
            raise RuntimeError("out of registers\nmore lines")
        return CallTime.of([value], "graph")


def op_with(op: Op, *names: str) -> Op:
    """The op with copies of its torch backend under other names."""
    found, right = {}, op.backends["torch"]
    for name in names:

        def run(**arguments: Any) -> Any:
            return right.run(**arguments)

        run.__name__ = name
        found[name] = replace(right, name=name, run=run)
    return replace(op, backends=found)


class Told(list[str]):
    def __call__(self, sentence: str) -> None:
        self.append(sentence)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Told:
    monkeypatch.setenv("TETRAD_CACHE_DIR", str(tmp_path / "cache"))
    return Told()


def contest(told: Told, table: Mapping[str, Sequence[float]], **changes: Any) -> Contest:
    values: dict[str, Any] = {
        "arch": ARCH, "dtype": torch.float32, "place": torch.device("cpu"), "here": GPU,
        "tell": told,
    }  # fmt: skip
    found = Contest(**(values | changes))
    found.__dict__["timer"] = FakeTimer(table)
    return found


def pick(op: Op, contest: Contest, **refused: str) -> Any:
    return choose(op, "auto", GPU, lambda _op, backend: refused.get(backend.name), contest)


def calls(contest: Contest) -> int:
    assert isinstance(contest.timer, FakeTimer)
    return contest.timer.num_calls


NORM = op_with(OPS["rms_norm"], "triton", "twin")
SLOW, FAST = (30.0, 30.0, 30.0, 30.0), (15.0, 20.0, 30.0, 30.0)
ALL = 2 * len(TOKENS)


def test_the_faster_one_is_chosen_and_the_reason_has_both_times(told: Told):
    chosen = pick(NORM, contest(told, {"triton": SLOW, "twin": FAST}))
    assert chosen.backend == "twin"
    assert chosen.reason == "20.0 µs against triton 30.0 µs at 64 tokens, measured"
    assert chosen.times_us["triton"] == {8: 30.0, 64: 30.0, 512: 30.0, 2048: 30.0}
    assert chosen.regimes == ()
    assert told == ["timing rms_norm: triton against twin"]


def test_a_difference_within_the_noise_leaves_the_preferred_one(told: Told):
    close = tuple(0.98 * time for time in SLOW)
    assert pick(NORM, contest(told, {"triton": SLOW, "twin": close})).backend == "triton"
    far = tuple(0.96 * time for time in SLOW)
    assert pick(NORM, contest(Told(), {"triton": far, "twin": SLOW})).backend == "triton"


def test_only_survivors_are_timed(told: Told):
    op = op_with(OPS["rms_norm"], "gluon", "triton", "twin")
    running = contest(told, {"triton": FAST, "twin": SLOW})
    chosen = pick(op, running, gluon="needs four legs")
    assert (chosen.backend, chosen.refusals) == ("triton", {"gluon": "needs four legs"})
    assert calls(running) == ALL
    alone = contest(told, {})
    assert pick(NORM, alone, triton="no").reason == "the first that can run here"
    assert calls(alone) == 0


def test_one_that_fails_at_the_models_shapes_is_refused(told: Told):
    running = contest(told, {"triton": (1.0, -1.0, 1.0), "twin": SLOW})
    chosen = pick(NORM, running)
    assert chosen.backend == "twin"
    assert chosen.refusals == {
        "triton": "fails at 64 tokens of this model: RuntimeError: out of registers"
    }
    again = contest(told, {"triton": SLOW, "twin": SLOW})
    remembered = pick(NORM, again)
    assert (remembered.refusals, calls(again)) == (chosen.refusals, 0)
    with pytest.raises(UnsupportedError, match=r"triton: fails at 8 .* twin: fails at 8"):
        pick(NORM, contest(told, {"triton": (-1.0,), "twin": (-1.0,)}, dtype=torch.bfloat16))


@pytest.mark.parametrize("wrong", [1.1, float("nan")])
def test_one_that_is_wrong_at_the_models_shapes_is_refused(told: Told, wrong: float):
    """Its canary was right: only steps of more than a hundred tokens are not."""

    def triton(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        y: torch.Tensor = OPS["rms_norm"].backends["torch"].run(x, weight, eps)
        return y * wrong if len(x) > 100 else y

    torch_backend = OPS["rms_norm"].backends["torch"]
    op = replace(
        NORM,
        backends={
            "triton": replace(torch_backend, name="triton", run=triton),
            "torch": torch_backend,
        },
    )
    chosen = pick(op, contest(told, {"triton": FAST, "run": SLOW}))
    assert chosen.backend == "torch"
    assert "fails at 512 tokens of this model: ArithmeticError" in chosen.refusals["triton"]
    assert "off what torch gives" in chosen.refusals["triton"]


def test_a_forced_backend_is_not_timed(told: Told):
    running = contest(told, {"triton": SLOW, "twin": FAST})
    chosen = choose(NORM, "triton", GPU, lambda _op, _backend: None, running)
    assert (chosen.backend, chosen.reason, calls(running)) == ("triton", "asked for", 0)


def test_what_was_measured_is_remembered(told: Told):
    table = {"triton": SLOW, "twin": FAST}
    first, second = contest(told, table), contest(told, table)
    before, after = pick(NORM, first), pick(NORM, second)
    assert (calls(first), calls(second)) == (ALL, 0)
    assert after.times_us == before.times_us
    assert after.reason == before.reason.replace("measured", "remembered")


@pytest.mark.parametrize(
    "changes",
    [
        {"here": replace(GPU, name="Other GPU")},
        {"here": replace(GPU, versions=GPU.versions | {"driver": "581"})},
        {"here": replace(GPU, versions=GPU.versions | {"torch": "2.12"})},
        {"dtype": torch.bfloat16},
        {"arch": replace(ARCH, hidden=128)},
    ],
    ids=["gpu", "driver", "torch", "dtype", "shape"],
)
def test_whatever_a_time_depends_on_is_in_the_key(told: Told, changes: dict[str, Any]):
    table = {"triton": SLOW, "twin": FAST}
    pick(NORM, contest(told, table))
    other = contest(told, table, **changes)
    pick(NORM, other)
    assert calls(other) == ALL
    again = contest(told, table)
    pick(NORM, again)
    assert calls(again) == 0, "the other entry must not replace the first"


def test_an_edited_kernel_is_timed_again(told: Told, tmp_path: Path):
    (tmp_path / "kernel.py").write_text("one")
    before = source_digest(tmp_path)
    (tmp_path / "kernel.py").write_text("two")
    assert source_digest(tmp_path) != before
    table = {"triton": SLOW, "twin": FAST}
    pick(NORM, contest(told, table))
    edited = contest(told, table)
    edited.__dict__["digest"] = "other"
    pick(NORM, edited)
    assert calls(edited) == ALL


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"\xff\xfe",
        b"[]",
        b'{"entries": {"k": {"times_us": 3}}}',
        b'{"new": 1}',
        b'{"entries": {"k": {"about": {}, "times_us": {"twin": {"8": 0.0}}}}}',
    ],
)
def test_a_corrupt_cache_is_ignored_with_a_note_and_replaced(told: Told, content: bytes):
    path = cache_folder() / FILE_NAME
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    table = {"triton": SLOW, "twin": FAST}
    assert pick(NORM, contest(told, table)).backend == "twin"
    assert any(f"{path} is not readable and is ignored" in sentence for sentence in told)
    assert len(json.loads(path.read_text())["entries"]) == 1


@pytest.mark.parametrize("spoilt", [{}, {"64": 1.0}, None], ids=["nothing", "one size", "no twin"])
def test_what_a_cache_entry_lacks_is_measured(told: Told, spoilt: dict[str, float] | None):
    table = {"triton": SLOW, "twin": FAST}
    pick(NORM, contest(told, table))
    path = cache_folder() / FILE_NAME
    content = json.loads(path.read_text())
    (entry,) = content["entries"].values()
    if spoilt is None:
        del entry["times_us"]["twin"]
    else:
        entry["times_us"]["twin"] = spoilt
    path.write_text(json.dumps(content))
    again = contest(told, table)
    assert pick(NORM, again).backend == "twin"
    assert calls(again) == len(TOKENS) - len(spoilt or {})


def test_a_cache_that_cannot_be_written_is_told(told: Told, tmp_path: Path):
    (tmp_path / "file").write_text("")
    cache = ChoiceCache(tmp_path / "file" / FILE_NAME, told)
    cache.put({"a": 1}, {"twin": {8: 1.0}}, {})
    assert any("could not be kept" in sentence for sentence in told)
    kept = cache.get({"a": 1})
    assert kept is not None
    assert kept.times_us == {"twin": {8: 1.0}}


def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TETRAD_CACHE_DIR", "/own")
    monkeypatch.setenv("XDG_CACHE_HOME", "/shared")
    assert cache_folder() == Path("/own")
    monkeypatch.delenv("TETRAD_CACHE_DIR")
    assert cache_folder() == Path("/shared/tetrad")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "tetrad"


def test_when_the_budget_is_used_up_the_preferred_one_stays(told: Told):
    running = contest(told, {"triton": SLOW, "twin": FAST}, budget_s=7.0)
    running.__dict__["deadline"] = 0.0
    chosen = pick(NORM, running)
    assert chosen.backend == "triton"
    assert "not timed, as 7 s had gone into compiling" in chosen.reason
    assert calls(running) == 0


def test_shapes_that_do_not_fit_are_told(told: Told, monkeypatch: pytest.MonkeyPatch):
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError

    running = contest(told, {"triton": SLOW, "twin": FAST})
    monkeypatch.setattr(choice_module.Contest, "_measure", full)
    chosen = pick(NORM, running)
    assert (chosen.backend, "memory is too small" in chosen.reason) == ("triton", True)


def test_experts_may_differ_by_size_where_they_share_a_layout(told: Told):
    op = op_with(OPS["experts"], "a", "b")
    table = {"a": (10.0, 20.0, 90.0, 90.0), "b": (15.0, 25.0, 50.0, 50.0)}
    chosen = pick(op, contest(told, table))
    assert chosen.backend == "a+b"
    assert chosen.regimes == (Regime("a", 181), Regime("b", None))
    assert "a up to 181 tokens, b above; a: 20.0 µs against b 25.0 µs" in chosen.reason


def test_experts_with_layouts_of_their_own_do_not_mix():
    op = op_with(OPS["experts"], "a", "b", "c")
    a, b, c = op.backends.values()
    a, b = (replace(backend, prepare=lambda weight, dtype: weight) for backend in (a, b))
    times = {"a": {8: 10.0, 512: 90.0}, "b": {8: 15.0, 512: 50.0}}
    assert winners(op, [a, b], times) == (Regime("b", None),)
    b = replace(b, prepare=a.prepare)
    times["c"] = {8: 5.0, 512: 5000.0}
    mixed = (Regime("a", 64), Regime("b", None))
    assert winners(op, [a, b, c], times) == mixed, "c is fast for 8 but has another layout"


def test_plain_torch_is_timed_only_where_it_is_the_last(told: Told):
    op = op_with(OPS["rms_norm"], "triton", "gluon", "torch")
    running = contest(told, {"triton": SLOW, "gluon": FAST})
    chosen = pick(op, running)
    assert chosen.backend == "gluon"
    assert set(chosen.times_us) == {"triton", "gluon"}
    alone = contest(told, {"torch": SLOW})
    assert pick(op, alone, gluon="no", triton="no").backend == "torch"
    failing = contest(
        told, {"triton": (-1.0,), "gluon": (-1.0,), "torch": SLOW}, dtype=torch.bfloat16
    )
    left = pick(op, failing)
    assert (left.backend, set(left.refusals)) == ("torch", {"triton", "gluon"})
    assert calls(failing) == 2 + len(TOKENS)


def test_one_that_is_clearly_slow_is_not_timed_further(told: Told):
    op = op_with(OPS["rms_norm"], "a", "b", "c")
    table = {"a": SLOW, "b": (61.0,), "c": (25.0, 61.0)}
    running = contest(told, table)
    chosen = pick(op, running)
    assert chosen.times_us == {
        "a": dict(zip(TOKENS, SLOW, strict=True)), "b": {8: 61.0}, "c": {8: 25.0, 64: 61.0}
    }  # fmt: skip
    assert calls(running) == 3 + 2 + 1 + 1
    assert chosen.reason == (
        "30.0 µs against c 61.0 µs at 64 tokens, measured; b not timed above 8 tokens, being more "
        "than 2 times as slow; c not timed above 64 tokens, being more than 2 times as slow"
    )
    again = contest(told, table)
    assert (pick(op, again).backend, calls(again)) == ("a", 0)


def test_when_the_fastest_fails_late_those_left_behind_are_timed_after_all(told: Told):
    op = op_with(OPS["rms_norm"], "a", "b")
    running = contest(told, {"a": (10.0, 10.0, -1.0), "b": (30.0, 31.0, 32.0, 33.0)})
    chosen = pick(op, running)
    assert (chosen.backend, set(chosen.refusals)) == ("b", {"a"})
    assert chosen.times_us == {"b": {8: 30.0, 64: 31.0, 512: 32.0, 2048: 33.0}}


def test_a_slow_one_may_still_win_the_sizes_it_was_timed_at():
    op = op_with(OPS["experts"], "a", "b")
    times = {"a": {8: 10.0, 64: 10.0, 512: 10.0}, "b": {8: 5.0, 64: 21.0}}
    regimes = winners(op, list(op.backends.values()), times)
    assert regimes == (Regime("b", 22), Regime("a", None))


def test_a_contest_cut_short_uses_what_it_has_and_the_next_goes_on(told: Told):
    class Clocked(FakeTimer):
        def time(self, calls: Sequence[Any], budget_s: float) -> CallTime:
            if self.num_calls == 3:
                running.__dict__["deadline"] = 0.0
            return super().time(calls, budget_s)

    table = {"triton": SLOW, "twin": FAST}
    running = contest(told, table)
    running.__dict__["timer"] = Clocked(table)
    chosen = pick(NORM, running)
    assert chosen.backend == "twin"
    assert chosen.reason.endswith(
        "; 512 and 2048 tokens not timed, as 60 s had gone into compiling and timing"
    )
    late = contest(told, table, spent_s=60.0)
    assert (pick(NORM, late).reason, calls(late)) == (
        chosen.reason.replace("measured", "remembered"), 0
    )  # fmt: skip
    second = contest(told, table)
    assert "not timed" not in pick(NORM, second).reason
    assert calls(second) == 4


def test_want_of_memory_is_not_remembered(told: Told):
    class Full(FakeTimer):
        def time(self, calls: Sequence[Any], budget_s: float) -> CallTime:
            if calls[0].func.__name__ == "triton":
                raise torch.OutOfMemoryError
            return super().time(calls, budget_s)

    table = {"triton": FAST, "twin": SLOW}
    running = contest(told, table)
    running.__dict__["timer"] = Full(table)
    assert "OutOfMemoryError" in pick(NORM, running).refusals["triton"]
    assert pick(NORM, contest(told, table)).backend == "triton"


def test_attention_may_have_another_backend_for_prompts():
    op = op_with(OPS["mla"], "a", "b")
    backends = list(op.backends.values())
    times = {"a": {8: 10.0, 64: 10.0, 512: 40.0}, "b": {8: 12.0, 64: 15.0, 512: 30.0}}
    regimes = winners(op, backends, times)
    assert regimes == (Regime("a", None, "decode"), Regime("b", None, "prefill"))
    told = reason(regimes, times, "measured")
    assert (
        told == "a for decode, b for prefill; a: 10.0 µs against b 15.0 µs at 64 tokens, measured"
    )
    alike = {"a": times["a"], "b": {8: 12.0, 64: 15.0, 512: 50.0}}
    assert winners(op, backends, alike) == (Regime("a", None),)
    begun = {"a": {8: 10.0}, "b": {8: 7.0}}
    assert winners(op, backends, begun) == (Regime("b", None),)


def test_other_ops_do_not_mix():
    times = {"triton": {8: 10.0, 512: 90.0}, "twin": {8: 15.0, 512: 50.0}}
    assert winners(NORM, list(NORM.backends.values()), times) == (Regime("twin", None),)


def test_rows_decide_which_one_runs():
    small, large = (Backend(name, lambda x, y, name=name: (name, y)) for name in ("small", "large"))
    both = by_rows([Regime("small", 22), Regime("large", None)], {"small": small, "large": large})
    assert both.name == "small+large"
    for rows, name in ((1, "small"), (22, "small"), (23, "large")):
        assert both(torch.zeros(rows), 7) == (name, 7)
        assert both(x=torch.zeros(rows), y=7) == (name, 7)


def test_resolving_for_a_model_times_what_is_left(told: Told, monkeypatch: pytest.MonkeyPatch):
    """On a device that calls itself a GPU, with real timing; the second run remembers."""
    for name, op in OPS.items():
        monkeypatch.setitem(OPS, name, replace(op, backends={"torch": op.backends["torch"]}))
    right = OPS["rope"].backends["torch"]
    both = {name: replace(right, name=name) for name in ("one", "twin")}
    monkeypatch.setitem(OPS, "rope", replace(OPS["rope"], backends=both))
    monkeypatch.setattr("tetrad.kernels.select.snapshot", lambda _device: GPU)
    first, second = (resolve_ops("cpu", arch=ARCH, tell=told) for _ in range(2))
    assert told == ["timing rope: one against twin"]
    (row,) = (row for row in second.report if row["op"] == "rope")
    assert set(row["times_us"]) == {"one", "twin"}
    assert "remembered" in row["reason"]
    assert row["backend"] == first.rope.name == second.rope.name
    (other,) = (row for row in second.report if row["op"] == "mla")
    assert (other["reason"], other["times_us"]) == ("the only one", {})
    json.dumps(second.report)


def test_on_a_cpu_nothing_is_timed(told: Told):
    ops = resolve_ops("cpu", arch=ARCH, tell=told)
    assert told == []
    assert all(not row["times_us"] for row in ops.report)
