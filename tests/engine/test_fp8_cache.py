"""An engine whose cache holds FP8 keys: reuse, preemption, poison, sizes, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.fakes import NoForecast, make_request
from tests.engine.test_model_runs import PROMPT, generate, kv_cache, load, run, tokens
from tests.factories import tiny_glm_folder
from tetrad.core.config import ServeConfig
from tetrad.core.errors import ConfigError
from tetrad.core.step import PAGE_TOKENS
from tetrad.engine.engine import Engine
from tetrad.engine.load import load_engine

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_glm_folder(tmp_path_factory.mktemp("tiny"))


def fp8(folder: Path, device: str, **flags: object) -> Engine:
    """Every byte of the cache is that of a NaN until it is written."""
    return load(folder, device=device, dtype="float32", kv_cache_dtype="fp8_e4m3", **flags)


@pytest.mark.parametrize("device", DEVICES)
def test_a_prefix_hit_gives_the_tokens_of_a_miss(folder: Path, device: str):
    engine = fp8(folder, device, max_total_tokens=640)
    told = []
    for rid in ("miss", "hit"):
        outputs = run(engine, [make_request(rid, PROMPT, 12, temperature=0.0)])[rid]
        told.append(tokens(outputs))
        assert outputs[-1].cached_tokens == (128 if rid == "hit" else 0)
    assert told[0] == told[1]
    assert len(told[0]) == 12


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chunk", [1, 50, 64])
def test_chunks_and_neighbours_change_nothing(folder: Path, chunk: int, device: str):
    request = make_request("a", PROMPT, 12, temperature=0.0)
    truth = generate(fp8(folder, device, disable_radix_cache=True), request)["a"]
    engine = fp8(folder, device, chunked_prefill_size=chunk)
    assert generate(engine, request, make_request("other", PROMPT[40:90], 30))["a"] == truth


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_preempted_request_gives_the_tokens_it_would_have_given(
    folder: Path, temperature: float, device: str
):
    requests = [
        make_request(rid, PROMPT[i:60], 70, seed=i, temperature=temperature)
        for i, rid in enumerate("ab")
    ]
    calm = generate(fp8(folder, device), *requests)
    pressed = fp8(folder, device, max_total_tokens=256)
    pressed.scheduler.forecast = NoForecast()
    assert generate(pressed, *requests) == calm
    assert pressed.stats().preemptions_total > 0


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [True, False])
def test_recorded_steps_of_bf16_are_finite(folder: Path, graphs: bool):
    """Poison is what padding reads where it reads at all."""
    engine = load(
        folder, device="cuda", kv_cache_dtype="fp8_e4m3", disable_cuda_graph=not graphs,
        max_total_tokens=1024,
    )  # fmt: skip
    requests = [make_request(rid, PROMPT[i:100], 60, temperature=0.0) for i, rid in enumerate("ab")]
    outputs = run(engine, requests)
    assert all(len(tokens(each)) == 60 for each in outputs.values())


def test_the_cache_takes_what_its_pages_say(folder: Path):
    sizes = {}
    for name in ("auto", "fp8_e4m3"):
        engine = load(folder, kv_cache_dtype=name, max_total_tokens=640)
        cache, info = kv_cache(engine), engine.info
        pools = [*cache.latent, *cache.index_keys.values()]
        held = sum(pool.nbytes for pool in pools)
        assert held == info["memory"]["page_bytes"] * (640 // PAGE_TOKENS + 1)
        sizes[info["kv_cache_dtype"]] = info["memory"]["page_bytes"]
    per_token = 4 * (32 + 4 + 2 * 8) + 3 * (16 + 4)
    assert sizes["fp8_e4m3"] == PAGE_TOKENS * per_token
    assert sizes["float32"] == PAGE_TOKENS * 4 * (4 * 40 + 3 * 16)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("fp8_e5m2", r"--kv-cache-dtype fp8_e5m2: it rounds .* fp8_e4m3 works\.$"),
        ("fp9", r"--kv-cache-dtype fp9: expected one of auto, bfloat16, fp8_e4m3"),
    ],
)
def test_unknown_types_are_refused(name: str, sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        ServeConfig.parse({"kv_cache_dtype": name})


def test_types_go_by_the_names_of_sglang_and_vllm():
    for name, ours in (("bf16", "bfloat16"), ("fp8", "fp8_e4m3"), ("fp8_e4m3", "fp8_e4m3")):
        assert ServeConfig.parse({"kv_cache_dtype": name}).kv_cache_dtype == ours


def test_bfloat16_keys_beside_other_activations_are_refused(folder: Path):
    config = ServeConfig(model=folder, device="cpu", kv_cache_dtype="bfloat16")
    with pytest.raises(ConfigError, match="keys are float32 as activations are, or FP8; --dtype"):
        load_engine(config)
    engine = load(folder, kv_cache_dtype="bf16", dtype="bfloat16", max_total_tokens=640)
    assert engine.info["kv_cache_dtype"] == "bfloat16"
