"""docs/security.md says who can reach which route; here it is held against the server."""

from __future__ import annotations

import re

from tests.house.source import PACKAGE, ROOT, python_files
from tetrad.core.config import ServeConfig
from tetrad.core.option import secrets
from tetrad.server.app import ROUTES
from tetrad.server.door.access import OPEN_PATHS

TEXT = (ROOT / "docs" / "security.md").read_text()
WHO = {"everybody", "users", "operator"}


def told() -> dict[str, str]:
    """Each route of the table, and who may use it."""
    found: dict[str, str] = {}
    for line in TEXT.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and cells[1] in WHO:
            found |= dict.fromkeys(re.findall(r"`(/[^`]*)`", cells[0]), cells[1])
    assert found
    return found


def test_every_route_is_in_the_threat_model_with_who_may_use_it():
    table = told()
    table.pop("/openapi.json")
    paths = {re.sub(r":\w+}", "}", route.path): route for route in ROUTES}
    assert set(table) == set(paths)
    for path, route in paths.items():
        who = "operator" if route.is_admin else "everybody" if path in OPEN_PATHS else "users"
        assert table[path] == who, path


def test_nothing_runs_code_of_a_model_folder():
    assert "trust_remote_code" not in ServeConfig.model_fields
    files = [path for room in ("formats", "models") for path in python_files(PACKAGE / room)]
    source = "".join(path.read_text() for path in files)
    for word in ("trust_remote_code", "import pickle", "torch.load(", " exec(", "import_module"):
        assert word not in source, word


def test_every_key_and_password_is_a_secret():
    """Whatever is called so is never shown."""
    named = {name for name in ServeConfig.model_fields if re.search(r"(key|password)$", name)}
    assert named == secrets(ServeConfig)
