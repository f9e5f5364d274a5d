"""Choosing backends: order of preference, refusals, forced choices, and a canary that can die."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from tetrad.core.config import ServeConfig
from tetrad.core.errors import ConfigError, UnsupportedError
from tetrad.core.keys import FP8
from tetrad.kernels import contract as contract_module
from tetrad.kernels.backend import Backend, Op, Rounding
from tetrad.kernels.canary import canary
from tetrad.kernels.device import snapshot
from tetrad.kernels.registry import OPS
from tetrad.kernels.select import FLAG_OPS, OpSet, backend_names, choose, resolve_ops

CPU = torch.device("cpu")
HERE = snapshot("cpu")


def test_flags_that_force_a_backend_exist():
    assert set(FLAG_OPS) <= set(ServeConfig.model_fields)
    assert {slot.partition(".")[0] for slot in FLAG_OPS.values()} <= set(OPS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_resolving_on_a_cpu(dtype: torch.dtype):
    ops = resolve_ops("cpu", {"experts": "torch", "mla": "auto"}, dtype)
    rows = {row["op"]: row for row in ops.report}
    assert list(rows) == [f.name for f in fields(OpSet) if f.name != "choices"]
    norms = dict.fromkeys(("rms_norm", "add_rms_norm"), "layer_norm")
    fast = {"linear": "onednn", "gqa": "sdpa", "sample": "candidates", **norms}
    fast |= {"finite_rows": "total"}
    assert all(row["backend"] in ("torch", fast.get(op)) for op, row in rows.items())
    assert rows["experts"]["reason"] == "asked for"
    assert rows["mla"] == {
        "op": "mla", "backend": "torch", "reason": "the first that can run here",
        "refusals": dict.fromkeys(
            ("gluon", "triton", "flashinfer_sparse_mla"),
            "needs an NVIDIA GPU; on a CPU use 'torch'",
        ),
        "times_us": {}, "regimes": (),
        "remarks": {
            "flashinfer_sparse_mla": "not run on hardware; rounds queries and softmax weights to "
            "e4m3 where keys are FP8"
        },
    }  # fmt: skip
    assert "not run on hardware" in rows["experts"]["remarks"]["flashinfer_trtllm"]
    assert ops.rope is OPS["rope"].backends["torch"]


def attention_on_the_cpu(monkeypatch: pytest.MonkeyPatch, *names: str) -> list[str]:
    """Backends of attention that run here; who ran is noted."""
    ran: list[str] = []

    def named(name: str) -> Backend:
        def run(queries, pool, ragged, selected, scale, latent_rank):
            ran.append(name)
            return (
                OPS["mla"]
                .backends["torch"]
                .run(queries, pool, ragged, selected, scale, latent_rank)
            )

        return Backend(name, run)

    op = replace(OPS["mla"], backends={name: named(name) for name in names})
    monkeypatch.setattr("tetrad.kernels.select.OPS", {**OPS, "mla": op})
    return ran


def test_decodes_and_prompts_may_have_backends_of_their_own(monkeypatch: pytest.MonkeyPatch):
    """Which runs, the host decides by the step's shape; the device is not asked."""
    ran = attention_on_the_cpu(monkeypatch, "a", "b")
    ops = resolve_ops("cpu", {"mla": "a", "mla.prefill": "b"})
    names = backend_names(ops)
    assert ops.mla.name == names["attention_backend"] == "a+b"
    assert names["decode_attention_backend"] == "a"
    assert names["prefill_attention_backend"] == "b"
    (choice,) = (choice for choice in ops.choices if choice.op == "mla")
    assert choice.reason == "decode: asked for; prefill: asked for"
    cases = {each.name: each for each in OPS["mla"].contract.cases}
    ran.clear()
    for name in ("decode", "prompt", "mixed step"):
        ops.mla(**OPS["mla"].check.inputs(cases[name], torch.float32, CPU))
    assert ran == ["a", "b", "b"]


def test_one_backend_for_both_phases_is_one(monkeypatch: pytest.MonkeyPatch):
    attention_on_the_cpu(monkeypatch, "a", "b")
    ops = resolve_ops("cpu", {"mla": "a", "mla.decode": "b", "mla.prefill": "b"})
    assert ops.mla.name == "b"
    assert set(backend_names(ops).values()) == {"b", "torch"}
    open_one = resolve_ops("cpu", {"mla.decode": "b"})
    assert open_one.mla.name == "b+a"


