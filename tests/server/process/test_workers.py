"""Further API processes: how many, the port they share, and those that cannot start."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.process.test_launch import serving
from tetrad.core.config import ServeConfig
from tetrad.core.errors import TetradError
from tetrad.engine.share import usable_processors
from tetrad.server.model import ServedModel
from tetrad.server.process.orders import Begin, BeReady, Drain, End, Fail, Join, Order, line, orders
from tetrad.server.process.workers import ApiWorkers, automatic
from tetrad.server.service import Service
from tetrad.server.shared.tally import Tally


@pytest.mark.parametrize(
    ("num_processors", "num_workers"),
    [(1, 1), (2, 1), (7, 1), (8, 2), (12, 3), (16, 4), (128, 4)],
)
def test_how_many_serve_if_nobody_says(num_processors: int, num_workers: int):
    assert automatic(num_processors) == num_workers


def test_a_control_group_s_share_counts(tmp_path: Path):
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    assert usable_processors(tmp_path) == 1
    assert usable_processors(tmp_path / "nothing") >= 1


def test_orders_survive_the_pipe(tmp_path: Path):
    said: list[Order] = [
        Begin('{"api_key": "a\\nb"}', ["tetrad", "serve"], 1.5, 2, "/tmp/y"),
        Join("/tmp/x\n", 3),
        *(BeReady(1.5), Drain(), Fail("Out of\nmemory."), End()),
    ]
    path = tmp_path / "said"
    path.write_bytes(b"".join(line(order) for order in said))
    with path.open("rb") as file:
        assert list(orders(file.fileno())) == said


def test_the_port_of_another_server_of_the_same_kind_is_taken():
    """Sockets that share a port would share that of a stranger of the same user too."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with serving("normal", port=taken.getsockname()[1], api_workers=2) as server:
            assert server.end() == 2
            server.wait_for(r"^error: Port \d+ on 127\.0\.0\.1 cannot be had")


@pytest.mark.parametrize(
    ("interpreter", "num_workers", "sentence"),
    [
        ("/bin/false", 3, r"^API process \d ended with exit code 1 while the server"),
        ("/nowhere/python", 2, r"^API process 1 could not be started \(.*No such"),
    ],
)
async def test_one_that_cannot_start_is_told(
    interpreter: str,
    num_workers: int,
    sentence: str,
    model: ServedModel,
    engine: FakeEngine,
    monkeypatch: pytest.MonkeyPatch,
):
    """Whether its process ends at once or cannot even be made."""
    monkeypatch.setattr("sys.executable", interpreter)
    service = Service(ServeConfig(api_workers=num_workers), model, Tally.shared(num_workers))
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(("127.0.0.1", 0))
        workers = ApiWorkers(service, listener)
        workers.start()
        async with asyncio.timeout(30):
            with pytest.raises(TetradError, match=sentence):
                await workers.join(engine)
            await workers.stop()
