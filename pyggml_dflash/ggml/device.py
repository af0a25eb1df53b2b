"""Devices that ggml lists, their memory, and a backend (a stream) on one of them. Layer 1."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from pyggml_dflash.errors import BackendError, DeviceLostError, UsageError
from pyggml_dflash.ggml import rpc
from pyggml_dflash.ggml.ffi import CData, c_string, ffi, lib
from pyggml_dflash.ggml.handle import Handle, check_pointer

# ggml 0.25.3 executes AMX tile instructions on threads without a valid tile configuration, which
# ends the process (llama.cpp issue 20824, pull request 26954); every batch above one row crashed.
UNSAFE_LAYOUTS: Final = frozenset({"AMX"})

# On Hopper, decode graphs with flash attention that ggml 0.25.3 replays through programmatic dependent launch
# compute wrong logits (off by up to 17 on an H200; 0.3, as without graphs, once it is off).
SAFE_ENVIRONMENT: Final = {"GGML_CUDA_PDL": "0"}

DeviceKind = Literal["cpu", "gpu", "igpu", "accel", "meta", "rpc"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """A piece of hardware as ggml lists it; memory in bytes at the time of asking."""

    name: str
    description: str
    kind: DeviceKind
    registry: str
    memory_free: int
    memory_total: int
    is_host: bool


def _kinds() -> dict[int, DeviceKind]:
    return {
        lib.GGML_BACKEND_DEVICE_TYPE_CPU: "cpu",
        lib.GGML_BACKEND_DEVICE_TYPE_GPU: "gpu",
        lib.GGML_BACKEND_DEVICE_TYPE_IGPU: "igpu",
        lib.GGML_BACKEND_DEVICE_TYPE_ACCEL: "accel",
        lib.GGML_BACKEND_DEVICE_TYPE_META: "meta",
    }


def host_memory() -> tuple[int, int]:
    """(free, total) bytes of the system: what the kernel calls available, within a cgroup limit.

    ggml's CPU device reports its total as free, so it is not asked.
    """
    free = total = 0
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        free = int(fields["MemAvailable"].split()[0]) * 1024
        total = int(fields["MemTotal"].split()[0]) * 1024
    else:
        names = os.sysconf_names
        page = os.sysconf("SC_PAGE_SIZE")
        total = os.sysconf("SC_PHYS_PAGES") * page
        free = os.sysconf("SC_AVPHYS_PAGES") * page if "SC_AVPHYS_PAGES" in names else total
    limit, used = _cgroup_limit()
    if limit is not None:
        total, free = min(total, limit), min(free, max(0, limit - used))
    return free, total


def _cgroup_limit() -> tuple[int | None, int]:
    root = Path("/sys/fs/cgroup")
    try:
        limit = (root / "memory.max").read_text().strip()
        used = int((root / "memory.current").read_text())
        stat = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None, 0
    reclaimable = int(stat.get("inactive_file", 0))
    return (None, 0) if limit == "max" else (int(limit), max(0, used - reclaimable))


def _memory(dev: CData) -> tuple[int, int]:
    """(free, total) bytes as the device tells."""
    sizes = ffi.new("size_t[2]")
    lib.ggml_backend_dev_memory(dev, sizes, sizes + 1)
    return int(sizes[0]), int(sizes[1])


def _info(dev: CData) -> DeviceInfo:
    kind = _kinds().get(lib.ggml_backend_dev_type(dev), "accel")
    if kind == "cpu":
        free, total = host_memory()
    else:
        free, total = _memory(dev)
    return DeviceInfo(
        name=c_string(lib.ggml_backend_dev_name(dev)),
        description=c_string(lib.ggml_backend_dev_description(dev)).strip(),
        kind=kind,
        registry=c_string(lib.ggml_backend_reg_name(lib.ggml_backend_dev_backend_reg(dev))),
        memory_free=free,
        memory_total=total,
        is_host=bool(lib.ggml_backend_buft_is_host(lib.ggml_backend_dev_buffer_type(dev))),
    )


def devices() -> tuple[DeviceInfo, ...]:
    """Every device of this build, in ggml's order, with its memory now."""
    return tuple(_info(lib.ggml_backend_dev_get(i)) for i in range(lib.ggml_backend_dev_count()))


def memory_now(names: Iterable[str]) -> dict[str, tuple[int, int]]:
    """(free, total) bytes of this machine's devices that have one of the names; workers are not asked."""
    wanted = set(names)
    listed = (lib.ggml_backend_dev_get(i) for i in range(lib.ggml_backend_dev_count()))
    infos = [_info(dev) for dev in listed if c_string(lib.ggml_backend_dev_name(dev)) in wanted]
    return {info.name: (info.memory_free, info.memory_total) for info in infos}


