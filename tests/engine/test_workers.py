"""Workers: reaching one, what it cannot be used for, and what is left when it goes away."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
import pytest
from dflash_cli.engine_flags import engine_options

from pyggml_dflash import BackendError, DeviceLostError, EngineOptions, Progress, UsageError, fit_report
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
    with pytest.raises(UsageError, match="devices names 'CPU' twice"):
        serve_worker(f"{HOST}:{free_port()}", ("CPU", "cpu"))
    with pytest.raises(UsageError, match="lends its own devices only"):
        serve_worker(f"{HOST}:{free_port()}", (f"rpc://{HOST}:1",))
    with pytest.raises(UsageError, match="cannot listen at"):
        serve_worker(worker.name.removeprefix("rpc://"), ("CPU",))


def test_whoever_listens_on_a_network_is_told_that_nobody_is_asked_who_he_is(
    worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    for address, is_told in ((worker.name.removeprefix("rpc://"), False), ("192.0.2.1:50052", True)):
        with pytest.raises(UsageError, match="cannot listen at"):
            serve_worker(address, ("CPU",))
        assert ("neither authentication nor encryption" in caplog.text) == is_told


@pytest.mark.parametrize("threads", [0, -1, 513, 10**9])
def test_a_worker_computes_with_a_number_of_threads_or_is_refused(threads: int) -> None:
    with pytest.raises(UsageError, match=f"threads is {threads}; it must be a whole number"):
        serve_worker(f"{HOST}:{free_port()}", ("CPU",), threads)


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
    for _ in range(2):
        with pytest.raises(DeviceLostError):
            backend.memory_free()
    backend.close()


MOE: Final = Tiny(architecture="qwen35moe")
PLACES: Final[dict[str, Callable[[str], dict[str, Any]]]] = {
    "layers": lambda worker: {"devices": ("CPU", worker)},
    "experts there": lambda worker: {"device": "CPU", "expert_device": worker},
    "experts here": lambda worker: {"device": worker, "expert_device": "CPU"},
}


@pytest.mark.parametrize(
    ("place", "end"),
    [
        ("layers", "killed"),
        ("experts there", "stopped"),
        pytest.param("layers", "stopped", marks=pytest.mark.slow),
        pytest.param("experts there", "killed", marks=pytest.mark.slow),
        pytest.param("experts here", "killed", marks=pytest.mark.slow),
        pytest.param("experts here", "stopped", marks=pytest.mark.slow),
    ],
)
def test_a_worker_that_goes_away_while_weights_load_is_told_and_nothing_is_kept(
    tmp_path: Path, worker: Worker, place: str, end: str
) -> None:
    n_reports = 0

    def report(progress: Progress) -> None:
        nonlocal n_reports
        n_reports += 1
        if n_reports == 2:
            worker.kill() if end == "killed" else worker.stop()

    options = {"device": None, "max_ctx": 256, "worker_timeout_s": 2, **PLACES[place](worker.name)}
    with pytest.raises(DeviceLostError) as lost:
        opened(write_tiny(tmp_path, MOE), progress=report, **options)
    assert lost.value.device == worker.name


@pytest.mark.parametrize(
    "when",
    ["answer", pytest.param("prompt", marks=pytest.mark.slow), pytest.param("idle", marks=pytest.mark.slow)],
)
def test_a_worker_that_stops_is_waited_for_so_long_and_no_longer(worker: Worker, when: str) -> None:
    def report(progress: Progress) -> None:
        if when == "prompt" and progress.done > 100:
            worker.stop()

    devices = {"device": None, "devices": ("CPU", worker.name)}
    with opened(LLAMA, max_ctx=512, chunk=32, worker_timeout_s=2, **devices) as engine:
        engine.generate(prompt(8), max_tokens=1)
        if when == "idle":
            worker.stop()
        stream = engine.stream(prompt(300), max_tokens=100, ignore_eos=True, progress=report)
        if when == "answer":
            next(stream)
            worker.stop()
        with pytest.raises(DeviceLostError, match="no longer answers"):
            list(stream)
        with pytest.raises(DeviceLostError):
            engine.generate(prompt(8), max_tokens=1)
    worker.go_on()
    with opened(LLAMA, **devices) as engine:
        assert engine.generate(prompt(8), max_tokens=1).tokens


@pytest.mark.parametrize("devices", ["worker", "cpu+worker"])
def test_a_prompt_is_sent_no_further_than_a_chunk_ahead_of_what_its_worker_has_done(
    worker: Worker, devices: str
) -> None:
    """Else what a worker is waited for would be a whole prompt, and nothing of it could be cancelled."""
    names = tuple("CPU" if name == "cpu" else worker.name for name in devices.split("+"))
    read: list[int] = []

    def report(progress: Progress) -> None:
        if progress.phase == "prefill":
            read.append(progress.done)
            if len(read) == 2:
                worker.stop()

    with (
        opened(LLAMA, device=None, devices=names, max_ctx=512, chunk=16, worker_timeout_s=2) as engine,
        pytest.raises(DeviceLostError),
    ):
        engine.generate(prompt(480), max_tokens=1, progress=report)
    assert len(read) <= 4


def test_a_worker_that_comes_back_in_time_was_never_lost(worker: Worker) -> None:
    with opened(LLAMA, device=worker.name, worker_timeout_s=30) as engine:
        plain = engine.generate(prompt(8), max_tokens=8).tokens
        worker.stop()
        timer = threading.Timer(0.5, worker.go_on)
        timer.start()
        assert engine.generate(prompt(8), max_tokens=8).tokens == plain
        timer.join()


def test_an_engine_is_parked_without_its_worker_and_comes_back_with_it(worker: Worker) -> None:
    with opened(LLAMA, device=None, devices=("CPU", worker.name)) as engine:
        plain = engine.generate(prompt(40), max_tokens=4).tokens
        worker.kill()
        engine.park()
        with pytest.raises(BackendError, match="no worker answers"):
            engine.unpark()
        again = start_worker(int(worker.name.rpartition(":")[2]))
        try:
            engine.unpark()
            assert engine.generate(prompt(40), max_tokens=4).tokens == plain
        finally:
            again.kill()


def test_states_of_a_parked_engine_stay_in_system_memory_and_are_continued(worker: Worker) -> None:
    with opened(QWEN35, device=worker.name, max_ctx=1024, chunk=64, slots=2) as engine:
        info, text = engine.info, prompt(900)
        cold = engine.generate(text, max_tokens=6, ignore_eos=True)
        for _ in range(2):
            engine.park()
            (stored,) = engine.snapshots.list()
            held = {device: terms for device, terms in engine.memory().items() if terms}
            assert held.keys() == {"CPU"}
            assert held["CPU"].keys() == {"snapshots"}
            engine.unpark()
            assert engine.info == info
            found = engine.generate(text, max_tokens=6, ignore_eos=True)
            assert found.usage.cached_tokens == stored.n_past > 800
            assert found.tokens == cold.tokens
        stats = engine.stats().snapshots
    assert stats is not None
    assert (stats.place, stats.captured, stats.restored, stats.capture_failures) == ("host", 1, 2, {})


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
        worker_timeout_s=60,
    )
    for options in (layers, experts):
        report = fit_report(options)
        assert [share.device for share in report.devices] == ["CPU", worker.name]
        opens.main([str(options.model), *report.flags], standalone_mode=False)
        assert found.pop() == replace(options, max_ctx=report.n_ctx, chunk=report.chunk)
