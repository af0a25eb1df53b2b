"""An engine gives back all that it took: when it is closed, when loading fails, and when its owner fails."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pyggml_dflash import (
    DamagedFileError,
    DeviceMemoryError,
    DflashError,
    Engine,
    EngineClosed,
    EngineOptions,
    Progress,
    UsageError,
)
from pyggml_dflash.ggml.ledger import Charge, Ledger
from tests.engine.apart import program
from tests.engine.hostile import edited
from tests.engine.tiny import LLAMA, PATIENCE_S, QWEN3, QWEN35, opened, prompt

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, which only Linux has")
MIB = 2**20


@pytest.fixture(scope="module")
def long_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model trained for so many tokens that no test lives to see the last."""
    return edited(LLAMA, tmp_path_factory.mktemp("long") / "long.gguf", keys={"llama.context_length": 65536})


def mappings(model: Path) -> int:
    """How often a file is mapped into this process."""
    return Path("/proc/self/maps").read_text().count(str(model))


def resident_bytes() -> int:
    """Memory of this process that is in use."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextmanager
def leaks_collected() -> Iterator[list[str]]:
    """Warnings that finalizers raised while the block ran, as texts."""
    found: list[str] = []
    before = sys.unraisablehook
    sys.unraisablehook = lambda problem: found.append(str(problem.exc_value))
    try:
        yield found
        gc.collect()
    finally:
        sys.unraisablehook = before


def error_of(call: Callable[[], object]) -> Exception:
    """What the call raises, without its traceback, whose frames would keep what they saw."""
    try:
        call()
    except Exception as error:
        return error.with_traceback(None)
    pytest.fail("nothing was raised")


# closing


@on_linux
@pytest.mark.parametrize("model", [LLAMA, QWEN35, QWEN3])
def test_opening_and_closing_leaves_no_memory_thread_file_or_mapping(model: Path) -> None:
    def once() -> None:
        with opened(model, max_ctx=512) as engine:
            engine.generate(prompt(40), max_tokens=3)
            assert mappings(model) > 0

    once()
    once()
    gc.collect()
    before = threading.active_count(), open_files(), mappings(model)
    start = resident_bytes()
    with leaks_collected() as leaks:
        for _ in range(20):
            once()
    assert leaks == []
    assert (threading.active_count(), open_files(), mappings(model)) == before
    assert resident_bytes() - start < 10 * model.stat().st_size  # 20 leaked copies would be 20 times as much


def test_the_ledger_is_empty_after_closing() -> None:
    with opened(QWEN3, max_ctx=512) as engine:
        engine.generate(prompt(40), max_tokens=3)
        assert sum(engine.memory()["CPU"].values()) > QWEN3.stat().st_size // 2
        ledger = engine._loaded.core._ledger
    assert ledger.devices() == ("CPU",)
    assert ledger.charged("CPU") == 0
    assert ledger.by_label("CPU") == {}


def test_closing_twice_from_anywhere_does_nothing() -> None:
    engine = opened(LLAMA, max_ctx=64)
    threads = [threading.Thread(target=engine.close) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    engine.close()


USES: dict[str, Callable[[Engine], object]] = {
    "generate": lambda engine: engine.generate([1]),
    "generate text": lambda engine: engine.generate("a"),
    "stream": lambda engine: engine.stream([1]),
    "chat": lambda engine: engine.chat([{"role": "user", "content": "a"}]),
    "stream_chat": lambda engine: engine.stream_chat([{"role": "user", "content": "a"}]),
    "astream": lambda engine: asyncio.run(_first(engine)),
    "tokenize": lambda engine: engine.tokenize("a"),
    "detokenize": lambda engine: engine.detokenize([1]),
    "logits": lambda engine: engine.logits([1]),
    "score": lambda engine: engine.score([1, 2]),
    "memory": lambda engine: engine.memory(),
}


async def _first(engine: Engine) -> object:
    async for piece in engine.astream([1]):
        return piece
    return None


@pytest.mark.parametrize("use", USES)
def test_use_after_close_raises(use: str) -> None:
    with opened(QWEN35, max_ctx=64) as engine:
        pass
    with pytest.raises(EngineClosed, match="Engine is closed"):
        USES[use](engine)
    assert engine.info.n_ctx == 64  # what it was is still known
    with engine, pytest.raises(EngineClosed):  # entering again opens nothing
        USES[use](engine)


def test_streams_end_when_their_engine_is_closed(long_llama: Path) -> None:
    engine = opened(long_llama, max_ctx=65536)
    running = engine.stream(prompt(5), ignore_eos=True)
    first = next(running)
    waiting = engine.stream(prompt(5, seed=2), ignore_eos=True)
    engine.close()
    rest = list(running)
    assert running.result.finish_reason == "cancelled"
    assert running.result.text == "".join(piece.text for piece in [first, *rest])
    with pytest.raises(EngineClosed):
        next(waiting)
    for stream in (running, waiting):
        assert list(stream) == []
        stream.close()
    with pytest.raises(EngineClosed):
        _ = waiting.result


def test_an_exception_in_the_block_closes_the_engine_and_is_the_one_that_is_seen(long_llama: Path) -> None:
    before = threading.active_count()
    engine = opened(long_llama, max_ctx=65536)
    stream = engine.stream(prompt(5), ignore_eos=True)

    def fail() -> None:
        with engine:
            next(stream)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert threading.active_count() == before
    assert stream.result.finish_reason == "cancelled"
    with pytest.raises(EngineClosed):
        engine.generate([1])


def test_a_failed_request_leaves_the_engine_usable() -> None:
    with opened(LLAMA, max_ctx=256, chunk=8, prefix_cache_max_mib=0) as engine:
        alone = engine.generate(prompt(100), max_tokens=5).tokens

        def fail(progress: Progress) -> None:
            if progress.done >= 32:
                raise ZeroDivisionError(progress.done)

        stream = engine.stream(prompt(100), progress=fail)
        with pytest.raises(ZeroDivisionError, match="32"):
            list(stream)
        with pytest.raises(ZeroDivisionError, match="32"):
            engine.generate(prompt(100), progress=fail)
        assert engine.generate(prompt(100), max_tokens=5).tokens == alone


# loading that fails


def load_failures(tmp_path: Path) -> Iterator[tuple[Callable[[], Engine], type[Exception]]]:
    yield lambda: opened(tmp_path / "absent.gguf"), DflashError
    yield lambda: opened(LLAMA, max_ctx=4096), UsageError
    yield lambda: opened(LLAMA, device="none"), UsageError
    yield lambda: opened(edited(LLAMA, tmp_path / "name.gguf", keys={"general.name": 5})), DamagedFileError
    yield (
        lambda: opened(edited(LLAMA, tmp_path / "eps.gguf", without=("llama.embedding_length",))),
        DflashError,
    )


@on_linux
def test_a_load_that_fails_anywhere_frees_what_it_had_made(tmp_path: Path) -> None:
    before = threading.active_count()
    for load, error in load_failures(tmp_path):
        with leaks_collected() as leaks:
            assert isinstance(error_of(load), error)
        assert leaks == []
        assert threading.active_count() == before
        assert mappings(tmp_path) == mappings(LLAMA) == 0


@on_linux
def test_a_progress_callback_that_fails_ends_the_load_cleanly() -> None:
    n_reports = 0

    def count(_: Progress) -> None:
        nonlocal n_reports
        n_reports += 1

    opened(QWEN3, progress=count).close()
    assert n_reports > 3
    before = threading.active_count(), open_files()
    for failing in (1, n_reports // 2, n_reports):
        left = failing

        def fail(_: Progress) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise ZeroDivisionError

        with leaks_collected() as leaks:
            assert isinstance(error_of(lambda: opened(QWEN3, progress=fail)), ZeroDivisionError)
        assert leaks == []
        assert (threading.active_count(), open_files(), mappings(QWEN3)) == (*before, 0)


def test_load_progress_reaches_its_total() -> None:
    reports: list[Progress] = []
    with opened(QWEN3, progress=reports.append):
        pass
    assert {report.phase for report in reports} == {"load"}
    assert [report.done for report in reports] == sorted(report.done for report in reports)
    assert reports[-1].done == reports[-1].total > 0
    assert {report.total for report in reports} == {reports[-1].total}


# owners that forget to close


def test_a_forgotten_engine_warns_and_is_closed() -> None:
    engine = opened(LLAMA, max_ctx=64)
    thread = engine._thread._thread
    gone = weakref.ref(engine)
    engines = [engine]
    del engine
    with pytest.warns(ResourceWarning, match="Engine was not closed"):
        engines.clear()
    assert gone() is None
    assert thread is not None
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_a_forgotten_engine_is_closed_even_where_warnings_are_errors() -> None:
    engine = opened(LLAMA, max_ctx=64)
    thread = engine._thread._thread
    assert thread is not None
    try:
        with leaks_collected() as leaks, warnings.catch_warnings():
            warnings.simplefilter("error")
            del engine
        assert len(leaks) == 1
        thread.join(0.5)
        assert not thread.is_alive()
    finally:
        for owner in gc.get_objects():  # so that the failure is this test's alone
            if type(owner).__name__ == "EngineThread" and owner._thread is thread:
                owner.close()


def test_a_stream_keeps_its_engine_open() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        stream = opened(LLAMA, max_ctx=64).stream(prompt(5), max_tokens=30, ignore_eos=True)
        gc.collect()
        assert sum(len(piece.tokens) for piece in stream) == 30
        del stream
        gc.collect()


END_WITHOUT_CLOSING = """
import sys
from pathlib import Path
from tests.engine.tiny import opened
engine = opened(Path(sys.argv[1]), max_ctx=65536)
stream = engine.stream([1, 2], ignore_eos=True)
next(stream)
print("reached", flush=True)
if sys.argv[2] == "raise":
    raise RuntimeError("on purpose")
