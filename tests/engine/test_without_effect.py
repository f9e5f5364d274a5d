"""Flags that change nothing are named when the engine starts, in any situation."""

from __future__ import annotations

from typing import Any

import pytest

from tests.factories import TINY_GLM
from tests.llama import TINY_LLAMA
from tetrad.core.architectures import arch_of_config
from tetrad.core.config import ServeConfig
from tetrad.engine.without_effect import (
    OF_A_MODEL,
    DeviceKind,
    without_effect,
    without_effect_on_null,
)

GLM, LLAMA = arch_of_config(TINY_GLM), arch_of_config(TINY_LLAMA)
NULL = "with --load-format null, which has no model."


def told(flags: dict[str, Any], device: DeviceKind = "cpu", arch: Any = GLM) -> list[str]:
    return without_effect(ServeConfig(**flags), arch, device)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("arch", [GLM, LLAMA], ids=["glm", "llama"])
def test_nothing_is_told_where_nothing_was_asked_for(device: DeviceKind, arch: Any):
    assert told({}, device, arch) == []
    assert without_effect_on_null(ServeConfig()) == []


@pytest.mark.parametrize(
    ("flags", "device", "sentence"),
    [
        (
            {"cuda_graph_max_bs": 4},
            "cpu",
            "--cuda-graph-max-bs has no effect on a CPU, which records nothing.",
        ),
        (
            {"disable_overlap_schedule": True},
            "cpu",
            "--disable-overlap-schedule has no effect on a CPU, where steps never overlap.",
        ),
        (
            {"disable_cuda_graph": True, "cuda_graph_bs": (4,)},
            "cuda",
            "--cuda-graph-bs has no effect with --disable-cuda-graph.",
        ),
        (
            {"cuda_graph_max_bs": 4, "cuda_graph_bs": (4,)},
            "cuda",
            "--cuda-graph-max-bs has no effect beside --cuda-graph-bs.",
        ),
        ({"disable_cuda_graph": True}, "cuda", None),
        (
            {"null_step_ms": 5.0},
            "cpu",
            "--null-step-ms has no effect without --load-format null.",
        ),
        (
            {"rehearse_routing": "skewed"},
            "cpu",
            "--rehearse-routing has no effect without --rehearse or dummy weights.",
        ),
        ({"rehearse_routing": "skewed", "load_format": "dummy"}, "cpu", None),
        ({"rehearse_routing": "skewed", "rehearse": "tp=2"}, "cpu", None),
        ({"num_layers": 1}, "cpu", None),
        (
            {"num_layers": 99},
            "cpu",
            f"--num-layers 99 has no effect: there are {GLM.num_layers}.",
        ),
        ({"attention_backend": "torch", "decode_attention_backend": "torch"}, "cpu", None),
        (
            {
                "attention_backend": "torch",
                "decode_attention_backend": "torch",
                "prefill_attention_backend": "torch",
            },
            "cpu",
            "--attention-backend has no effect beside --decode-attention-backend and "
            "--prefill-attention-backend.",
        ),
        (
            {
                "schedule_low_priority_values_first": True,
                "priority_scheduling_preemption_threshold": 1,
            },
            "cpu",
            "--schedule-low-priority-values-first, --priority-scheduling-preemption-threshold have "
            "no effect without --enable-priority-scheduling.",
        ),
        (
            {"enable_priority_scheduling": True, "abort_on_priority_when_disabled": True},
            "cpu",
            "--abort-on-priority-when-disabled has no effect with --enable-priority-scheduling.",
        ),
    ],
)
def test_flags_without_effect_are_named(
    flags: dict[str, Any], device: DeviceKind, sentence: str | None
):
    assert told(flags, device) == ([sentence] if sentence else [])


def test_what_a_model_without_experts_or_graphs_has_no_use_for():
    flags = {"moe_runner_backend": "torch", "cuda_graph_max_bs": 4}
    assert told(flags, "cuda", LLAMA) == [
        "--moe-runner-backend has no effect as llama has no experts.",
        "--cuda-graph-max-bs has no effect as steps of llama are not recorded.",
    ]


def test_no_model_has_no_use_for_what_is_about_one():
    given = {"load_format": "null", "quantization": "int8", "dtype": "float32", "profile_dir": "x"}
    config = ServeConfig(**given)  # type: ignore[arg-type]
    found = without_effect_on_null(config)
    assert found == [f"--quantization, --dtype, --profile-dir have no effect {NULL}"]
    assert set(OF_A_MODEL) <= ServeConfig.model_fields.keys()