def ggml_version() -> str:
    """Version and commit of the ggml that was built."""
    return f"{c_string(lib.ggml_version())} {c_string(lib.ggml_commit())}"


def backend_features() -> dict[str, dict[str, str]]:
    """What each back end of this build was compiled with, as ggml tells: {'CPU': {'AVX2': '1'}}."""
    found: dict[str, dict[str, str]] = {}
    for i in range(lib.ggml_backend_reg_count()):
        registry = lib.ggml_backend_reg_get(i)
        features = found.setdefault(c_string(lib.ggml_backend_reg_name(registry)), {})
        address = lib.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_get_features")
        if address == ffi.NULL:
            continue
        entry = ffi.cast("ggml_backend_get_features_t", address)(registry)
        while entry != ffi.NULL and entry.name != ffi.NULL:
            features[c_string(entry.name)] = c_string(entry.value)
            entry += 1
    return found


def worker_devices(name: str) -> tuple[DeviceInfo, ...]:
    """Every device of the worker at 'rpc://HOST:PORT'; nobody there raises `BackendError`."""
    endpoint, _ = rpc.split_name(name)
    return tuple(
        DeviceInfo(
            name=d.name,
            description=f"worker at {endpoint}",
            kind="rpc",
            registry="RPC",
            memory_free=d.memory_free,
            memory_total=d.memory_total,
            is_host=False,
        )
        for d in rpc.ask_worker(endpoint)
    )


def spelled(name: str) -> str:
    """A device's name as ggml has it, in small letters: 'hip:1' is 'rocm1', 'cuda:0' is 'cuda0'."""
    found = re.fullmatch(r"(cuda|hip|rocm|vulkan):([0-9]+)", name.lower())
    if found is None:
        return name.lower()
    return ("rocm" if found[1] == "hip" else found[1]) + found[2]


def named_device(
    name: str, present: tuple[DeviceInfo, ...] | None = None, *, option: str = "device"
) -> DeviceInfo:
    """The device called `name` (any case) among those of this build, or a worker's at 'rpc://HOST:PORT'.

    'cuda:0' and the like are other spellings of ggml's names. An unknown name raises `UsageError` with the
    `option` that gave it and the names that exist.
    """
    if name.lower().startswith(rpc.SCHEME):
        _, index = rpc.split_name(name.lower(), option)
        found = worker_devices(name.lower())
        if index >= len(found):
            raise UsageError(f"{option} is {name!r}; that worker has {len(found)}, counted from 0")
        return found[index]
    present = devices() if present is None else present
    wanted = spelled(name)
    for device in present:
        if device.name.lower() == wanted:
            return device
    names = ", ".join(d.name for d in present)
    raise UsageError(f"{option} is {name!r}; this build has {names}")


def choose_device(name: str | None) -> DeviceInfo:
    """The device called `name`, as `named_device` finds it, or the first GPU, or the CPU."""
    present = devices()
    if name is not None:
        return named_device(name, present)
    for kind in ("gpu", "igpu", "cpu"):
        for device in present:
            if device.kind == kind:
                return device
    raise BackendError("ggml lists no device that can compute")


