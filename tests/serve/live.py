"""A server on loopback in this process, and what tests ask it."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import httpx
import uvicorn

from pyggml_dflash import Engine
from pyggml_dflash.serve.app import create_app
from pyggml_dflash.serve.server import listen, url_of
from pyggml_dflash.serve.settings import ServeOptions

PATIENCE_S: Final = 60.0  # after this, waiting is called hanging
CHAT: Final = "/v1/chat/completions"
STORY: Final = [{"role": "user", "content": "Tell me a story about a fox."}]


@dataclass(frozen=True)
class Live:
    """A running server."""

    url: str
    engine: Engine

    def client(self, **options: Any) -> httpx.Client:
        """A client of it; its connections are closed with it."""
        return httpx.Client(base_url=self.url, timeout=PATIENCE_S, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        with self.client() as client:
            return client.get(path, **options)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        with self.client() as client:
            return client.post(path, json=body, **options)

    def post_ascii(self, path: str, body: Any) -> httpx.Response:
        """Post a body that need be no Unicode: every other character is escaped."""
        with self.client() as client:
            headers = {"content-type": "application/json"}
            return client.post(path, content=json.dumps(body), headers=headers)

    def slots(self) -> Any:
        """The body of /slots."""
        return self.get("/slots").json()

    def metric(self, name: str, **labels: str) -> float:
        """A number of /metrics; 0 where it was never counted."""
        wanted = ",".join(f'{key}="{value}"' for key, value in labels.items())
        start = f"{name}{{{wanted}}} " if labels else f"{name} "
        lines = self.get("/metrics").text.splitlines()
        return next((float(line[len(start) :]) for line in lines if line.startswith(start)), 0.0)


@contextmanager
def live(engine: Engine, **options: Any) -> Iterator[Live]:
    """Serve `engine` while the block runs; `options` are those of `ServeOptions`."""
    app = create_app(engine, ServeOptions(**options))
    with listen("127.0.0.1", 0) as listener:
        url = url_of(listener)
        config = uvicorn.Config(
            app, lifespan="off", log_config=None, access_log=False, timeout_graceful_shutdown=1
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
        thread.start()
        try:
            until(lambda: server.started)
            yield Live(url, engine)
        finally:
            server.should_exit = True
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


@contextmanager
def asked(server: Live, path: str, body: Any, *, promised: int | None = None) -> Iterator[socket.socket]:
    """A connection with a request on it; closed at the end, whatever was answered.

    `promised`: bytes that the body has by its head, if not as many as are sent.
    """
    port = int(server.url.rpartition(":")[2])
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as connection:
        n_bytes = len(data) if promised is None else promised
        connection.sendall(f"{head}Content-Length: {n_bytes}\r\n\r\n".encode() + data)
        yield connection


@contextmanager
def busy(server: Live) -> Iterator[None]:
    """While open, an answer of thousands of tokens keeps the only slot."""
    with asked(server, CHAT, {"messages": STORY, "ignore_eos": True}):
        until(lambda: server.slots()["slots"][0]["state"] == "decode")
        yield


def until(condition: Callable[[], object], *, patience_s: float = PATIENCE_S) -> None:
    """Wait for a condition, which must come true."""
    end = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.01)


def events(text: str) -> list[str]:
    """The `data` of server-sent events, without comments."""
    blocks = text.split("\n\n")
    assert blocks[-1] == ""
    lines = [line for block in blocks[:-1] for line in block.split("\n")]
    assert all(line.startswith((":", "data: ", "event: ")) for line in lines)
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]


def comments(text: str) -> list[str]:
    """Comments among server-sent events."""
    return [line[2:] for line in text.split("\n") if line.startswith(": ")]
