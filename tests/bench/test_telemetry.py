"""The sampler: a process beside the load, its figures on the run's time, its cost told."""

from __future__ import annotations

import asyncio
import csv
import io
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.bench.mock_server import MockServer
from tests.bench.test_block import run
from tetrad.bench.options.serve import BenchServeConfig
from tetrad.bench.report.block import remarks
from tetrad.bench.report.charts import Axis
from tetrad.bench.report.html import page
from tetrad.bench.report.outputs import table
from tetrad.bench.report.plots import overview
from tetrad.bench.report.telemetry import GPU_HEADINGS, gpu_row, lines, telemetry_charts
from tetrad.bench.serve.run import bench_serve
from tetrad.bench.sweep.run import alone
from tetrad.bench.telemetry.gpus import FIELDS, Gpus
from tetrad.bench.telemetry.process import Watch, find_gpus, is_this_machine, watch
from tetrad.bench.telemetry.run import MOST_SAMPLES, Seen, sampling, telemetry
from tetrad.cli.narrator import Narrator
from tetrad.core.errors import ConfigError
from tetrad.core.records import BenchRun
from tetrad.core.sweep_records import Place
from tetrad.core.telemetry_records import Telemetry

FAKE = str(Path(__file__).with_name("fake_nvml"))
METRICS = """# TYPE tetrad_running_requests gauge
tetrad_running_requests 3.0
tetrad_waiting_requests 1.0
tetrad_cache_usage_ratio 0.25
tetrad_preemptions_total 2.0
tetrad_prompt_tokens_total 10BODIES.0
tetrad_generated_tokens_total 1BODIES.0
tetrad_cached_tokens_total 0.0
"""
"""BODIES becomes the number of requests so far, one digit: generated 10, 11, ..."""


@pytest.fixture
def fake_gpus(monkeypatch):
    known = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{FAKE}{os.pathsep}{known}" if known else FAKE)


def config(url: str, **changes) -> BenchServeConfig:
    values = {"base_url": url, "warmup_requests": 0, "telemetry_period_sec": 0.05, **changes}
    return BenchServeConfig.parse(values)


async def measured(server: MockServer, tmp_path: Path, **changes) -> BenchRun:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "What is 3+5?", "output_len": 8}\n' * 4)
    async with server.running() as url:
        asked = config(url, dataset_name="custom", dataset_path=path, **changes)
        return await bench_serve(asked, Narrator())


async def test_gpus_and_server_are_sampled_beside_a_run(fake_gpus, tmp_path):
    one = await measured(MockServer(metrics=METRICS), tmp_path, request_rate=4.0)
    seen = one.telemetry
    assert seen is not None
    assert seen.why_no_gpus == seen.why_no_server == ""
    first, second = seen.gpus
    assert (first.index, first.name, first.uuid) == (1, "NVIDIA Fake", "GPU-1")
    assert first.energy_source == "counter"
    assert second.energy_source == "power"
    assert first.energy_j == pytest.approx(300 * one.duration_s, rel=0.3)
    assert second.energy_j == pytest.approx(100 * one.duration_s, rel=1e-6)
    assert seen.mean_power_w == pytest.approx(400, rel=0.3)
    assert seen.energy_per_token_j == pytest.approx(400 * one.duration_s / 32, rel=0.3)
    assert first.throttle == {"software power cap": 1.0}
    assert second.throttle == {}
    assert len(seen.gpu_times_s) == len(first.power_w) == len(first.throttle_bits) > 1
    assert all(0 <= at <= one.duration_s for at in seen.gpu_times_s)
    server = seen.server
    assert server is not None
    assert (server.source, server.dialect) == ("/metrics", "tetrad")
    assert set(server.running) == {3.0}
    assert set(server.cache_usage) == {0.25}
    assert server.prompt_tokens == server.generated_tokens == 4, "after the run less before it"
    assert server.retractions == 0
    assert server.cache_hit_share == 0.0
    assert seen.cost is not None
    assert seen.cost.cpu_s > 0
    assert seen.cost.server_reads > 2
    assert seen.cost.failed_server_reads == 0
    assert BenchRun.model_validate_json(one.model_dump_json()) == one


async def test_a_server_that_tells_nothing_is_named(tmp_path):
    one = await measured(MockServer(), tmp_path)
    assert one.telemetry is not None
    assert one.telemetry.server is None
    assert "/metrics answers HTTP 404 and /server_info answers HTTP 404" in (
        one.telemetry.why_no_server
    )
    assert any("SGLang wants --enable-metrics" in line for line in remarks(one))