def test_a_backend_of_one_phase_is_refused_by_its_flag():
    with pytest.raises(UnsupportedError, match=r"--decode-attention-backend gluon: .*'torch' or"):
        resolve_ops("cpu", {"mla.decode": "gluon"})
    with pytest.raises(UnsupportedError, match=r"--prefill-attention-backend trtion: .*'triton'"):
        resolve_ops("cpu", {"mla.prefill": "trtion"})
    with pytest.raises(UnsupportedError, match=r"no op 'experts\.decode'"):
        resolve_ops("cpu", {"experts.decode": "torch"})


@pytest.mark.parametrize(
    ("flag", "value", "ours"),
    [
        ("attention_backend", "nsa", "auto"),
        ("prefill_attention_backend", "triton_sparse_mla", "triton"),
        ("decode_attention_backend", "torch_native", "torch"),
    ],
)
def test_names_of_sglang_stand_for_ours(flag: str, value: str, ours: str):
    assert getattr(ServeConfig.parse({flag: value}), flag) == ours


@pytest.mark.parametrize("value", ["fa3", "trtllm", "flashmla_kv"])
def test_backends_of_sglang_that_are_missing_are_refused(value: str):
    sentence = rf"--decode-attention-backend {value}: in SGLang this is .*; auto takes the fastest"
    with pytest.raises(ConfigError, match=sentence):
        ServeConfig.parse({"decode_attention_backend": value})


def test_an_unknown_op_or_backend_names_the_nearest():
    with pytest.raises(UnsupportedError, match=r"no op 'expert'\. Did you mean 'experts'"):
        resolve_ops("cpu", {"expert": "torch"})
    with pytest.raises(
        UnsupportedError,
        match=r"--moe-runner-backend troch: .*no backend 'troch'; it has .*'torch', or 'auto'.*'to",
    ):
        resolve_ops("cpu", {"experts": "troch"})


def op_with(*names: str) -> Op:
    backends = {name: replace(OPS["rope"].backends["torch"], name=name) for name in names}
    return replace(OPS["rope"], backends=backends)


def refuse(**sentences: str) -> Callable[[Op, Backend], str | None]:
    return lambda _op, backend: sentences.get(backend.name)


def test_the_first_that_does_not_refuse_is_chosen_and_refusals_are_kept():
    choice = choose(op_with("a", "b", "c"), "auto", HERE, refuse(a="needs four legs"))
    assert choice.backend == "b"
    assert choice.refusals == {"a": "needs four legs"}
    assert choice.reason == "the first that can run here"
    assert choose(op_with("a", "b"), "auto", HERE, refuse()).reason == "the first choice"


def test_a_forced_backend_that_refuses_says_why_and_what_would_work():
    """Only what runs here is offered."""
    with pytest.raises(UnsupportedError, match=r"rope.*a: needs four legs\. 'b' or 'auto' would"):
        choose(op_with("a", "b", "c"), "a", HERE, refuse(a="needs four legs.", c="too new"))


def rounding_op() -> Op:
    """Its backend "b" rounds on the way."""
    op = op_with("a", "b", "c")
    rounds = Rounding("cuts corners", op.check.expected, {"float32": 0.0}, deviation=0.0)
    rounded = replace(op.backends["b"], name="b", rounding=rounds)
    return replace(op, backends={**op.backends, "b": rounded})


def test_auto_leaves_alone_what_rounds_on_the_way():
    """It is not even tried out: that may compile for minutes."""
    choice = choose(rounding_op(), "auto", HERE, refuse(a="needs four legs", b="was tried"))
    assert choice.backend == "c"
    assert choice.refusals["b"].startswith("cuts corners, so it has to be asked for")
    assert choose(rounding_op(), "b", HERE, refuse()).backend == "b"
    with pytest.raises(UnsupportedError, match=r"a: needs four legs\. 'c' or 'auto' would work"):
        choose(rounding_op(), "a", HERE, refuse(a="needs four legs"))


def test_the_flag_that_asks_for_it_is_named():
    """Every experts backend of four-bit activations can run on this pretended GPU."""
    op = OPS["experts"]
    rounds = {name: each for name, each in op.backends.items() if each.rounding is not None}
    able = {name: replace(each, why_not=lambda _device: None) for name, each in rounds.items()}
    backends = {**able, "torch": op.backends["torch"]}
    choice = choose(replace(op, backends=backends), "auto", HERE, refuse())
    assert rounds
    for name in rounds:
        assert f"asked for: --moe-runner-backend {name}" in choice.refusals[name]


