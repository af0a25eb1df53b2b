"""Workers: reaching one, what it cannot be used for, and what is left when it goes away."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import click
import numpy as np
import pytest
from dflash_cli.engine_flags import engine_options

from pyggml_dflash import BackendError, DeviceLostError, EngineOptions, UsageError, fit_report
from pyggml_dflash.engine.rpc_worker import serve_worker
from pyggml_dflash.ggml.device import Backend, named_device
from pyggml_dflash.ggml.rpc import Endpoint
from pyggml_dflash.plan.hot_experts import RouteStats
from tests.cli.dflash_command import dflash, told
from tests.engine.tiny import LLAMA, QWEN35, opened, prompt
from tests.engine.workers import HOST, Worker, free_port, start_worker, workers
from tests.tiny import Tiny, write_tiny


@pytest.fixture
def worker() -> Iterator[Worker]:
    with workers(1) as (started,):
        yield started


@pytest.mark.parametrize(
    "text", ["", "host", "host:", ":50052", "host:0", "host:65536", "host:1x", "a b:1", "h:1:2"]
)
def test_an_endpoint_is_a_host_and_a_port(text: str) -> None:
    with pytest.raises(UsageError, match="must be HOST:PORT"):
        Endpoint.parse(text)


@pytest.mark.parametrize("name", ["rpc://127.0.0.1:1/", "rpc://127.0.0.1:1/x", "rpc://127.0.0.1:1/-1"])
def test_behind_the_port_goes_a_number(name: str) -> None:
    with pytest.raises(UsageError, match="the number of a worker's device"):
        named_device(name)


def test_nobody_at_an_endpoint_is_told_before_anything_is_loaded() -> None:
    with pytest.raises(BackendError, match="no worker answers at"):
        opened(LLAMA, device=f"rpc://{HOST}:{free_port()}")


def test_what_answers_but_is_no_worker_is_told() -> None:
    with socket.create_server((HOST, 0)) as server:

        def answer() -> None:
            link, _ = server.accept()
            with link:
                link.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(BackendError, match="is no worker"):
            named_device(f"rpc://{HOST}:{server.getsockname()[1]}")
        thread.join()


def test_a_device_that_a_worker_does_not_have_is_refused(worker: Worker) -> None:
    with pytest.raises(UsageError, match="that worker has 1, counted from 0"):
        named_device(f"{worker.name}/1")


def test_devices_of_a_worker_are_listed_where_it_is_named(worker: Worker) -> None:
    listed = dflash("devices", worker.name, "--json").json
    assert [d["kind"] for d in listed if d["name"] == worker.name] == ["rpc"]
    missing = dflash("devices", f"rpc://{HOST}:{free_port()}")
    assert missing.code == 1
    assert "no worker answers" in missing.err


def test_a_worker_lends_devices_that_exist_at_an_address_that_is_free(worker: Worker) -> None:
    with pytest.raises(UsageError, match="this build has"):
        serve_worker(f"{HOST}:{free_port()}", ("CUDA77",))
    with pytest.raises(UsageError, match="cannot listen at"):
        serve_worker(worker.name.removeprefix("rpc://"), ("CPU",))


def test_a_worker_belongs_to_one_engine_of_a_process(worker: Worker) -> None:
    with opened(LLAMA, device=worker.name) as engine:
        with pytest.raises(BackendError, match="belongs to another engine of this process"):
            opened(LLAMA, device=worker.name)
        assert engine.generate(prompt(8), max_tokens=2).tokens
    with opened(LLAMA, device=worker.name) as engine:
        assert engine.generate(prompt(8), max_tokens=2).tokens


def test_a_worker_listens_at_a_name() -> None:
    started = start_worker(host="localhost")
    try:
        with opened(LLAMA, device=started.name) as engine:
            assert engine.generate(prompt(8), max_tokens=1).tokens
    finally:
        started.kill()


# a worker that goes away


@pytest.mark.parametrize("devices", ["worker", "cpu+worker", "worker+cpu"])
def test_a_worker_that_is_killed_while_tokens_are_made_ends_the_request_and_no_more(devices: str) -> None:
    started = start_worker()
    port = int(started.name.rpartition(":")[2])
    names = tuple("CPU" if name == "cpu" else started.name for name in devices.split("+"))
    try:
        with opened(LLAMA) as other, opened(LLAMA, device=None, devices=names) as engine:
            plain = other.generate(prompt(40), max_tokens=8).tokens
            stream = engine.stream(prompt(40), max_tokens=1000, ignore_eos=True)
            for _ in range(5):
                next(stream)
            started.kill()
            with pytest.raises(DeviceLostError, match="no longer answers") as lost:
                for _ in stream:
                    pass
            assert lost.value.device == started.name
            with pytest.raises(DeviceLostError):
                engine.generate(prompt(8), max_tokens=1)
            assert other.generate(prompt(40), max_tokens=8).tokens == plain
        started = start_worker(port)
        with opened(LLAMA, device=None, devices=names) as engine:
            assert engine.generate(prompt(40), max_tokens=8).tokens == plain
    finally:
        started.kill()


def test_a_worker_that_is_killed_between_requests_is_told_by_the_next(worker: Worker) -> None:
    with opened(LLAMA, device=None, devices=("CPU", worker.name)) as engine:
        engine.generate(prompt(8), max_tokens=1)
        worker.kill()
        with pytest.raises(DeviceLostError):
            engine.generate(prompt(8), max_tokens=1)


def test_a_backend_on_a_lost_device_can_be_closed(worker: Worker) -> None:
    backend = Backend(named_device(worker.name))
    worker.kill()
    backend.memory_free()
    with pytest.raises(DeviceLostError):
        backend.check_alive()
    backend.close()


# reports


def test_what_lies_where_is_told(worker: Worker) -> None:
    devices = ("--devices", f"CPU,{worker.name}")
    where = f"layers 0 to 3 on CPU, layers 4 to 7 on {worker.name} (asked for)"
    options = ("--max-ctx", "512", "--spec", "off", *devices)
    assert where in told("fit", str(QWEN35), *options)
    ran = dflash("run", str(QWEN35), "-p", "a", "--raw", "-n", "1", *options)
    assert ran.code == 0, ran.err
    assert where in " ".join(ran.err.split())


def test_the_flags_of_a_report_open_the_same_devices(worker: Worker, tmp_path: Path) -> None:
    found: list[EngineOptions] = []

    @click.command()
    @engine_options
    def opens(engine: EngineOptions) -> None:
        found.append(engine)

    layers = EngineOptions(
        model=QWEN35, devices=("CPU", worker.name), tensor_split=(1.0, 2.5), split="layers", spec="off"
    )
    moe = write_tiny(tmp_path, Tiny(architecture="qwen35moe"))
    counts = tmp_path / "picks.csv"
    RouteStats(np.ones((4, 4), np.int64), n_used=2, n_tokens=8).write(counts)
    experts = EngineOptions(
        model=moe,
        device="CPU",
        expert_device=worker.name,
        link_type="f16",
        prompt_streams=2,
        kv_overflow_device=worker.name,
        expert_placement=counts,
        expert_budget_mib=2,
    )
    for options in (layers, experts):
        report = fit_report(options)
        assert [share.device for share in report.devices] == ["CPU", worker.name]
        opens.main([str(options.model), *report.flags], standalone_mode=False)
        assert found.pop() == replace(options, max_ctx=report.n_ctx, chunk=report.chunk)
