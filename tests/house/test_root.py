"""The root holds little, the package ships what it needs and nothing large."""

from __future__ import annotations

import re
import subprocess
import tomllib

from tests.house.source import ROOT

ROOT_FILES = {
    ".gitignore",
    "CHANGELOG.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "pyproject.toml",
}
ROOT_FOLDERS = {".ci", "benchmarks", "deploy", "docs", "examples", "tests", "tetrad"}
EMBEDDED_MODEL_CAP_BYTES = 12_000_000


def tracked() -> list[str]:
    listing = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    names = listing.stdout.splitlines()
    assert names
    return names


def test_the_root_holds_only_what_it_should():
    roots = {name.split("/")[0] for name in tracked() if "/" not in name}
    folders = {name.split("/")[0] for name in tracked() if "/" in name}
    assert roots <= ROOT_FILES
    assert folders <= ROOT_FOLDERS


def test_every_target_of_make_is_told_once():
    """A rule that lost its name would still be one to make."""
    makefile = (ROOT / "Makefile").read_text()
    told = re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE)
    (phony,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert told == phony.split()


def test_the_embedded_model_is_whole_and_small():
    folder = ROOT / "tetrad" / "data" / "abacus"
    names = {p.name for p in folder.iterdir()}
    assert {
        "README.md",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "hf_quant_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    } <= names
    assert sum(p.stat().st_size for p in folder.iterdir()) < EMBEDDED_MODEL_CAP_BYTES


def test_what_installs_an_extra_works_in_a_clone():
    """Tetrad is on no index, and an extra that is told of is one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    files = [*(ROOT / "tetrad").rglob("*.py"), *(ROOT / "docs").rglob("*.md")]
    told = {path: path.read_text() for path in files}
    assert not [path for path, text in told.items() if re.search(r"install ['\"]tetrad\[", text)]
    extra = re.compile(r"""(?:\binstall\(|install -e ['"]\.\[)['"]?([a-z0-9]+)['"\]]""")
    named = {name for text in told.values() for name in extra.findall(text)}
    assert {"otel", "plot", "flashinfer", "gguf", "humming"} <= named
    assert named <= set(project["optional-dependencies"])
