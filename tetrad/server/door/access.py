"""Who may do what: keys, and the routes each of them opens.

| keys the server has | routes of users | routes of the operator |
|---|---|---|
| none | everybody | clients on this machine |
| `--api-key` | who brings it | who brings it |
| `--api-key-file` | who brings one of them | nobody |
| `--admin-api-key` besides | as above; the operator's too | who brings the operator's |

Comparing takes the same time for any wrong key: all are compared, as digests.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from tetrad.core.config import ServeConfig
from tetrad.core.errors import ConfigError, unreadable
from tetrad.server.door.arrival import arrival
from tetrad.server.shared.tally import MOST_KEYS
from tetrad.server.wire.failures import error_response, path_of

OPEN_PATHS = frozenset({"/health", "/ping", "/ready"})
"""Served without a key, for those who watch over the process."""
SINGLE, ADMIN = "default", "admin"
"""Names of the keys that are given by flags."""
BEARER = "bearer "


@dataclass(frozen=True, slots=True)
class Key:
    """An API key; only its digest is kept."""

    name: str
    digest: bytes
    opens_admin: bool

    @classmethod
    def of(cls, name: str, text: str, *, opens_admin: bool) -> Key:
        return cls(name, _digest(text), opens_admin)


class Keys:
    """All keys of a server."""

    def __init__(self, keys: Collection[Key]) -> None:
        self._keys = tuple(keys)

    @classmethod
    def of(cls, config: ServeConfig) -> Keys:
        """Those of the flags and of the file. Raises ConfigError."""
        keys = []
        if config.api_key is not None:
            is_alone = config.admin_api_key is None
            keys.append(Key.of(SINGLE, config.api_key, opens_admin=is_alone))
        if config.api_key_file is not None:
            keys += _read(config.api_key_file)
        if config.admin_api_key is not None:
            keys.append(Key.of(ADMIN, config.admin_api_key, opens_admin=True))
        if len({key.digest for key in keys}) < len(keys):
            raise ConfigError("Two API keys are the same; each must be another one.")
        return cls(keys)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(key.name for key in self._keys)

    @property
    def are_for_users(self) -> bool:
        """Whether anybody needs a key for the routes of users."""
        return any(key.name != ADMIN for key in self._keys)

    def who(self, headers: Headers) -> Key | None:
        """The key that a request brings, as a bearer token or as Anthropic's clients do."""
        text = headers.get("authorization", "")
        given = text[len(BEARER) :] if text.lower().startswith(BEARER) else ""
        digest = _digest_of_header(given or headers.get("x-api-key", ""))
        found = None
        for key in self._keys:
            if hmac.compare_digest(digest, key.digest):
                found = key
        return found


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _digest_of_header(text: str) -> bytes:
    """Headers are bytes, which the server reads as Latin-1; keys are UTF-8."""
    return hashlib.sha256(text.encode("latin-1")).digest()


def _read(path: Path) -> list[Key]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(unreadable(f"--api-key-file {path}", error)) from None
    keys = []
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or words[0] in (SINGLE, ADMIN) or not words[0].isprintable():
            # Not the line itself, which may hold a key.
            raise ConfigError(
                f"--api-key-file {path}, line {number}: a line is a name and a key with a space "
                f"between; {SINGLE} and {ADMIN} name the keys that flags give."
            )
        keys.append(Key.of(words[0], words[1], opens_admin=False))
    if not 0 < len(keys) <= MOST_KEYS or len({key.name for key in keys}) < len(keys):
        raise ConfigError(
            f"--api-key-file {path} must hold 1 to {MOST_KEYS} keys with different names."
        )
    return keys


class KeyCheck:
    """Lets through who may come in, and says who it is."""

    def __init__(
        self, app: ASGIApp, keys: Keys, admin_paths: Collection[str], origins: Collection[str]
    ) -> None:
        """`origins`: of the web pages that may call the server."""
        self._app = app
        self._keys = keys
        self._admin_paths = frozenset(admin_paths)
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refusal := self._refusal(scope)) is not None:
            status, message = refusal
            challenge = {"WWW-Authenticate": "Bearer"} if status == 401 else None
            path = path_of(scope)
            await error_response(message, status, headers=challenge, path=path)(
                scope, receive, send
            )
            return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        """The status and the sentence for who may not come in."""
        path = path_of(scope)
        if not self._keys.names and path not in self._admin_paths:
            return None
        headers = Headers(scope=scope)
        key = self._keys.who(headers)
        arrival().key_name = key.name if key else ""
        if path in self._admin_paths:
            return self._admin_refusal(scope, headers, key)
        if path in OPEN_PATHS or key or not self._keys.are_for_users:
            return None
        return 401, (
            "This server needs its API key, as the header Authorization: Bearer KEY or x-api-key: "
            "KEY."
        )

    def _admin_refusal(
        self, scope: Scope, headers: Headers, key: Key | None
    ) -> tuple[int, str] | None:
        if self._is_foreign_page(headers):
            return 403, "Web pages may not call this route; --allowed-origins names those that may."
        if key is None and self._keys.names:
            return (
                401,
                "This route needs the operator's key, as the header Authorization: Bearer KEY.",
            )
        if key is None and not _is_local(scope):
            return 403, (
                "This route is for clients on the server's machine only, since the server was "
                "started without --admin-api-key."
            )
        if key is not None and not key.opens_admin:
            return 403, "This route needs the operator's key, which --admin-api-key sets."
        return None

    def _is_foreign_page(self, headers: Headers) -> bool:
        """Browsers say which page a request comes from; the keyless server on somebody's machine
        must not obey every page that he reads."""
        if "*" in self._origins:
            return False
        origin = headers.get("origin")
        if origin is not None:
            return origin not in self._origins
        return headers.get("sec-fetch-site", "none") not in ("none", "same-origin")


def _is_local(scope: Scope) -> bool:
    client = scope.get("client")
    try:
        address = ipaddress.ip_address(client[0]) if client else None
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
        address = address.ipv4_mapped
    return address is None or address.is_loopback
