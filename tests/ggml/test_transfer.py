"""Copies of bytes between tensors arrive where they should, and nothing beside them changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
import pytest

from pyggml_dflash.ggml.arena import TensorArena, read_bytes, write
from pyggml_dflash.ggml.device import Backend, choose_device, devices
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.ledger import Ledger
from pyggml_dflash.ggml.tensor import Tensor
from pyggml_dflash.ggml.transfer import Transfer

N_BYTES = 34 * 64  # of a Q8_0 tensor of 32 x 64


@pytest.fixture(params=["CPU", pytest.param("GPU", marks=pytest.mark.gpu)])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """The CPU, and where there is one the first GPU."""
    if request.param == "CPU":
        info = choose_device("CPU")
    else:
        gpus = [device for device in devices() if device.kind in ("gpu", "igpu")]
        if not gpus:
            pytest.skip("no GPU")
        info = gpus[0]
    backend = Backend(info, threads=1)
    yield backend
    backend.close()


@pytest.fixture
def pair(backend: Backend) -> Iterator[tuple[Tensor, Tensor]]:
    """Two tensors of other types with as many bytes, filled with different noise."""
    arena = TensorArena(backend, Ledger(), "test", n_tensors=2)
    a, b = arena.declare("a", ElementType.Q8_0, 32, 64), arena.declare("b", ElementType.I8, N_BYTES)
    arena.allocate(zero=True)
    rng = np.random.default_rng(5)
    for tensor in (a, b):
        write(tensor, rng.integers(0, 256, N_BYTES, dtype=np.uint8))
    yield a, b
    arena.close()


@pytest.mark.parametrize("way", ["copy", "copy_on_device"])
@pytest.mark.parametrize(
    ("start", "to", "n"), [(0, 0, N_BYTES), (34, 0, 68), (1, 777, 5), (N_BYTES - 1, 3, 1)]
)
def test_a_run_of_bytes_arrives_and_the_rest_stays(
    backend: Backend,
    pair: tuple[Tensor, Tensor],
    way: Literal["copy", "copy_on_device"],
    start: int,
    to: int,
    n: int,
) -> None:
    a, b = pair
    source, before = read_bytes(a, 0, N_BYTES), read_bytes(b, 0, N_BYTES)
    with Transfer(backend) as transfer:
        (transfer.copy if way == "copy" else transfer.copy_on_device)(a, start, b, to, n)
    assert read_bytes(a, 0, N_BYTES) == source
    assert read_bytes(b, 0, N_BYTES) == before[:to] + source[start : start + n] + before[to + n :]


def test_copies_go_between_the_device_and_the_system(backend: Backend, pair: tuple[Tensor, Tensor]) -> None:
    host = Backend(choose_device("CPU"), threads=1)
    arena = TensorArena(host, Ledger(), "test", n_tensors=1)
    middle = arena.declare("middle", ElementType.I8, N_BYTES)
    arena.allocate()
    a, b = pair
    with Transfer(backend) as transfer:
        transfer.copy(a, 0, middle, 0, N_BYTES)
        transfer.wait()
        transfer.copy(middle, 0, b, 0, N_BYTES)
    assert read_bytes(b, 0, N_BYTES) == read_bytes(middle, 0, N_BYTES) == read_bytes(a, 0, N_BYTES)
    assert middle.memory == "CPU"
    arena.close()
    host.close()


@pytest.mark.parametrize(("start", "to", "n"), [(1, 0, N_BYTES), (0, 1, N_BYTES), (-1, 0, 1)])
def test_a_copy_outside_of_a_tensor_is_a_mistake(
    backend: Backend, pair: tuple[Tensor, Tensor], start: int, to: int, n: int
) -> None:
    with Transfer(backend) as transfer, pytest.raises(AssertionError):
        transfer.copy(pair[0], start, pair[1], to, n)


def test_pinned_memory_is_the_devices_and_can_be_allocated(backend: Backend) -> None:
    found = backend.pinned_buffer_type
    if backend.info.kind == "cpu":
        assert found is None
        return
    assert found is not None
    arena = TensorArena(backend, Ledger(), "test", n_tensors=1, buffer_type=found)
    tensor = arena.declare("pinned", ElementType.I8, N_BYTES)
    arena.allocate()
    assert tensor.is_host
    assert tensor.memory != "CPU"
    arena.close()
