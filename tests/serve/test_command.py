"""`dflash serve` as a process: it says where it is, answers, and stops when told to."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from pyggml_dflash import Engine, EngineOptions, Progress, UsageError
from pyggml_dflash.extras import install_hint
from pyggml_dflash.serve import server as server_module
from pyggml_dflash.serve.server import serve
from pyggml_dflash.serve.settings import ServeOptions
from tests.cli.dflash_command import COMMAND, LIMIT_S, PICO, dflash
from tests.engine.apart import program
from tests.engine.tiny import QWEN3
from tests.serve.live import CHAT, STORY, Live, asked

ENGINE = ("--max-ctx", "512", "--threads", "1", "--device", "CPU", "--spec", "off", "--port", "0")


@contextmanager
def serving(
    *args: str, env: Mapping[str, str] | None = None, slots: int = 1
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process once it serves, and its address."""
    process = subprocess.Popen(
        [*COMMAND, "serve", str(PICO), *ENGINE, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(env or {})},
    )
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        match = re.fullmatch(rf"dflash: serving pico at (http://\S+) \(512 tokens x {slots}\)\n", line)
        assert match, line
        yield process, match[1]
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_answers_until_it_is_told_to_stop(number: signal.Signals) -> None:
    with serving() as (process, url):
        answer = httpx.post(url + CHAT, json={"messages": STORY, "max_tokens": 4}, timeout=LIMIT_S)
        assert answer.json()["usage"]["completion_tokens"] == 4
        process.send_signal(number)
        out, err = process.communicate(timeout=LIMIT_S)
        assert (process.returncode, out, err) == (0, "", "")


def test_an_answer_that_runs_when_it_is_told_to_stop_comes_to_its_end() -> None:
    body = {"messages": STORY, "max_tokens": 200, "ignore_eos": True, "stream": True}
    with serving() as (process, url):
        with httpx.stream("POST", url + CHAT, json=body, timeout=LIMIT_S) as answer:
            lines = answer.iter_lines()
            next(line for line in lines if "Once" in line)
            process.send_signal(signal.SIGINT)
            assert list(lines)[-2] == "data: [DONE]"
        assert process.wait(LIMIT_S) == 0


def test_the_key_may_come_from_the_environment() -> None:
    with serving(env={"DFLASH_API_KEY": "k3y"}) as (_, url):
        assert httpx.get(f"{url}/v1/models").status_code == 401
        assert httpx.get(f"{url}/v1/models", headers={"x-api-key": "k3y"}).status_code == 200


def test_flags_reach_requests_that_do_not_say() -> None:
    with serving("--default-max-tokens", "3", "--model-name", "tiny", "--log-requests") as (process, url):
        answer = httpx.post(url + CHAT, json={"messages": STORY}, timeout=LIMIT_S).json()
        assert (answer["model"], answer["usage"]["completion_tokens"]) == ("tiny", 3)
        process.send_signal(signal.SIGINT)
        assert f"POST {CHAT} 200" in process.communicate(timeout=LIMIT_S)[1]


def test_a_stop_while_the_model_loads_is_an_end_like_any_other() -> None:
    reports: list[Progress] = []
    opened: list[str] = []

    def progress(report: Progress) -> None:
        reports.append(report)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)  # until the main thread has seen it

    options = EngineOptions(model=QWEN3, device="CPU", threads=1)  # some of its weights are copied
    serve(options, ServeOptions(port=0), progress=progress, ready=lambda engine, url: opened.append(url))
    assert len(reports) == 1
    assert opened == []


def serve_while(ask: Callable[[Live], None], model: Path | None, *, grace_s: float = 10.0) -> None:
    """Serve in this thread, where signals arrive, until `ask` on another one has sent one."""
    clients: list[threading.Thread] = []

    def ready(engine: Engine, url: str) -> None:
        clients.append(threading.Thread(target=ask, args=(Live(url, engine),)))
        clients[0].start()

    engine = EngineOptions(model=model, device="CPU", threads=1, max_ctx=2048, spec="off", slots=2)
    serve(engine, ServeOptions(port=0, grace_s=grace_s), ready=ready)
    clients[0].join(LIMIT_S)


