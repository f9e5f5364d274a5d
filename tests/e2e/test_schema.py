"""What the served OpenAPI document allows, and what it forbids: never an error of ours.

A longer run, over every field by itself:

    schemathesis run http://127.0.0.1:30000/openapi.json --checks not_a_server_error
        --exclude-path /pause_generation
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode

from tests.e2e.conftest import Served, serving
from tests.e2e.scripted import NULL
from tetrad.server.app import ROUTES

BODIES = [
    (method, route.path)
    for route in ROUTES
    for method in route.methods
    if method != "PUT"
    and route.body is not None
    and route.path not in ("/pause_generation", "/configure_logging")
]
"""The two would change what the others find."""
OVER_TIME = 504
"""The client asked for so little time."""
NUM_EXAMPLES = 4


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Answers are short there. Whatever was asked, it ends idle and whole."""
    folder = tmp_path_factory.mktemp("small")
    with serving(folder, *NULL, "--context-length", "192") as server:
        yield server
        state = server.wait_idle()
        assert (state["integrity"], state["used_pages"]) == ("ok", 0)
        assert "Traceback" not in server.log


@pytest.mark.parametrize(("method", "path"), BODIES)
def test_a_body_is_answered_or_refused(small: Served, method: str, path: str):
    schema = schemathesis.openapi.from_url(f"{small.url}/openapi.json")
    for mode in GenerationMode:

        @settings(
            max_examples=NUM_EXAMPLES,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(schema[path][method].as_strategy(generation_mode=mode))
        def check(case: Case[Any]) -> None:
            answer = case.call(timeout=60)
            assert answer.status_code < 500 or answer.status_code == OVER_TIME, answer.text
            if answer.status_code >= 400:
                assert answer.json()["error"]["message"]

        check()


def test_the_document_names_every_path_and_its_parameters(small: Served):
    paths = small.get("/openapi.json")["paths"]
    assert len(paths) == len({route.path for route in ROUTES})
    for path, methods in paths.items():
        for told in methods.values():
            named = {p["name"] for p in told.get("parameters", ()) if p["in"] == "path"}
            assert named == {part[1:-1] for part in path.split("/") if part.startswith("{")}
    for path, name in (("/flush_cache", "timeout"), ("/v1/responses/{response_id}", "stream")):
        assert {"name": name, "in": "query", "required": False, "schema": {"type": "string"}} in (
            paths[path]["get"]["parameters"]
        )
    needs_body = {
        path: told["requestBody"]["required"]
        for path, methods in paths.items()
        for told in methods.values()
        if "requestBody" in told
    }
    assert {path for path, is_needed in needs_body.items() if not is_needed} == {
        "/pause_generation",
        "/start_profile",
    }
