"""The engine with drawn weights, and with one rank of a layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engine.fakes import make_request
from tests.engine.test_model_runs import PROMPT, generate, load
from tests.factories import TINY_GLM, tiny_glm_folder
from tetrad.core.config import ServeConfig
from tetrad.core.errors import ConfigError
from tetrad.core.messages import EngineProgress
from tetrad.data import embedded_model
from tetrad.engine.load import load_engine
from tetrad.server.model import ServedModel

SMALL = {"max_running_requests": 3, "context_length": 300, "chunked_prefill_size": 64}


@pytest.fixture(scope="module")
def config_json(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shapes, and not one weight."""
    path = tmp_path_factory.mktemp("shapes") / "config.json"
    path.write_text(json.dumps(TINY_GLM))
    return path


def chosen(path: Path, **flags: object) -> dict[str, list[int]]:
    """Tokens of two requests, whose prompts come in chunks and mix with decodes."""
    engine = load(path, **SMALL | flags)
    requests = (make_request("a", PROMPT, 8, temperature=0.0), make_request("b", PROMPT[:9], 8))
    return generate(engine, *requests)


@pytest.mark.parametrize(
    "rehearse", [None, "tp=2,ep=2,attn_dp=2,rank=1", "tp=4,ep=4,attn_dp=2", "tp=2,ep=1"]
)
def test_drawn_weights_serve_without_a_checkpoint(config_json: Path, rehearse: str | None):
    """No slot is read before it is written, no logit is NaN, and a second start gives the same."""
    flags = {"load_format": "dummy", "rehearse": rehearse, "rehearse_routing": "skewed"}
    found = chosen(config_json, **flags)
    assert {len(ids) for ids in found.values()} == {8}
    assert len(set(found["a"])) > 1
    assert chosen(config_json.parent, **flags) == found
    assert chosen(config_json, **flags, random_seed=1) != found


def test_a_rank_of_a_checkpoint_is_a_part_of_it(tmp_path: Path):
    folder = tiny_glm_folder(tmp_path)
    whole = load(folder, **SMALL)
    engine = load(folder, **SMALL, rehearse="tp=2,ep=2,attn_dp=2,rank=1", num_layers=3)
    request = make_request("a", PROMPT, 4, temperature=0.0)
    assert len(generate(engine, request)["a"]) == 4
    assert engine.info["rehearse"] == "tp=2,ep=2,pp=1,attn_dp=2,rank=1"
    assert engine.info["num_layers"] == 3
    assert engine.info["memory"]["weight_bytes"] < whole.info["memory"]["weight_bytes"]


def test_a_rehearsal_says_that_its_text_means_nothing(config_json: Path):
    progress: list[EngineProgress] = []
    config = ServeConfig(
        model=config_json, device="cpu", load_format="dummy", rehearse="tp=2", **SMALL,  # type: ignore[arg-type]
    )  # fmt: skip
    load_engine(config, progress.append)
    (note,) = (p.detail for p in progress if p.phase == "note")
    assert "rehearsing tp=2,ep=1,pp=1,attn_dp=1,rank=0: the text means nothing" in note


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"rehearse": "tp=2,pp=3"}, "--rehearse pp=3: a stage of a pipeline gives no tokens"),
        ({"rehearse": "tp=3"}, "--rehearse: 4 attention heads cannot be dealt to 3 ranks"),
        ({"num_layers": 1}, "2 is the fewest with experts"),
        ({"model": Path("glm-55")}, "there is glm-5. Did you mean 'glm-5'"),
    ],
)
def test_what_cannot_be_rehearsed_is_refused(
    config_json: Path, flags: dict[str, object], sentence: str
):
    values = {"model": config_json, "device": "cpu", "load_format": "dummy"} | flags
    with pytest.raises(ConfigError, match=sentence):
        load_engine(ServeConfig(**values))  # type: ignore[arg-type]


def test_a_layout_that_is_none_is_refused_at_the_door():
    with pytest.raises(ConfigError, match="--rehearse dp=8: there is no 'dp', only tp, ep"):
        ServeConfig.parse({"rehearse": "dp=8"})


def test_a_preset_is_served_with_the_embedded_tokenizer():
    served = ServedModel.load(ServeConfig(model=Path("glm-5"), load_format="dummy"))
    abacus = ServedModel.load(ServeConfig(model=embedded_model()))
    assert (served.name, served.arch.num_layers) == ("glm-5", 78)
    assert served.tokenizer.vocab_size == abacus.tokenizer.vocab_size
    assert served.template is not None
    assert served.architectures == ()
    beyond = 3 * abacus.tokenizer.vocab_size + 40
    assert served.tokenizer.decode([beyond]) == abacus.tokenizer.decode([40]) != ""
    assert abacus.tokenizer.decode([beyond]) == ""