if sys.argv[2] == "exit":
    sys.exit(7)
"""


@pytest.mark.parametrize(("how", "status"), [("fall off", 0), ("exit", 7), ("raise", 1)])
def test_a_program_that_ends_while_an_answer_runs_ends_as_it_would_without_it(
    long_llama: Path, how: str, status: int
) -> None:
    done = program(END_WITHOUT_CLOSING, long_llama, how, warnings="default")
    assert (done.returncode, done.stdout) == (status, "reached\n")
    assert "an Engine was not closed" in done.stderr
    assert ("on purpose" in done.stderr) == (how == "raise")


def test_options_of_an_engine_are_those_that_it_was_opened_with() -> None:
    options = EngineOptions(model=LLAMA, max_ctx=64, threads=1, device="cpu", nfc=False)
    with Engine(options) as engine:
        assert engine.options is options
        assert (engine.info.n_ctx, engine.info.threads, engine.info.device) == (64, 1, "CPU")


CHILD = """
import os, sys
from pathlib import Path
from tests.engine.tiny import LLAMA, opened
from pyggml_dflash import BackendError, Engine
with opened(LLAMA, max_ctx=256, threads=2) as engine:
    expected = engine.generate([1, 2, 3], max_tokens=3).tokens
    child = os.fork()
    if child == 0:
        for use in (engine.generate, engine.logits, engine.detokenize, engine.score):
            try:
                use([1, 2])
            except BackendError as error:
                assert "fork" in str(error)
            else:
                os._exit(1)
        engine.close()
        with opened(LLAMA, max_ctx=256, threads=2) as own:
            os._exit(0 if own.generate([1, 2, 3], max_tokens=3).tokens == expected else 2)
    print(os.waitpid(child, 0)[1], engine.generate([1, 2, 3], max_tokens=3).tokens == expected)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_is_told_and_can_open_its_own_engine() -> None:
    """B49: a fork after loading."""
    done = program(CHILD, warnings="default")
    assert (done.returncode, done.stdout) == (0, "0 True\n"), done.stderr