async def test_nothing_is_sampled_when_it_is_disabled(tmp_path):
    assert (await measured(MockServer(), tmp_path, disable_telemetry=True)).telemetry is None


async def test_gpus_that_are_not_there_are_refused_in_the_record(fake_gpus, tmp_path):
    one = await measured(MockServer(), tmp_path, telemetry_gpus=(7,))
    assert one.telemetry is not None
    assert one.telemetry.why_no_gpus == "there is no GPU 7; the driver sees 3"


async def test_a_machine_without_a_driver_is_named(fake_gpus, tmp_path, monkeypatch):
    monkeypatch.setenv("TETRAD_FAKE_NVML", "broken")
    one = await measured(MockServer(), tmp_path)
    assert one.telemetry is not None
    assert one.telemetry.why_no_gpus == "no NVIDIA driver answers (Driver Not Loaded)"


async def test_a_sampler_that_dies_spoils_no_run():
    async with MockServer(metrics=METRICS).running() as url, sampling(config(url), {}) as sampler:
        assert sampler is not None
        os.kill(sampler._process.pid, signal.SIGKILL)
        seen = await sampler.seen()
    found = telemetry(seen, origin=0.0, duration_s=1.0, output_tokens=1, period_s=0.5)
    assert found is not None
    assert found.why_no_server == "the sampler ended early"


async def test_an_interrupt_is_not_for_the_sampler():
    async with MockServer(metrics=METRICS).running() as url, sampling(config(url), {}) as sampler:
        assert sampler is not None
        os.kill(sampler._process.pid, signal.SIGINT)
        await asyncio.sleep(0.2)
        assert (await sampler.seen()).samples is not None


def test_gpus_of_another_machine_are_sampled_only_when_asked():
    # An address of the range for documentation, which is nobody's; nothing is sent.
    job = {"url": "http://192.0.2.1:9", "gpus": (), "telemetry": False}
    assert "another machine" in find_gpus(job)[1]
    assert "another machine" not in find_gpus({**job, "telemetry": True})[1]


def test_with_nothing_to_watch_the_sampler_ends_at_once():
    said: list[dict[str, Any]] = []
    job = {"url": "http://127.0.0.1:9", "headers": {}, "period_s": 0.5, "gpus": [7]}
    watch({**job, "telemetry": False}, said.append, lambda: pytest.fail("it waits"))
    assert len(said) == 1
    assert "does not answer" in said[0]["why_no_server"]


def test_this_machine_is_known_by_its_addresses():
    assert is_this_machine("http://127.0.0.1:30000")
    assert is_this_machine("http://localhost:30000")
    assert is_this_machine("http://[::1]:30000")
    assert not is_this_machine("http://192.0.2.1:30000")


def test_a_name_that_leads_nowhere_is_not_this_machine(monkeypatch):
    def unknown(*_arguments, **_options):
        raise OSError("Name or service not known")

    monkeypatch.setattr("socket.getaddrinfo", unknown)
    assert not is_this_machine("http://no-such-host:30000")


def test_a_slow_look_is_followed_by_a_long_pause():
    watched = Watch(lambda: None, 0.5)
    assert watched._pause_s(0.0) == 0.5
    assert watched._pause_s(0.02) == pytest.approx(1.0)
    assert watched._pause_s(3.0) == 5.0


def reading(power=100.0, energy=None, bits=0):
    return [power, energy, 1500, 3201, 0.9, 0.4, 70 * 2.0**30, 60, bits]


def seen_of(samples, server=()) -> Telemetry:
    facts = {
        "index": 0,
        "name": "Fake",
        "uuid": "u",
        "power_limit_w": 700.0,
        "max_sm_mhz": 1980,
        "memory_total_bytes": 140 * 2.0**30,
    }
    route, dialect = ("/metrics", "vllm") if server else ("", "")
    found = {"gpus": [facts], "why_no_gpus": "", "route": route, "dialect": dialect}
    seen = {
        "gpus": {"samples": [(at, [each]) for at, each in samples], "took_s": [0.001]},
        "server": {"samples": list(server), "took_s": [0.002] * len(server)},
        "cpu_s": 0.1,
        "span_s": 10.0,
    }
    found = {**found, "why_no_server": "" if server else "silent"}
    result = telemetry(
        Seen(found, seen), origin=100.0, duration_s=10.0, output_tokens=50, period_s=0.5
    )
    assert result is not None
    return result


