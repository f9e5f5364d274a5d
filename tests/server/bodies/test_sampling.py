"""Which values hold where a request says nothing of sampling."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.llama import add_vocabulary, tiny_gguf
from tests.server.conftest import MakeService
from tetrad.core.config import ServeConfig
from tetrad.core.errors import CheckpointError
from tetrad.server.bodies.fields import SamplingFields
from tetrad.server.bodies.sampling import AnswerLimits, SamplingDefaults, sampling_params
from tetrad.server.model import ServedModel
from tetrad.server.process.console import Console

LIMITS = AnswerLimits(max_new_tokens=1, min_new_tokens=0, num_logprobs=None, seed=None)


def gguf_file(path: Path, monkeypatch: pytest.MonkeyPatch, **values: Any) -> Path:
    """A file with `general.sampling` values."""

    def add(writer: Any) -> None:
        add_vocabulary(writer)
        for name, value in values.items():
            add_value = writer.add_uint32 if isinstance(value, int) else writer.add_float32
            add_value(f"general.sampling.{name}", value)

    monkeypatch.setattr("tests.llama.add_vocabulary", add)
    return tiny_gguf(path, {})


def test_a_gguf_file_without_values_has_llama_cpp_s(tmp_path: Path):
    file = tiny_gguf(tmp_path / "tiny.gguf", {})
    model = ServedModel.load(ServeConfig(model=file))
    params = sampling_params(SamplingFields(), model.defaults, LIMITS)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.8, 0.95, 40, 0.05)
    asked = sampling_params(SamplingFields(temperature=0.0, top_k=-1), model.defaults, LIMITS)
    assert (asked.temperature, asked.top_k) == (0.0, 0)
    assert SamplingDefaults.of("openai", file) == SamplingDefaults()


def test_a_gguf_file_s_own_values_go_before(tmp_path: Path, monkeypatch):
    own = {"temp": 0.6, "top_p": 0.9, "penalty_repeat": 1.1}
    file = gguf_file(tmp_path / "tiny.gguf", monkeypatch, **own)
    defaults = SamplingDefaults.of("model", file)
    assert (defaults.temperature, defaults.top_p, defaults.repetition_penalty) == (0.6, 0.9, 1.1)
    assert (defaults.top_k, defaults.min_p, defaults.origin) == (40, 0.05, "the file's")


def test_values_that_cannot_be_are_one_sentence(tmp_path: Path, monkeypatch):
    file = gguf_file(tmp_path / "tiny.gguf", monkeypatch, top_p=1.5)
    with pytest.raises(
        CheckpointError, match=r"general\.sampling: top_p: .* less than or equal to"
    ):
        SamplingDefaults.of("model", file)


def test_the_packaged_model_has_its_card_s(tmp_path: Path, monkeypatch):
    file = tiny_gguf(tmp_path / "tiny.gguf", {})
    monkeypatch.setattr("tetrad.server.bodies.sampling.packaged_model", {"smollm2": file}.get)
    defaults = SamplingDefaults.of("model", file)
    assert (defaults.temperature, defaults.top_p, defaults.top_k) == (0.2, 0.9, 0)
    assert defaults.told == (
        "temperature 0.2, top_p 0.9 (its model card's) where a request says nothing"
    )


def test_a_folder_without_values_has_openai_s_and_one_with_some_has_them(tmp_path: Path):
    assert SamplingDefaults.of("model", tmp_path) == SamplingDefaults()
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.7, "top_k": 20}')
    defaults = SamplingDefaults.of("model", tmp_path)
    assert (defaults.temperature, defaults.top_k, defaults.top_p) == (0.7, 20, 1.0)
    assert defaults.told.startswith("temperature 0.7, top_k 20 (generation_config.json) where")


def test_the_banner_tells_what_is_not_openai_s(make_service: MakeService, model: ServedModel):
    service, stream = make_service(), io.StringIO()
    service.model = replace(model, defaults=SamplingDefaults())
    Console(stream).ready(service, "http://here")
    assert "sampling" not in stream.getvalue()
    service.model = replace(model, defaults=SamplingDefaults(temperature=0.2, origin="a test's"))
    Console(stream).ready(service, "http://here")
    assert "\n  sampling temperature 0.2 (a test's) where a request says" in stream.getvalue()