CHILD_READS = """
import os, sys
from pathlib import Path
from tests.engine.tiny import opened
from pyggml_dflash import BackendError
with opened(Path(sys.argv[1]), max_ctx=65536) as engine:
    stream = engine.stream([1, 2], ignore_eos=True)
    next(stream)
    child = os.fork()
    if child == 0:
        try:
            while True:
                next(stream)
        except BackendError:
            os._exit(0)
    for _ in range(300):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        __import__("time").sleep(0.01)
    else:
        os.kill(child, 9)
        status = os.waitpid(child, 0)[1]
    stream.close()
    print(status)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_stream_read_in_a_forked_child_raises(long_llama: Path) -> None:
    assert program(CHILD_READS, long_llama, warnings="default").stdout == "0\n"


INTERRUPTED_ANYWHERE = """
import gc, os, random, signal, sys, threading, time
from tests.engine.tiny import QWEN3, opened
random.seed(1)
n_interrupted = 0
def interrupt_soon(delay_s):
    time.sleep(delay_s)
    os.kill(os.getpid(), signal.SIGINT)
opened(QWEN3).close()
for _ in range(120):
    sender = threading.Thread(target=interrupt_soon, args=(0.025 * random.random(),))
    try:
        sender.start()
        with opened(QWEN3):
            pass
        sender.join()
        time.sleep(0.001)
    except KeyboardInterrupt:
        n_interrupted += 1
    sender.join()
