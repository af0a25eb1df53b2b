"""Long-lived tensors: bytes go in and come out, and an allocation that fails leaves nothing."""

from __future__ import annotations

import logging
import mmap
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pyggml_dflash.errors import DeviceMemoryError
from pyggml_dflash.ggml.arena import (
    MappedArena,
    TensorArena,
    host_view,
    read,
    read_bytes,
    write,
    zero,
)
from pyggml_dflash.ggml.device import Backend, choose_device
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.ledger import Ledger
from tests.engine.apart import program


@pytest.fixture
def cpu() -> Iterator[Backend]:
    backend = Backend(choose_device("CPU"), threads=1)
    yield backend
    backend.close()


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


@pytest.fixture
def arena(cpu: Backend, ledger: Ledger) -> Iterator[TensorArena]:
    """An arena for four tensors; closed with the test."""
    arena = TensorArena(cpu, ledger, "test", n_tensors=4)
    yield arena
    arena.close()


def test_numbers_come_back_in_numpys_order(arena: TensorArena) -> None:
    kinds = (
        (ElementType.F32, np.float32),
        (ElementType.F16, np.float16),
        (ElementType.I32, np.int32),
        (ElementType.I64, np.int64),
    )
    tensors = [arena.declare(kind.label, kind, 5, 3, 2) for kind, _ in kinds]
    arena.allocate()
    for tensor, (kind, dtype) in zip(tensors, kinds, strict=True):
        values = np.arange(30).reshape(2, 3, 5).astype(dtype)
        write(tensor, values)
        assert (tensor.shape, tensor.type, tensor.name) == ((5, 3, 2, 1), kind, kind.label)
        assert tensor.n_elements == 30
        back = read(tensor)
        assert back.dtype == dtype
        assert back[0].tolist() == values.tolist()
        assert (
            read_bytes(tensor, values.itemsize, 2 * values.itemsize)
            == values.tobytes()[values.itemsize : 3 * values.itemsize]
        )


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for resident pages")
def test_zeros_become_resident_when_they_are_touched(arena: TensorArena) -> None:
    tensor = arena.declare("x", ElementType.F32, 1024, 64 * 1024)  # 256 MiB
    before = resident_pages()
    arena.allocate(zero=True)
    fresh = resident_pages() - before
    assert arena.n_bytes >= tensor.n_bytes
    assert fresh * mmap.PAGESIZE < tensor.n_bytes // 50
    view = host_view(tensor).reshape(-1)
    view[: len(view) // 4] = 1
    assert resident_pages() - before >= tensor.n_bytes // 4 // mmap.PAGESIZE
    assert not view[len(view) // 4 :].any()


def resident_pages() -> int:
    """Pages of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1])


def test_a_view_of_host_memory_is_the_tensor_itself(arena: TensorArena) -> None:
    tensor = arena.declare("x", ElementType.F32, 4, 2)
    arena.allocate(zero=True)
    view, copy = host_view(tensor), read(tensor)
    view[0, 0, 1, 2] = 7
    assert tensor.is_host
    assert read(tensor)[0, 0, 1, 2] == 7
    assert copy.max() == 0
    zero(tensor, 16, 16)
    assert view.max() == 0
    write(tensor, np.full(4, 3, np.float32), 16)
    assert view.reshape(2, 4).tolist() == [[0] * 4, [3] * 4]
    zero(tensor)
    assert view.max() == 0


def test_a_write_beyond_the_tensor_is_caught(arena: TensorArena) -> None:
    tensor = arena.declare("x", ElementType.F32, 4)
    arena.allocate()
    with pytest.raises(AssertionError):
        write(tensor, np.zeros(5, np.float32))
    with pytest.raises(AssertionError):
        write(tensor, np.zeros(1, np.float32), 16)


def test_an_arena_takes_no_more_tensors_than_it_was_made_for(arena: TensorArena) -> None:
    for name in "abcd":
        arena.declare(name, ElementType.F32, 4)
    with pytest.raises(AssertionError, match="too small"):
        arena.declare("e", ElementType.F32, 4)


def test_an_arena_charges_what_it_takes_until_it_is_closed(arena: TensorArena, ledger: Ledger) -> None:
    arena.declare("a", ElementType.F32, 1000)
    arena.declare("b", ElementType.Q8_0, 64, 3)
    wanted = arena.measure()
    assert wanted >= 4000 + 3 * 2 * 34
    assert ledger.charged("CPU") == 0
    arena.allocate()
    assert arena.n_bytes == wanted
    assert ledger.by_label("CPU") == {"test": wanted}
    arena.close()
    arena.close()
    assert ledger.charged("CPU") == 0
    assert ledger.peak("CPU") == wanted


def test_an_arena_that_is_closed_before_it_is_allocated_took_nothing(
    arena: TensorArena, ledger: Ledger
) -> None:
    arena.declare("a", ElementType.F32, 1000)
    arena.close()
    assert ledger.peak("CPU") == 0


def test_a_cap_refuses_before_ggml_is_asked(cpu: Backend) -> None:
    for missing in (1, 0):
        ledger = Ledger(caps={"CPU": 4096 - missing})
        arena = TensorArena(cpu, ledger, "test", n_tensors=1)
        arena.declare("a", ElementType.F32, 1024)
        assert arena.measure() == 4096
        if missing:
            with pytest.raises(DeviceMemoryError) as raised:
                arena.allocate()
            assert (raised.value.what, raised.value.wanted, raised.value.free) == ("test", 4096, 4095)
            assert ledger.charged("CPU") == 0
        else:
            arena.allocate()
        arena.close()
        assert ledger.charged("CPU") == 0


REFUSED = """
import logging, resource
from pyggml_dflash.errors import DeviceMemoryError
from pyggml_dflash.ggml.arena import TensorArena, read, write
from pyggml_dflash.ggml.device import Backend, choose_device
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.ledger import Ledger
import numpy as np
lines = []
class Note(logging.Handler):
    def emit(self, record):
        lines.append((record.name, record.levelname, record.getMessage()))
logging.getLogger().addHandler(Note())
cpu, ledger = Backend(choose_device("CPU"), threads=1), Ledger()
resource.setrlimit(resource.RLIMIT_AS, (2**31, -1))
for _ in range(2):
    arena = TensorArena(cpu, ledger, "test", n_tensors=1)
    arena.declare("a", ElementType.F32, 2**30)
    try:
        arena.allocate()
    except DeviceMemoryError as error:
        print(error.what, error.wanted, ledger.charged("CPU"))
    arena.close()
arena = TensorArena(cpu, ledger, "test", n_tensors=1)
small = arena.declare("a", ElementType.F32, 2)
arena.allocate()
write(small, np.ones(2, np.float32))
print(read(small).tolist())
arena.close()
cpu.close()
print({(name, level) for name, level, _ in lines}, any("insufficient memory" in text for *_, text in lines))
"""


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTNEED"), reason="needs a limit on the address space")
def test_memory_that_the_system_refuses_is_our_error_and_is_logged() -> None:
    done = program(REFUSED)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    failed, again, numbers, log = done.stdout.splitlines()
    assert failed == again == f"test {2**32} 0"
    assert numbers == "[[[[1.0, 1.0]]]]"
    assert log == "{('pyggml_dflash.ggml', 'ERROR')} True"


def test_ggml_is_silent_unless_somebody_listens(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        Backend(choose_device("CPU"), threads=1).close()
    assert {record.name for record in caplog.records} <= {"pyggml_dflash.ggml"}
    assert {record.levelname for record in caplog.records} <= {"DEBUG"}


def test_tensors_lie_in_a_mapped_file_without_a_copy(tmp_path: Path) -> None:
    values = np.arange(4096, dtype=np.float32)
    path = tmp_path / "numbers"
    path.write_bytes(values.tobytes())
    with path.open("rb") as file:
        memory = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    arena = MappedArena(memory, n_tensors=2)
    first = arena.place("first", ElementType.F32, (8, 2), 0)
    last = arena.place("last", ElementType.F32, (32,), memory.nbytes - 128)
    assert read(first).reshape(-1).tolist() == list(range(16))
    assert read(last).reshape(-1).tolist() == list(range(4064, 4096))
    assert host_view(last).__array_interface__["data"][0] == memory.ctypes.data + memory.nbytes - 128
    arena.close()


def test_a_tensor_beyond_the_mapping_is_caught() -> None:
    memory = np.frombuffer(mmap.mmap(-1, 4096), np.uint8)
    arena = MappedArena(memory, n_tensors=2)
    with pytest.raises(AssertionError):
        arena.place("x", ElementType.F32, (32,), 4096 - 64)
    arena.close()


HEADERS = """
import os
from pathlib import Path
from pyggml_dflash.ggml.arena import Context
from pyggml_dflash.ggml.ffi import lib

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def filled(part):
    context = Context(20_000)
    for _ in range(20_000 // part):
        lib.ggml_new_tensor_1d(context.ptr, lib.GGML_TYPE_F32, 1)
    return context

filled(1).close()  # a heap that was asked for so much once keeps such pieces from then on
before = resident()
contexts = [filled(1) for _ in range(10)]
n_bytes = contexts[0].n_bytes
full = resident() - before
while len(contexts) > 1:
    contexts.pop(0).close()
left = resident() - before
contexts += [filled(10) for _ in range(10)]
some = resident() - before - left
for context in contexts:
    context.close()
print(full / n_bytes, left / n_bytes, some / n_bytes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, which only Linux has")
def test_headers_take_what_is_filled_and_give_it_back() -> None:
    done = program(HEADERS)
    assert done.returncode == 0, done.stderr
    full, left, some = map(float, done.stdout.split())
    assert full > 9
    assert left < 2
    assert some < 2