def test_energy_is_that_between_start_and_end():
    """Counters are read on the line between samples, not at the samples before and after."""
    samples = [(98.0, reading(energy=0.0)), (102.0, reading(energy=400.0))]
    samples += [(108.0, reading(energy=1000.0)), (112.0, reading(energy=1800.0))]
    seen = seen_of(samples)
    assert seen.energy_j == pytest.approx(1400.0 - 200.0)
    assert seen.energy_per_token_j == pytest.approx(1200.0 / 50)
    assert seen.gpu_times_s == [2.0, 8.0]


def test_power_is_integrated_where_no_counter_is():
    samples = [(99.0, reading(100.0)), (105.0, reading(100.0)), (110.0, reading(300.0))]
    assert seen_of(samples).energy_j == pytest.approx(5 * 100 + 5 * 200)


def test_long_runs_are_thinned_and_keep_every_reason():
    samples = [(100 + n / 100, reading(power=n, bits=0x40 if n == 500 else 0)) for n in range(1000)]
    seen = seen_of(samples)
    gpu = seen.gpus[0]
    assert len(gpu.power_w) == len(seen.gpu_times_s) <= MOST_SAMPLES
    assert sum(bits == 0x40 for bits in gpu.throttle_bits) == 1
    assert gpu.throttle == {"hardware thermal slowdown": pytest.approx(1 / 1000)}
    assert gpu.power_w[0] == pytest.approx(2.0)


def test_totals_are_differences_and_vllm_hits_are_of_look_ups():
    before = {"cached_tokens": 10.0, "looked_up_tokens": 100.0, "prompt_tokens": 90.0}
    after = {"cached_tokens": 60.0, "looked_up_tokens": 300.0, "prompt_tokens": 190.0}
    server = [(99.0, before), (105.0, {"running": 4.0}), (111.0, {**after, "retractions": 1.0})]
    seen = seen_of([(99.0, reading()), (111.0, reading())], server)
    assert seen.server is not None
    assert seen.server.cache_hit_share == pytest.approx(50 / 200)
    assert seen.server.retractions == 1
    assert seen.server.generated_tokens is None
    assert seen.server.running == [4.0]


def test_a_rate_is_made_of_a_counter_where_the_server_has_no_gauge():
    figures = [{"generated_tokens": 10.0 * n} for n in (0, 1, 4)]
    seen = seen_of([(99.0, reading())], [(101.0 + 2 * n, each) for n, each in enumerate(figures)])
    assert seen.server is not None
    assert seen.server.tokens_per_s == [None, 5.0, 15.0]
    gauge = [(101.0, {"tokens_per_s": 7.0, "generated_tokens": 0.0})]
    gauge.append((103.0, {"tokens_per_s": 8.0, "generated_tokens": 100.0}))
    seen = seen_of([(99.0, reading())], gauge)
    assert seen.server is not None
    assert seen.server.tokens_per_s == [7.0, 8.0]


def test_llamacpps_prompt_tokens_are_computed_and_cached_ones():
    before = {"cached_tokens": 0.0, "computed_tokens": 100.0}
    after = {"cached_tokens": 40.0, "computed_tokens": 260.0}
    seen = seen_of([(99.0, reading())], [(99.0, before), (111.0, after)])
    assert seen.server is not None
    assert seen.server.prompt_tokens == 200
    assert seen.server.cache_hit_share == pytest.approx(0.2)


def test_a_counter_that_fell_is_no_total():
    server = [(99.0, {"prompt_tokens": 10.0}), (111.0, {"prompt_tokens": 5.0})]
    seen = seen_of([(99.0, reading())], server)
    assert seen.server is not None
    assert seen.server.prompt_tokens is None


def test_lines_name_every_gpu_the_server_and_the_cost():
    server = [(99.0, {"generated_tokens": 0.0}), (105.0, {"running": 4.0, "queued": 7.0})]
    server.append((111.0, {"generated_tokens": 80.0, "retractions": 0.0}))
    seen = seen_of([(99.0, reading()), (105.0, reading(bits=4)), (111.0, reading())], server)
    told = "\n".join(lines(seen, 50))
    assert "running 4 (most 4), queued 7 (most 7), 0 retractions" in told
    assert "the server generated 80 tokens where 50 arrived here" in told
    assert "GPU 0 Fake: 100 of 700 W, SM 1,500 of 1,980 MHz, busy 90.0%" in told
    assert "lower clocks: software power cap 100% of the time" in told
    assert "energy 1,000 J, 100 W, 20 J for each output token" in told
    assert "1.0% of a core: 1 looks at GPUs of 1.0 ms, 3 at the server of 2.0 ms" in told
    assert "generated" not in "\n".join(lines(seen, 80)).replace("generated_", "")


