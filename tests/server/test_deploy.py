"""What deploy/ shows is there: every figure of the dashboard, and every alias of another server."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx

from tests.house.source import ROOT
from tetrad.server.telemetry.metric_names import COUNTERS, GAUGES, HISTOGRAMS

DASHBOARD = ROOT / "deploy" / "grafana.json"
NAME = re.compile(r"\b(?:tetrad_\w+|(?:sglang|vllm):\w+)")


async def exposed(client: httpx.AsyncClient) -> set[str]:
    """Names of all series after a request was served and one refused."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "3"}]}
    await client.post("/v1/chat/completions", json=body)
    await client.post("/v1/chat/completions", json={})
    lines = (await client.get("/metrics")).text.splitlines()
    return {re.split(r"[{ ]", line)[0] for line in lines if not line.startswith("#")}


async def test_every_figure_of_the_dashboard_exists(client: httpx.AsyncClient):
    dashboard = json.loads(DASHBOARD.read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    variables = [
        v["query"]["query"] for v in dashboard["templating"]["list"] if v["type"] == "query"
    ]
    assert len(expressions) > 20
    found = await exposed(client)
    for expression in (*expressions, *variables):
        names = NAME.findall(expression)
        assert names, expression
        assert set(names) <= found, expression
        assert expression.count("(") == expression.count(")")


async def test_panels_neither_overlap_nor_share_a_number(client: httpx.AsyncClient):
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(places)


async def test_the_names_of_others_are_there_and_said_once(client: httpx.AsyncClient):
    found = await exposed(client)
    for figures, end in ((GAUGES, ""), (COUNTERS, "_total")):
        for figure in figures:
            for start, name in (("sglang:", figure.sglang), ("vllm:", figure.vllm)):
                assert name is None or f"{start}{name}{end}" in found
    for sglang, vllm in HISTOGRAMS.values():
        for start, name in (("sglang:", sglang), ("vllm:", vllm)):
            assert name is None or f"{start}{name}_bucket" in found
    text = (await client.get("/metrics")).text
    types = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    assert len(types) == len(set(types)), "a name is exposed twice"


async def test_every_figure_is_explained_with_its_unit(client: httpx.AsyncClient):
    text = (await client.get("/metrics")).text
    told = re.findall(r"^# HELP (\S+) (.*)", text, re.MULTILINE)
    assert len(told) > 60
    for name, sentence in told:
        assert re.fullmatch(r"[A-Z]\S+( \S+){3,}\.", sentence), (name, sentence)
        (unit,) = re.findall("seconds|tokens|pages|$", name)[:1]
        assert unit in sentence.lower(), (name, sentence)


async def test_the_example_for_prometheus_scrapes_a_route_that_is_there(client: httpx.AsyncClient):
    text = (ROOT / "deploy" / "prometheus.yml").read_text()
    (path,) = re.findall(r"metrics_path: (\S+)", text)
    assert (await client.get(path)).status_code == 200