def test_who_waits_longer_than_the_grace_is_told_that_the_server_stops(
    caplog: pytest.LogCaptureFixture,
) -> None:
    body = {"messages": STORY, "ignore_eos": True, "stream": True}
    told: list[str] = []

    def ask(server: Live) -> None:
        unread = asked(server, CHAT, body)
        half = asked(server, "/tokenize", {}, promised=9)
        with unread, half, httpx.stream("POST", server.url + CHAT, json=body, timeout=LIMIT_S) as answer:
            lines = answer.iter_lines()
            next(line for line in lines if "Once" in line)
            os.kill(os.getpid(), signal.SIGTERM)
            told.append([line for line in lines if line][-1])

    serve_while(ask, None, grace_s=0.2)
    assert "the answer was stopped, with the server" in told[0]
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


def test_a_connection_that_brings_no_request_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "REQUEST_S", 0.5)
    left: list[bytes] = []

    def ask(server: Live) -> None:
        address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
        for start in (b"", b"GET /health HTTP/1.1\r\nHost: loc", b"GET /health HTTP/1.0\r\n\r\n"):
            with socket.create_connection(address, LIMIT_S) as connection:
                connection.sendall(start)
                left.append(connection.recv(8))
        os.kill(os.getpid(), signal.SIGINT)

    serve_while(ask, QWEN3)
    assert left == [b"", b"", b"HTTP/1.1"]


def test_a_model_that_cannot_be_opened_ends_the_server() -> None:
    options = EngineOptions(device="CPU", max_ctx=10**6)
    with pytest.raises(UsageError, match="max_ctx"):
        serve(options, ServeOptions(port=0))


def test_what_the_caller_fails_with_ends_the_server_and_closes_the_engine() -> None:
    opened: list[Engine] = []

    def ready(engine: Engine, url: str) -> None:
        opened.append(engine)
        raise OSError("nobody reads what is told")

    with pytest.raises(OSError, match="nobody reads"):
        serve(EngineOptions(model=QWEN3, device="CPU", threads=1), ServeOptions(port=0), ready=ready)
    assert not opened[0].alive


def test_an_address_in_use_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            UsageError, match=f"127.0.0.1:{port} cannot be .* in use.*; stop what uses port {port}, or"
        ):
            serve(EngineOptions(), ServeOptions(port=port))


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (("--max-ctx", "1000000"), 2, "max_ctx"),
        (("--queue-limit", "-1"), 2, "queue_limit is -1"),
        (("--port", "70000"), 2, "port is 70000"),
        (("--api-key", "two words"), 2, "api_key is '***'"),
        (("--host", "no.such.host.invalid"), 2, "pass an address of this machine with --host"),
        (("--temperature", "-1"), 2, "temperature is -1"),
    ],
)
def test_what_cannot_be_served_is_told_in_one_line(args: tuple[str, ...], code: int, says: str) -> None:
    done = dflash("serve", str(PICO), *ENGINE, *args)
    assert done.code == code, done.err
    assert says in done.err
    assert done.err.count("\n") == 1


def test_without_its_packages_the_server_says_what_to_install() -> None:
    code = """
import sys
sys.modules["fastapi"] = None
try:
    import pyggml_dflash.serve.app
except ImportError as error:
    print(error)
from dflash_cli.main import cli
cli(["serve", "--port", "0"])
"""
    done = program(code)
    hint = f"the server needs the package fastapi; install what is missing with: {install_hint('serve')}"
    assert done.stdout.strip() == hint
    assert done.stderr.strip() == f"dflash: error: {hint}"
    assert done.returncode == 1
