"""Who may do what: users' keys, the operator's, and no keys at all."""

from __future__ import annotations

import hmac
from pathlib import Path

import httpx
import pytest
from starlette.datastructures import Headers

from tests.server.apis.test_about import connect
from tests.server.conftest import MakeService
from tests.server.fake_engine import FakeEngine
from tetrad.core.config import ServeConfig
from tetrad.core.errors import ConfigError
from tetrad.server.app import ROUTES, build_app
from tetrad.server.door.access import Keys
from tetrad.server.service import Service

ADMIN_PATHS = [route.path for route in ROUTES if route.is_admin]
USER, OPERATOR = "/v1/models", "/flush_cache"
FILE = "# who\nalice key-of-alice\n\nbob   key-of-bob\n"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def from_afar(service: Service, host: str = "203.0.113.9") -> httpx.AsyncClient:
    transport = httpx.ASGITransport(build_app(service), client=(host, 1234))
    return httpx.AsyncClient(transport=transport, base_url="http://tetrad")


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(FILE)
    return path


def test_all_that_changes_the_server_is_the_operator_s():
    assert [
        *("/flush_cache", "/reset_prefix_cache", "/abort_request"),
        *("/pause_generation", "/continue_generation"),
        *("/start_profile", "/stop_profile", "/configure_logging"),
    ] == ADMIN_PATHS


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (USER, {"": 401, "user": 200, "alice": 200, "admin": 200, "wrong": 401}),
        (OPERATOR, {"": 401, "user": 403, "alice": 403, "admin": 200, "wrong": 401}),
    ],
)
async def test_the_operator_s_key_is_apart(
    make_service: MakeService, key_file: Path, path: str, expected: dict[str, int]
):
    service = make_service(api_key="user", admin_api_key="admin", api_key_file=key_file)
    async with from_afar(service) as client:
        for key, status in expected.items():
            given = "key-of-alice" if key == "alice" else key
            response = await client.get(path, headers=bearer(given) if given else {})
            assert response.status_code == status, key
            assert ("WWW-Authenticate" in response.headers) == (status == 401)


@pytest.mark.parametrize("path", ADMIN_PATHS)
async def test_no_user_opens_a_route_of_the_operator(
    make_service: MakeService, engine: FakeEngine, path: str
):
    service = make_service(api_key="user", admin_api_key="admin")
    async with from_afar(service) as client:
        response = await client.post(path, headers=bearer("user"), json={"abort_all": True})
        assert response.status_code == 403
        assert "--admin-api-key" in response.json()["error"]["message"]
    assert not engine.asked


async def test_a_single_key_opens_all_as_in_sglang_but_one_of_several_does_not(
    make_service: MakeService, key_file: Path
):
    async with from_afar(make_service(api_key="user")) as client:
        assert (await client.get(OPERATOR, headers=bearer("user"))).status_code == 200
    async with from_afar(make_service(api_key_file=key_file)) as client:
        assert (await client.get(OPERATOR, headers=bearer("key-of-bob"))).status_code == 403


async def test_without_keys_only_this_machine_is_the_operator(make_service: MakeService):
    service = make_service()
    for host in ("127.0.0.1", "::1", "::ffff:127.0.0.1"):
        async with from_afar(service, host) as client:
            assert (await client.get(OPERATOR)).status_code == 200
    for host in ("203.0.113.9", "::ffff:203.0.113.9", "nonsense"):
        async with from_afar(service, host) as client:
            assert (await client.get(USER)).status_code == 200
            assert (await client.get(OPERATOR)).status_code == 403


async def test_who_comes_through_a_proxy_of_this_machine_is_no_operator(address: str):
    """And nobody from afar becomes one by saying that he is here: the header is a proxy's alone."""
    async with httpx.AsyncClient(base_url=address) as client:
        assert (await client.get(OPERATOR)).status_code == 200
        for forwarded in ("203.0.113.9", "127.0.0.1, 203.0.113.9"):
            response = await client.get(OPERATOR, headers={"X-Forwarded-For": forwarded})
            assert response.status_code == 403, forwarded


@pytest.mark.parametrize(
    ("headers", "origins", "status"),
    [
        ({"Origin": "https://evil.example"}, (), 403),
        ({"Sec-Fetch-Site": "cross-site"}, (), 403),
        ({"Sec-Fetch-Site": "none"}, (), 200),
        ({"Origin": "https://good.example"}, ("https://good.example",), 200),
        ({"Origin": "https://evil.example"}, ("*",), 200),
    ],
)
async def test_a_web_page_does_not_order_a_keyless_server_about(
    make_service: MakeService, headers: dict[str, str], origins: tuple[str, ...], status: int
):
    async with connect(make_service(allowed_origins=origins)) as client:
        response = await client.post(OPERATOR, headers=headers)
        assert response.status_code == status


async def test_anthropic_s_header_is_a_key_too(make_service: MakeService):
    async with connect(make_service(api_key="user")) as client:
        assert (await client.get(USER, headers={"x-api-key": "user"})).status_code == 200
        assert (await client.get(USER, headers={"x-api-key": "other"})).status_code == 401
        assert (await client.get(USER, headers=bearer(""))).status_code == 401
        lower = {"authorization": "bearer user"}
        assert (await client.get(USER, headers=lower)).status_code == 200


async def test_only_the_operator_s_key_leaves_users_free(make_service: MakeService):
    async with from_afar(make_service(admin_api_key="admin")) as client:
        assert (await client.get(USER)).status_code == 200
        assert (await client.get(OPERATOR)).status_code == 401
        info = (await client.get("/server_info")).json()
        assert info["api_key_required"] is False


def test_every_key_is_compared(monkeypatch: pytest.MonkeyPatch, key_file: Path):
    """Whichever is right, and if none is: the time says nothing."""
    keys = Keys.of(ServeConfig(api_key="first", api_key_file=key_file))
    counted: list[bytes] = []
    compare = hmac.compare_digest

    def counting(a: bytes, b: bytes) -> bool:
        counted.append(b)
        assert len(a) == len(b) == 32, "keys of different lengths would be told apart"
        return compare(a, b)

    monkeypatch.setattr(hmac, "compare_digest", counting)
    for given, name in (("first", "default"), ("key-of-bob", "bob"), ("no", None), ("é", None)):
        counted.clear()
        found = keys.who(Headers({"authorization": f"Bearer {given}"}))
        assert (found.name if found else None) == name
        assert len(counted) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("alice", "line 1: a line is a name and a key"),
        ("alice a b", "line 1: a line is a name"),
        ("admin secret", "line 1"),
        ("", "must hold 1 to 256 keys"),
        ("a k1\na k2", "different names"),
        ("a same\nb same", "Two API keys are the same"),
        ("\n".join(f"n{i} k{i}" for i in range(257)), "must hold 1 to 256 keys"),
    ],
)
def test_a_wrong_key_file_is_one_sentence_without_a_key(tmp_path: Path, text: str, message: str):
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        Keys.of(ServeConfig(api_key_file=path))
    assert "secret" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"nowhere cannot be read: no such file or directory\.$"):
        Keys.of(ServeConfig(api_key_file=tmp_path / "nowhere"))
    path.write_bytes(b"alice \xff")
    with pytest.raises(ConfigError, match=r"cannot be read: it is no text in UTF-8\.$"):
        Keys.of(ServeConfig(api_key_file=path))
