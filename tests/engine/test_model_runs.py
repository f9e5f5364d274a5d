"""The engine with a real, tiny, random model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.fakes import NoForecast, make_request
from tests.factories import tiny_glm_folder
from tests.llama import tiny_llama_folder
from tetrad.core.config import ServeConfig
from tetrad.core.errors import CheckpointError, ConfigError, UnsupportedError
from tetrad.core.messages import EngineProgress
from tetrad.core.request import Request, RequestOutput
from tetrad.engine.engine import Engine
from tetrad.engine.load import load_engine
from tetrad.engine.runner import Runner
from tetrad.kernels.select import OpSet
from tetrad.kernels.switch import Switch, switchable
from tetrad.layers.batch import ForwardBatch
from tetrad.layers.cache import KvCache

PROMPT = [(7 * i * i + 3) % 126 + 2 for i in range(150)]


@pytest.fixture(scope="module", params=[tiny_glm_folder, tiny_llama_folder], ids=["glm", "llama"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    make: Callable[[Path], Path] = request.param
    return make(tmp_path_factory.mktemp("tiny"))


def load(folder: Path, **flags: object) -> Engine:
    """An engine whose every cache slot is NaN until it is written."""
    where = {"device": "cpu", "dtype": "float32"} | flags
    engine = load_engine(ServeConfig(model=folder, **where))  # type: ignore[arg-type]
    kv_cache(engine).poison()
    return engine


def kv_cache(engine: Engine) -> KvCache:
    assert isinstance(engine.runner, Runner)
    return engine.runner.cache


def run(engine: Engine, requests: Sequence[Request]) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {request.rid: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            outputs[output.rid].append(output)
    engine.check_integrity()
    return outputs


def tokens(outputs: list[RequestOutput]) -> list[int]:
    return [i for output in outputs for i in output.token_ids]


def generate(engine: Engine, *requests: Request) -> dict[str, list[int]]:
    return {rid: tokens(outputs) for rid, outputs in run(engine, requests).items()}


@pytest.fixture(scope="module")
def truth(folder: Path) -> list[int]:
    """Greedy tokens of an engine that does one request in one chunk."""
    engine = load(folder, disable_radix_cache=True)
    return generate(engine, make_request("a", PROMPT, 12, temperature=0.0))["a"]


def test_a_prefix_hit_gives_the_tokens_of_a_miss(folder: Path, truth: list[int]):
    engine = load(folder, max_total_tokens=640)
    for rid in ("miss", "hit"):
        outputs = run(engine, [make_request(rid, PROMPT, 12, temperature=0.0)])[rid]
        assert tokens(outputs) == truth
        assert outputs[-1].cached_tokens == (128 if rid == "hit" else 0)


@pytest.mark.parametrize("chunk", [1, 50, 64])
def test_chunks_and_neighbours_change_nothing(folder: Path, truth: list[int], chunk: int):
    engine = load(folder, chunked_prefill_size=chunk)
    a, b = (make_request(rid, PROMPT, 12, temperature=0.0) for rid in "ab")
    got = generate(engine, a, make_request("other", PROMPT[40:90], 30), b)
    assert (got["a"], got["b"]) == (truth, truth)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_preempted_request_gives_the_tokens_it_would_have_given(folder: Path, temperature: float):
    requests = [
        make_request(rid, PROMPT[i:60], 70, seed=i, temperature=temperature)
        for i, rid in enumerate("ab")
    ]
    calm = generate(load(folder), *requests)
    pressed = load(folder, max_total_tokens=256)
    pressed.scheduler.forecast = NoForecast()
    assert generate(pressed, *requests) == calm
    assert pressed.stats().preemptions_total > 0


def test_a_seed_gives_the_same_text_alone_and_in_a_crowd(folder: Path):
    engine = load(folder)
    request = make_request("a", PROMPT[:70], 30, seed=11, temperature=0.9, top_p=0.95)
    alone = generate(engine, request)["a"]
    others = [make_request(f"o{i}", PROMPT[i : 20 + i], 25, seed=None) for i in range(6)]
    assert generate(engine, *others[:3], request, *others[3:])["a"] == alone


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_no_way_of_launching_steps_changes_what_a_request_gets(folder: Path, device: str):
    requests = [
        make_request("greedy", PROMPT[:60], 70, temperature=0.0, num_logprobs=2),
        make_request("drawn", PROMPT[3:60], 70, seed=5, temperature=0.9, top_p=0.9),
        make_request("ends", PROMPT[:40], 60, seed=2, stop_token_ids=tuple(range(0, 128, 9))),
        make_request("early", PROMPT[:41], 60, seed=3, min_new_tokens=9, ignore_eos=False),
        make_request("counted", PROMPT[:20], 20, temperature=0.0, repetition_penalty=1.3),
    ]
    told = []
    ways: list[dict[str, object]] = [
        {"disable_overlap_schedule": True},
        {},
        {"num_continuous_decode_steps": 8},
        {"num_continuous_decode_steps": 8, "disable_overlap_schedule": True, "stream_interval": 3},
    ]
    for flags in ways:
        flags |= {"device": device, "dtype": "float32"}
        engine = load(folder, max_total_tokens=256, chunked_prefill_size=64, **flags)
        engine.scheduler.forecast = NoForecast()
        outputs = run(engine, requests)
        assert engine.stats().preemptions_total > 0
        told.append({rid: (tokens(each), each[-1].finish) for rid, each in outputs.items()})
    assert told[1:] == [told[0]] * 3


def test_min_new_tokens_keeps_the_end_away(folder: Path):
    engine = load(folder)
    ends = tuple(range(2, 128, 2))
    for least in (1, 9):
        request = make_request(
            "a", PROMPT, 40, seed=3, stop_token_ids=ends, min_new_tokens=least, ignore_eos=False
        )
        outputs = run(engine, [request])["a"]
        got = tokens(outputs)
        assert all(i not in ends for i in got[:least])
        assert outputs[-1].finish is not None
        assert outputs[-1].finish.reason == "stop"
        assert len(got) > least


class SpoiltModel:
    """The model, but NaN for every row whose last token is `bad_token`."""

    def __init__(self, engine: Engine, bad_token: int) -> None:
        assert isinstance(engine.runner, Runner)
        self.model = engine.runner.model
        self.bad_token = bad_token

    def __call__(self, batch: ForwardBatch, cache: KvCache) -> Tensor:
        logits = self.model(batch, cache)
        is_bad = batch.token_ids[batch.logit_rows] == self.bad_token
        return logits.masked_fill(is_bad.unsqueeze(1), torch.nan)


def test_non_finite_logits_fail_one_request_and_the_others_go_on(folder: Path, truth: list[int]):
    engine = load(folder)
    assert isinstance(engine.runner, Runner)
    engine.runner.model = SpoiltModel(engine, bad_token=127)
    assert 127 not in [*PROMPT, *truth]
    good = make_request("good", PROMPT, 12, temperature=0.0)
    bad = make_request("bad", [*PROMPT, 127], 12)
    outputs = run(engine, [good, bad])
    assert tokens(outputs["good"]) == truth
    (failed,) = outputs["bad"]
    assert failed.finish is not None
    assert failed.finish.reason == "error"
    assert engine.stats().nonfinite_total == 1


def test_what_was_resolved_is_shown(folder: Path):
    progress: list[EngineProgress] = []
    config = ServeConfig(model=folder, device="cpu", max_running_requests=3, context_length=300)
    info = load_engine(config, progress.append).info
    assert info["max_running_requests"] == 3
    assert info["max_total_tokens"] == 3 * 320
    assert info["context_length"] == 300
    assert info["cache_limited_by"] == "max_running_requests"
    assert info["memory"]["weight_bytes"] > 0
    assert "KV cache (960 tokens)" in info["memory_statement"][0]
    assert info["dtype"] in ("float32", "bfloat16")
    assert progress[0].phase == "kernels"
    assert {p.phase for p in progress} == {"kernels", "weights", "cache"}


def test_the_ops_that_are_told_are_those_that_run(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """One op more, which stands for others where the router cannot be joined with gate and up."""
    called = set()

    def noted(ops: OpSet) -> tuple[OpSet, dict[str, Switch]]:
        ops, switches = switchable(ops)

        def note(switch: Switch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            called.add(switch.op)
            return switch.backend.run(*args, **kwargs)

        for switch in switches.values():
            switch.watch = note
        return ops, switches

    monkeypatch.setattr("tetrad.engine.load.switchable", noted)
    engine = load(folder)
    run(engine, [make_request("short", PROMPT[:3], 3), make_request("long", PROMPT, 3)])
    told = {row["op"] for row in engine.info["backends"]}
    assert told - called <= {"route"}
    assert called <= told


@pytest.mark.parametrize(
    ("flags", "error", "sentence"),
    [
        ({"tp": 2}, UnsupportedError, "--tp 2"),
        ({"model": None}, ConfigError, "No model folder"),
        ({"model": Path("/nonexistent")}, CheckpointError, "holds no config.json"),
        ({"attention_backend": "gluon"}, UnsupportedError, "--attention-backend gluon: "),
        ({"context_length": 9999}, ConfigError, "--context-length 9999"),
        ({"mem_fraction_static": 1e-7}, ConfigError, "--mem-fraction-static 1e-07"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(
    folder: Path, flags: dict[str, object], error: type[Exception], sentence: str
):
    config = ServeConfig(**{"model": folder, "device": "cpu", **flags})  # type: ignore[arg-type]
    with pytest.raises(error, match=sentence):
        load_engine(config)


@pytest.mark.gpu
def test_the_gpu_gives_the_tokens_of_the_cpu(folder: Path, truth: list[int]):
    engine = load_engine(ServeConfig(model=folder, device="cuda", dtype="float32"))
    kv_cache(engine).poison()
    request = make_request("a", PROMPT, 12, temperature=0.0)
    assert generate(engine, request)["a"] == truth
