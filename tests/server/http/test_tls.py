"""HTTPS: a certificate, a wrong one, clients that need one, and several API processes."""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from tests.house.source import ROOT
from tests.server.conftest import MakeService
from tests.server.door.test_access import bearer
from tetrad.cli.child import free_port
from tetrad.core.config import ServeConfig
from tetrad.core.errors import ConfigError
from tetrad.server.http.server import HttpServer, check_tls


@dataclass(frozen=True)
class Files:
    """A server's certificate and key, the authority of both, and what clients trust and bring."""

    certificate: Path
    key: Path
    authority: Path
    client: Path

    @property
    def fields(self) -> dict[str, Any]:
        return {"ssl_certfile": self.certificate, "ssl_keyfile": self.key}

    def context(self, *, brings_certificate: bool = False) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.authority)
        if brings_certificate:
            context.load_cert_chain(self.client)
        return context


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder, authority = tmp_path_factory.mktemp("tls"), trustme.CA()
    server, client = authority.issue_cert("127.0.0.1"), authority.issue_cert("client@example.org")
    found = Files(*(folder / f"{name}.pem" for name in ("certificate", "key", "ca", "client")))
    server.cert_chain_pems[0].write_to_path(found.certificate)
    server.private_key_pem.write_to_path(found.key)
    authority.cert_pem.write_to_path(found.authority)
    client.private_key_and_cert_chain_pem.write_to_path(found.client)
    return found


async def test_https_is_served_and_http_is_not(make_service: MakeService, files: Files):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        http = HttpServer(make_service(**files.fields), listener)
        place = f"127.0.0.1:{listener.getsockname()[1]}"
        try:
            async with httpx.AsyncClient(verify=files.context()) as client:
                response = await client.get(f"https://{place}/v1/models")
                assert response.json()["data"][0]["id"] == "abacus"
                body = {"prompt": "3", "stream": True}
                response = await client.post(f"https://{place}/v1/completions", json=body)
                assert response.text.endswith("data: [DONE]\n\n")
            async with httpx.AsyncClient() as client:
                with pytest.raises(httpx.TransportError):
                    await client.get(f"https://{place}/health")
                with pytest.raises(httpx.TransportError):
                    await client.get(f"http://{place}/health")
        finally:
            await http.end()


async def test_clients_may_need_a_certificate(make_service: MakeService, files: Files):
    fields = files.fields | {"ssl_ca_certs": files.authority}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        http = HttpServer(make_service(**fields), listener)
        url = f"https://127.0.0.1:{listener.getsockname()[1]}/health"
        try:
            context = files.context(brings_certificate=True)
            async with httpx.AsyncClient(verify=context) as client:
                assert (await client.get(url)).status_code == 200
            async with httpx.AsyncClient(verify=files.context()) as client:
                with pytest.raises(httpx.TransportError):
                    await client.get(url)
        finally:
            await http.end()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"ssl_certfile": "nowhere.pem"},
            r"^--ssl-certfile nowhere\.pem cannot be read: no such file or directory\.$",
        ),
        (
            {"ssl_certfile": "certificate", "ssl_keyfile": "nowhere.pem"},
            r"^--ssl-keyfile nowhere\.pem cannot be read: no such file or directory\.$",
        ),
        ({"ssl_certfile": "certificate"}, "needs a certificate in PEM, and its key there or in"),
        (
            {"ssl_certfile": "certificate", "ssl_keyfile": "client"},
            r"^HTTPS .* \(key values mismatch\); it needs a certificate in PEM",
        ),
        ({"ssl_keyfile": "key"}, "--ssl-keyfile needs --ssl-certfile"),
        ({"ssl_ca_certs": "authority"}, "--ssl-ca-certs needs --ssl-certfile"),
    ],
)
def test_wrong_files_are_one_sentence(files: Files, fields: dict[str, str], message: str):
    with pytest.raises(ConfigError, match=message):
        check_tls(ServeConfig.parse({k: getattr(files, v, Path(v)) for k, v in fields.items()}))


@contextmanager
def served(files: Files, log: Path) -> Iterator[str]:
    """`tetrad serve` with two API processes; its URL."""
    port = free_port()
    command = [
        *(sys.executable, "-m", "tetrad", "serve", "--load-format", "null", "--port", str(port)),
        *("--api-workers", "2", "--api-key", "user", "--admin-api-key", "admin"),
        *("--ssl-certfile", str(files.certificate), "--ssl-keyfile", str(files.key)),
    ]
    with log.open("wb") as output, subprocess.Popen(command, cwd=ROOT, stderr=output) as process:
        try:
            deadline = time.monotonic() + 60
            while "Ctrl-C" not in log.read_text():
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline
                time.sleep(0.05)
            yield f"https://127.0.0.1:{port}"
        finally:
            process.terminate()
            assert process.wait(30) == 0, log.read_text()


def lines(log: Path, route: str) -> list[dict[str, Any]]:
    """Of the access log, about one route."""
    found = [json.loads(line) for line in log.read_text().splitlines() if line[:1] == "{"]
    return [line for line in found if line["route"] == route]


def test_several_processes_serve_https_and_the_operator_s_orders_are_for_all(
    files: Files, tmp_path: Path
):
    """Each request on a connection of its own: some reach one process, some the other."""
    log = tmp_path / "log"
    with served(files, log) as url:
        assert f"at {url}" in log.read_text()
        context = files.context()

        def ask(method: str, path: str, key: str = "user", **body: Any) -> httpx.Response:
            return httpx.request(
                method, url + path, headers=bearer(key), json=body or None, verify=context
            )

        told = ask("POST", "/configure_logging", "admin", access_log="json")
        assert told.status_code == 200
        time.sleep(0.5)  # the other process hears it by a way of its own
        assert {ask("GET", "/v1/models").status_code for _ in range(12)} == {200}
        deadline = time.monotonic() + 10  # a line is written after its answer
        while len(logged := lines(log, "/v1/models")) < 12:
            assert time.monotonic() < deadline, log.read_text()
        assert {line["key"] for line in logged} == {"default"}

        assert ask("POST", "/pause_generation", "user").status_code == 403
        assert ask("POST", "/pause_generation", "admin", mode="in_place").status_code == 200
        state = ask("GET", "/server_info").json()["state"]
        assert state["is_paused"] is True
        late = ask("POST", "/v1/completions", prompt="3", max_tokens=4, timeout=0.3)
        assert late.status_code == 504
        assert ask("POST", "/continue_generation", "admin").status_code == 200
        done = ask("POST", "/v1/completions", prompt="3", max_tokens=4, ignore_eos=True)
        assert done.json()["usage"]["completion_tokens"] == 4

        head = bearer("user") | {"X-Request-Id": "to-be-ended"}
        body = {"prompt": "3", "max_tokens": 4000, "stream": True, "ignore_eos": True}
        with httpx.stream(
            "POST", f"{url}/v1/completions", headers=head, json=body, verify=context
        ) as stream:
            events_of = stream.iter_lines()
            next(events_of)
            counts = [
                ask("POST", "/abort_request", "admin", rid="to-be-ended").json()["num_aborted"]
                for _ in range(4)
            ]
            assert counts == [1, 0, 0, 0]
            events = [line for line in events_of if line]
        assert '"finish_reason":"abort"' in events[-2]
        metrics = ask("GET", "/metrics").text
        assert 'tetrad_finished_total{reason="abort"} 2.0' in metrics, "the late one, and that one"
        assert "tetrad_request_timeouts_total 1.0" in metrics
