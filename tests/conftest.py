"""Tests marked `gpu` are skipped where there is none; no property test depends on speed."""

from __future__ import annotations

import hypothesis
import pytest

hypothesis.settings.register_profile("tetrad", deadline=None)
hypothesis.settings.load_profile("tetrad")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