def test_what_rounds_is_checked_against_the_same_rounding():
    op = rounding_op()
    assert canary(op, op.backends["b"], torch.float32, CPU) is not None
    wide = Rounding("cuts corners", op.check.expected, {"float32": 1e-5}, deviation=0.0)
    assert canary(op, replace(op.backends["b"], rounding=wide), torch.float32, CPU) is None
    elsewhere = replace(wide, expected=lambda inputs: (op.check.expected(inputs)[0] + 1,))
    backend = replace(op.backends["b"], rounding=elsewhere)
    assert "wrong numbers" in str(canary(op, backend, torch.float32, CPU))


def test_when_all_refuse_all_reasons_are_told():
    with pytest.raises(UnsupportedError, match="a: too old; b: too new"):
        choose(op_with("a", "b"), "auto", HERE, refuse(a="too old", b="too new"))


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
@pytest.mark.parametrize("fault", ["nan", "wrong"])
def test_the_canary_of_every_op_notices(op: Op, fault: str):
    """A backend whose result is off in one element must not be used."""

    def broken(**arguments: Any) -> Any:
        result = op.backends["torch"].run(**arguments)
        first = result[0] if isinstance(result, tuple) else result
        place = (0,) * first.dim()
        if first.is_floating_point():
            first[place] = torch.nan if fault == "nan" else 2 * first[place] + 1
        else:
            first[place] += 1
        return result

    backend = replace(op.backends["torch"], name="broken", run=broken)
    sentence = canary(op, backend, torch.float32, CPU)
    assert sentence is not None
    assert "wrong numbers on this device" in sentence
    assert op.contract.cases[0].name in sentence
    assert canary(op, op.backends["torch"], torch.float32, CPU) is None


def test_the_canary_reads_every_case_it_should(monkeypatch: pytest.MonkeyPatch):
    """Attention over selected keys is the second case of its contract."""
    run = OPS["mla"].backends["torch"].run

    def ignores_the_selection(**arguments: Any) -> Any:
        return run(**(arguments | {"selected": None}))

    backend = Backend("careless", ignores_the_selection)
    sentence = canary(OPS["mla"], backend, torch.float32, CPU)
    assert sentence is not None
    assert "'selected, glm widths'" in sentence
    monkeypatch.setattr(contract_module, "CANARY_CASES", 1)
    assert canary(OPS["mla"], backend, torch.float32, CPU) is None


@pytest.mark.parametrize("op", ["mla", "index_score"])
def test_the_canary_has_keys_as_they_are_cached(op: str):
    run = OPS[op].backends["torch"].run

    def reads_no_fp8(**arguments: Any) -> Any:
        assert arguments["pool"].dtype == torch.float32, "cannot read FP8"
        return run(**arguments)

    backend = Backend("careless", reads_no_fp8)
    assert canary(OPS[op], backend, torch.float32, CPU) is None
    assert "cannot read FP8" in str(canary(OPS[op], backend, torch.float32, CPU, FP8))
    (choice,) = (row for row in resolve_ops("cpu", keys=FP8).report if row["op"] == op)
    assert choice["backend"] == "torch"


def test_a_backend_that_fails_its_canary_is_refused_with_the_numbers(
    monkeypatch: pytest.MonkeyPatch,
):
    off = replace(OPS["rope"].backends["torch"], name="off", run=lambda x, cos, sin, interleaved: x)
    broken = replace(OPS["rope"], backends={"off": off, **OPS["rope"].backends})
    monkeypatch.setattr("tetrad.kernels.select.OPS", {**OPS, "rope": broken})
    (row,) = (row for row in resolve_ops("cpu").report if row["op"] == "rope")
    assert row["backend"] == "torch"
    assert "relative error" in row["refusals"]["off"]


def test_the_snapshot_of_the_cpu():
    assert HERE.kind == "cpu"
    assert HERE.compute_capability is None
    assert HERE.memory_bytes > 1 << 28
    assert HERE.num_cores >= 1
    assert HERE.as_dict()["versions"]["torch"] == torch.__version__


@pytest.mark.gpu
def test_resolving_on_a_gpu():
    found = snapshot("cuda")
    assert found.kind == "cuda"
    assert found.compute_capability is not None
    assert found.memory_bytes > 1 << 30
    for row in resolve_ops("cuda", dtype=torch.bfloat16).report:
        first = next(name for name in OPS[row["op"]].backends if name not in row["refusals"])
        assert row["backend"] == first
