"""Tests marked `gpu` are skipped where there is none; no property test depends on speed; nothing
that a developer's shell sets for clients reaches the servers that tests start."""

from __future__ import annotations

import os

import hypothesis
import pytest

for variable in ("TETRAD_API_KEY", "OPENAI_API_KEY", "http_proxy", "https_proxy", "all_proxy"):
    os.environ.pop(variable, None)
    os.environ.pop(variable.upper(), None)

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


@pytest.fixture(autouse=True)
def no_trials(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, engines and models take the first backend that can run. Each choice would try all
    in eight processes, and beside it the other tests' choices would; tests/kernels tries them."""
    is_of_kernels = request.path.parent.name == "kernels"
    if request.node.get_closest_marker("gpu") is None or is_of_kernels:
        return
    from tetrad.kernels import select, trial

    untried = trial.TrialOutcome({}, is_fresh=True)
    monkeypatch.setattr(select, "try_apart", lambda _request, _tell: untried)
