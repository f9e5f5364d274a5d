"""Runs the unmodified `sglang.bench_serving` on a machine that cannot run SGLang's server.

The client lives in the same package as the server, and importing it pulls in one module of the
server's disaggregation code, which needs a GPU build. Only a constant is used from there, so that
module is replaced by one that holds the constant; everything else is SGLang's own code.

Install SGLang's client in an environment of its own (its dependencies pin other versions of torch
than Tetrad wants), then give the arguments of `sglang.bench_serving`:

    python -m venv sglang-env
    sglang-env/bin/pip install torch==2.13.0
    sglang-env/bin/pip install aiohttp numpy requests tqdm transformers==5.19.0 orjson psutil \
        pybase64 triton pillow starlette msgspec pyzmq IPython datasets
    sglang-env/bin/pip install --no-deps sglang==0.5.23
    tetrad serve &
    sglang-env/bin/python benchmarks/sglang_client.py --backend sglang --dataset-name random-ids \
        --num-prompts 64 --random-input-len 128 --random-output-len 64 --random-range-ratio 1.0 \
        --max-concurrency 16
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import runpy
import sys
import types
from collections.abc import Sequence

STAND_IN = "sglang.srt.disaggregation.utils"


class StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives an almost empty module in place of the one that needs a GPU."""

    def find_spec(
        self, name: str, _path: Sequence[str] | None, _target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self) if name == STAND_IN else None

    def create_module(self, _spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__["FAKE_BOOTSTRAP_HOST"] = "2.2.2.2"


if __name__ == "__main__":
    sys.meta_path.insert(0, StandIn())
    runpy.run_module("sglang.benchmark.serving", run_name="__main__", alter_sys=True)