def test_a_server_that_fell_silent_is_not_said_to_have_other_clients():
    """It died midway: its last count is of then, while tokens under way still arrived."""
    server = [(99.0, {"generated_tokens": 0.0}), (107.5, {"generated_tokens": 20.0})]
    told = "\n".join(lines(seen_of([(99.0, reading()), (111.0, reading())], server), 50))
    assert "other clients" not in told
    assert "told nothing in the last 2.5 s of the run, as one does that has ended" in told


def test_the_report_has_a_row_for_each_gpu_and_charts_on_the_runs_time():
    samples = [(100 + n, reading(power=100.0 + n)) for n in range(11)]
    seen = seen_of(samples, [(100.0 + n, {"running": 1.0 * n}) for n in range(11)])
    text = page(alone([run(telemetry=seen)], 0), "c", {})
    assert all(f"<th>{heading}</th>" in text for heading in GPU_HEADINGS)
    assert all(f"<td>{cell}</td>" in text for cell in gpu_row(seen.gpus[0]))
    assert text.count("<svg") == 5
    charts = list(telemetry_charts(seen, Axis.of("s", 0.0, 10.0)))
    assert charts[0].curves[0].points == [(float(n), float(n)) for n in range(11)]


def test_a_sweep_shows_energy_over_what_it_varies():
    seen = seen_of([(100.0, reading()), (110.0, reading())])
    points = [
        alone([run(telemetry=seen)], 0)[0].model_copy(update={"place": Place(concurrency=count)})
        for count in (1, 2)
    ]
    titles = [chart.title for chart in overview(points)]
    assert titles[-1] == "energy for each output token against concurrency"
    assert list(overview(points))[-1].curves[0].points == [(0, 20.0), (1, 20.0)]
    rows = list(csv.DictReader(io.StringIO(table(points))))
    assert [row["energy_per_token_j"] for row in rows] == ["20.0", "20.0"]


def test_many_gpus_are_drawn_as_their_mean_least_and_most():
    seen = seen_of([(100.0, reading()), (110.0, reading())])
    gpus = [seen.gpus[0].model_copy(update={"index": n, "power_w": [n, n]}) for n in range(8)]
    charts = telemetry_charts(seen.model_copy(update={"gpus": gpus}), Axis.of("s", 0.0, 10.0))
    names = {curve.name: curve.points[0][1] for curve in next(charts).curves}
    assert names == {"mean of 8": 3.5, "least": 0, "most": 7}


def test_flags_that_contradict_are_refused():
    with pytest.raises(ConfigError, match="samples nothing"):
        config("http://x", disable_telemetry=True, telemetry=True)
    with pytest.raises(ConfigError, match="from 0"):
        config("http://x", telemetry_gpus=(-1,))


@pytest.mark.gpu
def test_this_machines_driver_tells_what_is_sampled():
    """All but what a container may hide, on the first GPU; energy agrees with power."""
    gpus = Gpus([0])
    if gpus.why_none:
        pytest.skip(gpus.why_none)
    assert gpus.facts[0]["name"]
    assert gpus.facts[0]["power_limit_w"] > 0
    samples: list[tuple[float, dict[str, Any]]] = []
    for _ in range(20):
        samples.append((time.perf_counter(), dict(zip(FIELDS, gpus.read()[0], strict=True))))
        time.sleep(0.1)
    assert all(0 < sample["power_w"] < 2000 for _, sample in samples)
    assert all(0 < sample["sm_mhz"] <= gpus.facts[0]["max_sm_mhz"] for _, sample in samples)
    assert all(0 <= sample["busy"] <= 1 for _, sample in samples)
    assert all(sample["memory_used_bytes"] > 0 for _, sample in samples)
    (begun_s, first), (ended_s, last) = samples[0], samples[-1]
    mean_w = sum(sample["power_w"] for _, sample in samples) / len(samples)
    counted_w = (last["energy_j"] - first["energy_j"]) / (ended_s - begun_s)
    assert counted_w == pytest.approx(mean_w, rel=0.3)