def physical_cores() -> int:
    """Cores this process may run on, hyper-threads counted once."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    seen: set[tuple[str, str]] = set()
    for cpu in allowed:
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        try:
            package = (topology / "physical_package_id").read_text().strip()
            seen.add((package, (topology / "core_id").read_text().strip()))
        except OSError:
            return len(allowed)
    return max(1, len(seen))


def check_threads(n: int) -> None:
    """Raise `BackendError` if this process may not start `n` threads; OpenMP would end the process.

    The threads are started and ended again, all at once.
    """
    go = threading.Event()
    started: list[threading.Thread] = []
    try:
        for _ in range(n - 1):  # the caller's own thread computes too
            thread = threading.Thread(target=go.wait, daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError as error:
        raise BackendError(
            f"threads is {n}; the system lets this process start only {len(started) + 1}"
        ) from error
    finally:
        go.set()
        for thread in started:
            thread.join()


class Backend(Handle):
    """A stream of work on one device. Freed last of all native objects.

    `peers` are backends of other devices that graphs of this one may use too; it does not own them. The
    backend `is_busy` while a graph is queued that nobody has waited for.
    """

    __slots__ = (
        "_device",
        "_endpoint",
        "_n_failures",
        "half_links",
        "info",
        "is_busy",
        "n_threads",
        "near_links",
        "peers",
    )

    def __init__(
        self,
        info: DeviceInfo,
        *,
        threads: int | None = None,
        peers: tuple[Backend, ...] = (),
        half_links: bool = False,
        timeout_s: int = 0,
    ) -> None:
        """`half_links`: rows of a prompt cross to peers and back in half precision. `timeout_s`: how long a
        worker is waited for; 0: any time."""
        for name, value in SAFE_ENVIRONMENT.items():  # ggml reads it at its first kernel
            os.environ.setdefault(name, value)
        self.info, self.peers, self.half_links = info, peers, half_links
        self.near_links = all(b.info.kind != "rpc" for b in (self, *peers))  # no network in between
        self.is_busy = False
        self.n_threads = threads or physical_cores()
        self._endpoint: rpc.Endpoint | None = None
        self._n_failures = rpc.n_failures()
        self._device = self._connected(timeout_s) if info.kind == "rpc" else self._listed()
        try:
            super().__init__(lib.ggml_backend_dev_init(self._device, ffi.NULL), lib.ggml_backend_free)
        except BaseException:
            self._let_go()
            raise
        try:
            self._begin()
        except BaseException:
            self.close()
            raise

    def _listed(self) -> CData:
        name = self.info.name
        return check_pointer(lib.ggml_backend_dev_by_name(name.encode()), f"device {name}")

    def _connected(self, timeout_s: int) -> CData:
        endpoint, index = rpc.split_name(self.info.name)
        if not rpc.CONNECTIONS.is_held(endpoint):
            rpc.ask_worker(endpoint)
        rpc.CONNECTIONS.take(endpoint)
        self._endpoint = endpoint
        try:
            return rpc.worker_device(endpoint, index, timeout_s)
        except BaseException:
            self._let_go()
            raise

    def _begin(self) -> None:
        self.check_alive()
        if self.info.kind == "cpu":
            check_threads(self.n_threads)
            lib.ggml_backend_cpu_set_n_threads(self.ptr, self.n_threads)

    def check_alive(self) -> None:
        """Raise `DeviceLostError` if this device no longer answers; costs a message only after a failure."""
        n = rpc.n_failures()
        if self._endpoint is None or n == self._n_failures:
            return
        if _memory(self._device)[1] == 0:
            raise DeviceLostError(self.name)
        self._n_failures = n  # that was another one

    def wait_for_answer(self) -> None:
        """Wait until a worker has done all that it was sent, of which graphs are not answered otherwise."""
        _memory(self._device)

    def close(self) -> None:
        """Free the stream; a second call does nothing."""
        super().close()
        self._let_go()

    def _let_go(self) -> None:
        if self._endpoint is not None:
            rpc.CONNECTIONS.give_back(self._endpoint)
            self._endpoint = None

    @property
    def all(self) -> tuple[Backend, ...]:
        """This backend and its peers."""
        return (self, *self.peers)

    @property
    def name(self) -> str:
        """The device's name, the key of the ledger."""
        return self.info.name

    @property
    def is_host(self) -> bool:
        """True if tensors of this backend are plain memory of this process."""
        return self.info.is_host

    @property
    def has_tiles(self) -> bool:
        """True if flash attention is the CPU's, which few rows of a tile slow down; a worker's may be."""
        return self.is_host or self.info.kind == "rpc"

    @property
    def buffer_type(self) -> CData:
        """Where tensors of this backend are allocated by default."""
        return lib.ggml_backend_dev_buffer_type(self._device)

    @property
    def pinned_buffer_type(self) -> CData | None:
        """System memory that the device copies to and from at full speed; None where there is none."""
        found = lib.ggml_backend_dev_host_buffer_type(self._device)
        return None if found == ffi.NULL else found

    @property
    def device(self) -> CData:
        """ggml's device, for questions about what it supports."""
        return self._device

    def extra_buffer_types(self) -> tuple[CData, ...]:
        """Buffer types in which the device keeps weights in a layout of its own, best first."""
        registry = lib.ggml_backend_dev_backend_reg(self._device)
        address = lib.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
        if address == ffi.NULL:
            return ()
        listed = ffi.cast("ggml_backend_dev_get_extra_bufts_t", address)(self._device)
        found: list[CData] = []
        while listed != ffi.NULL and listed[len(found)] != ffi.NULL:
            found.append(listed[len(found)])
        return tuple(b for b in found if c_string(lib.ggml_backend_buft_name(b)) not in UNSAFE_LAYOUTS)

    def memory_free(self) -> int:
        """Free bytes now, as the driver (or the system, for the CPU) tells; a lost one raises."""
        free = _info(self._device).memory_free
        self.check_alive()  # one that is lost has none
        return free

    def synchronize(self) -> None:
        """Wait for all queued work."""
        lib.ggml_backend_synchronize(self.ptr)