gc.collect()
for _ in range(300):  # Python's own list can keep one whose start was interrupted, although it has ended
    if len(sys._current_frames()) == 1:
        break
    time.sleep(0.01)
print(n_interrupted > 60, len(sys._current_frames()))
"""


@pytest.mark.skipif(os.name != "posix", reason="needs a signal that is sent to one process")
def test_an_interrupt_anywhere_in_opening_leaves_no_thread() -> None:
    done = program(INTERRUPTED_ANYWHERE, warnings="ignore")
    assert (done.returncode, done.stdout) == (0, "True 1\n"), done.stderr


# memory that lacks


def charges(monkeypatch: pytest.MonkeyPatch, *, fails: Callable[[list[str]], bool]) -> list[str]:
    """Labels of what is charged from now on; a charge is refused where they make `fails` true."""
    charge, seen = Ledger.charge, list[str]()

    def noted(ledger: Ledger, device: str, label: str, n_bytes: int) -> Charge:
        if not ledger.dry:
            seen.append(label)
            if fails(seen):
                raise DeviceMemoryError(what=label, wanted=n_bytes, free=0, device=device)
        return charge(ledger, device, label, n_bytes)

    monkeypatch.setattr(Ledger, "charge", noted)
    return seen


@pytest.mark.parametrize("which", ["first", "last"])
def test_a_load_that_lacks_memory_anywhere_says_so_and_leaves_nothing(
    which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"max_ctx": 256, "chunk": 64, "slots": 2, "spec": "mtp"}

    def opened_once() -> list[str]:
        with monkeypatch.context() as patch:
            seen = charges(patch, fails=lambda _: False)
            with opened(QWEN35, device_cap={"CPU": 2**30}, **options):
                return list(seen)

    order = opened_once()
    places = {
        label: order.index(label) if which == "first" else len(order) - 1 - order[::-1].index(label)
        for label in order
    }
    assert {"products", "graphs", "draft graphs", "state", "inputs"} <= set(places)
    for n in places.values():
        with leaks_collected() as leaks, monkeypatch.context() as patch:
            seen = charges(patch, fails=lambda seen, n=n: len(seen) > n)  # type: ignore[misc]
            failure = error_of(lambda: opened(QWEN35, device_cap={"CPU": 2**30}, **options))
        assert isinstance(failure, DeviceMemoryError), failure
        assert seen[-1] in str(failure)  # where it was the last time, but for steps that time decides
        assert leaks == []
