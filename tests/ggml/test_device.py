"""Devices are what ggml lists, with memory that makes sense; layouts that crash are not offered."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyggml_dflash.errors import BackendError, EngineClosed, UsageError
from pyggml_dflash.ggml.arena import TensorArena
from pyggml_dflash.ggml.device import (
    UNSAFE_LAYOUTS,
    Backend,
    DeviceInfo,
    choose_device,
    devices,
    host_memory,
    memory_now,
    physical_cores,
    spelled,
)
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.ledger import Ledger
from pyggml_dflash.ggml.ops import GraphBuilder
from pyggml_dflash.ggml.placement import (
    buffer_type_name,
    can_compute,
    check_supported,
    repacked_buffer_type,
)
from pyggml_dflash.model.weights import NO_WEIGHTS


@pytest.fixture
def cpu() -> Iterator[Backend]:
    backend = Backend(choose_device("CPU"), threads=1)
    yield backend
    backend.close()


def test_there_is_one_cpu_with_memory_that_makes_sense() -> None:
    found = devices()
    assert len({device.name for device in found}) == len(found)
    (cpu,) = (device for device in found if device.kind == "cpu")
    assert cpu.is_host
    assert cpu.description
    assert 0 < cpu.memory_free <= cpu.memory_total
    for device in found:
        assert 0 <= device.memory_free <= device.memory_total or device.kind in ("igpu", "meta", "accel")


def test_memory_is_read_of_the_devices_that_are_named() -> None:
    found = memory_now(["CPU", "rpc://127.0.0.1:1", "none"])
    assert found.keys() == {"CPU"}
    free, total = found["CPU"]
    assert 0 < free < total == host_memory()[1]


def test_host_memory_is_at_most_what_the_system_has() -> None:
    free, total = host_memory()
    assert 0 < free <= total
    assert total <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(
    not Path("/sys/fs/cgroup/memory.max").exists(), reason="no cgroup (version 2) limits this process"
)
def test_host_memory_stays_within_a_cgroup_limit() -> None:
    limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    assert limit == "max" or host_memory()[1] <= int(limit)


def test_a_device_is_chosen_by_its_name_in_any_case() -> None:
    for name in ("CPU", "cpu", "Cpu"):
        assert choose_device(name).kind == "cpu"
    for device in devices():
        assert choose_device(device.name).name == device.name


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cuda:0", "cuda0"),
        ("HIP:1", "rocm1"),
        ("rocm:0", "rocm0"),
        ("Vulkan:12", "vulkan12"),
        ("CPU", "cpu"),
        ("cuda:x", "cuda:x"),
    ],
)
def test_a_back_end_and_a_number_are_a_name(name: str, expected: str) -> None:
    """As in the profile of two AMD devices; ggml calls those of HIP 'ROCm0' and so on."""
    assert spelled(name) == expected


@pytest.mark.parametrize("name", ["", "GPU99", "CPU ", "none", "\0"])
def test_an_unknown_device_is_refused_with_those_that_exist(name: str) -> None:
    with pytest.raises(UsageError, match=r"this build has .*CPU"):
        choose_device(name)


def test_without_a_name_the_first_gpu_is_chosen_or_the_cpu() -> None:
    kinds = [device.kind for device in devices()]
    expected = next(kind for kind in ("gpu", "igpu", "cpu") if kind in kinds)
    assert choose_device(None).kind == expected


def test_cores_are_counted_once_and_only_those_that_may_be_used() -> None:
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert allowed is not None
    assert 1 <= physical_cores() <= allowed


def test_a_backend_computes_with_the_threads_that_were_asked_for() -> None:
    for threads, expected in ((1, 1), (3, 3), (None, physical_cores())):
        backend = Backend(choose_device("CPU"), threads=threads)
        assert backend.n_threads == expected
        assert (backend.name, backend.is_host) == ("CPU", True)
        assert 0 < backend.memory_free() <= backend.info.memory_total
        backend.synchronize()
        backend.close()


def test_a_closed_backend_raises() -> None:
    backend = Backend(choose_device("CPU"), threads=1)
    backend.close()
    backend.close()
    with pytest.raises(EngineClosed, match="Backend"):
        backend.synchronize()


def test_a_device_that_ggml_does_not_know_is_an_error() -> None:
    unknown = DeviceInfo(
        name="CUDA99",
        description="",
        kind="gpu",
        registry="CUDA",
        memory_free=0,
        memory_total=0,
        is_host=False,
    )
    with pytest.raises(BackendError, match="CUDA99"):
        Backend(unknown)


# layouts


def test_layouts_that_crash_are_never_offered(cpu: Backend) -> None:
    assert "AMX" in UNSAFE_LAYOUTS
    assert UNSAFE_LAYOUTS.isdisjoint(buffer_type_name(kind) for kind in cpu.extra_buffer_types())


@pytest.mark.parametrize("element", ElementType)
def test_a_layout_is_chosen_for_products_only_and_is_a_safe_one(cpu: Backend, element: ElementType) -> None:
    if element in NO_WEIGHTS:
        return
    for shape in ((256, 64), (512, 7), (256, 1), (256, 64, 8)):
        use = "experts" if len(shape) == 3 else "matmul"
        layout = repacked_buffer_type(cpu, element, shape, use)  # type: ignore[arg-type]
        assert layout is None or buffer_type_name(layout) not in UNSAFE_LAYOUTS
        assert can_compute(cpu, element, shape, use)  # type: ignore[arg-type]
        for other in ("rows", "vector"):
            assert repacked_buffer_type(cpu, element, shape, other) is None


def test_vectors_are_single_precision(cpu: Backend) -> None:
    assert can_compute(cpu, ElementType.F32, (64,), "vector")
    assert not can_compute(cpu, ElementType.F16, (64,), "vector")


def test_an_operation_that_the_device_lacks_is_named(cpu: Backend) -> None:
    """No kernel writes IQ1_S."""
    arena = TensorArena(cpu, Ledger(), "x", n_tensors=1)
    x = arena.declare("x", ElementType.F32, 256)
    builder = GraphBuilder(64)
    builder.output(builder.cast(x, ElementType.IQ1_S))
    with pytest.raises(BackendError, match=r"CPU cannot run CPY.*(?i:iq1_s)"):
        check_supported(cpu, builder)
    builder.close()
    arena.close()
