"""A service on the embedded model's tokenizer and a fake engine, in process or on a real port."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from tests.server.fake_engine import FakeEngine
from tetrad.core.config import ServeConfig
from tetrad.data import embedded_model
from tetrad.server.app import build_app
from tetrad.server.http.server import HttpServer
from tetrad.server.model import ServedModel
from tetrad.server.service import Service
from tetrad.server.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(embedded_model())


@pytest.fixture(scope="session")
def model() -> ServedModel:
    return ServedModel.load(ServeConfig(served_model_name="abacus"))


@pytest.fixture
async def engine() -> FakeEngine:
    return FakeEngine()


MakeService = Callable[..., Service]


@pytest.fixture
def make_service(model: ServedModel, engine: FakeEngine) -> MakeService:
    """A ready service; keyword arguments are configuration fields."""

    def make(**fields: Any) -> Service:
        service = Service(ServeConfig(**fields), model)
        service.attach(engine)
        return service

    return make


@pytest.fixture
def service(make_service: MakeService) -> Service:
    return make_service()


@pytest.fixture
async def client(service: Service) -> AsyncIterator[httpx.AsyncClient]:
    """A client in the same process, without a network."""
    transport = httpx.ASGITransport(build_app(service), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://tetrad") as client:
        yield client


@pytest.fixture
async def address(service: Service) -> AsyncIterator[str]:
    """URL of the service on a real port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        http = HttpServer(service, listener)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            await http.end()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that other tasks bring about; the test's timeout bounds it."""
    while not condition():
        await asyncio.sleep(0.005)
