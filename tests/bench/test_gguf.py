"""Loads for a server of a GGUF file, whose own tokenizer generates them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import gguf
import pytest

from tests.bench.mock_server import MockServer
from tests.llama import tiny_gguf
from tetrad.bench.options.serve import BenchServeConfig
from tetrad.bench.serve.run import bench_serve
from tetrad.bench.workload.template import ChatTemplate
from tetrad.bench.workload.tokens import Vocabulary
from tetrad.cli.narrator import Narrator
from tetrad.core.errors import CheckpointError, ConfigError
from tetrad.core.records import BenchRun


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf(tmp_path_factory.mktemp("bench") / "tiny.gguf", {})


async def run(url: str, **options: Any) -> BenchRun:
    base = {"base_url": url, "num_prompts": 3, "random_input_len": 9, "random_output_len": 8}
    base |= {"warmup_requests": 0, "ready_check_timeout_sec": 0, "random_range_ratio": 1.0}
    return await bench_serve(BenchServeConfig.parse(base | options), Narrator(show_bar=False))


def named(model: Path) -> list[dict[str, str]]:
    return [{"id": "tiny", "root": str(model)}]


def test_text_has_exactly_the_tokens_asked_for_and_none_of_control(file: Path):
    vocabulary = Vocabulary(file)
    text = vocabulary.draw_text(random.Random(0), 50)
    assert vocabulary.count(text) == 50
    assert vocabulary.encode("the thing") == Vocabulary(file).encode("the thing")
    assert not {0, 1, 2, 3} & set(vocabulary.ordinary_ids)


async def test_the_file_that_the_server_names_generates_prompts(file: Path):
    async with MockServer(models=named(file)).running() as url:
        result = await run(url, dataset_name="random")
    assert (result.completed, result.workload.prompt_tokens.mean) == (3, 9)


async def test_a_file_may_be_the_tokenizer(file: Path):
    async with MockServer(models=[{"id": "tiny"}]).running() as url:
        with pytest.raises(ConfigError, match="names no folder or GGUF file"):
            await run(url, dataset_name="random-ids")
        result = await run(url, dataset_name="random-ids", tokenizer=file)
    assert result.completed == 3


async def test_a_vocabulary_that_is_not_read_hinders_only_who_needs_it(tmp_path: Path):
    """Other servers serve GGUF files of other kinds."""
    other = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(other, "llama")
    writer.add_tokenizer_model("llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "What is 3+5?", "output_len": 8}\n' * 4)
    custom = {"dataset_name": "custom", "dataset_path": prompts}
    async with MockServer(models=named(other)).running() as url:
        assert (await run(url, **custom)).completed == 3
        with pytest.raises(CheckpointError, match="a vocabulary of the kind 'llama'"):
            await run(url, **custom, tokenizer=other)


def test_the_chat_template_is_the_files(file: Path):
    text = ChatTemplate(file).render([{"role": "user", "content": "in"}])
    assert text == "<|im_start|>user\nin<|im_end|>\n<|im_start|>assistant\n"
