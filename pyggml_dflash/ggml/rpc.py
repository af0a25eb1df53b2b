"""Devices of other processes, through ggml's RPC back end: reaching a worker, and being one. Layer 1.

The protocol has no authentication and trusts what it is sent. A worker serves one connection at a time, and
ggml keeps one per worker in a process, which it cannot share between threads; so a worker belongs to one
engine. Before ggml connects, a worker is asked here who it is, with a time limit that ggml does not have.
"""

from __future__ import annotations

import re
import socket
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pyggml_dflash.errors import BackendError, UsageError
from pyggml_dflash.ggml.ffi import CData, ffi, lib
from pyggml_dflash.ggml.handle import check_pointer

SCHEME: Final = "rpc://"
ANSWER_S: Final = 5.0  # within which a worker that is free answers
CAPABILITIES_BYTES: Final = 24  # of a transport beyond TCP: none are offered
HELLO: Final = 14  # commands, as ggml numbers them
DEVICE_COUNT: Final = 15
DEVICE_MEMORY: Final = 11
PROTOCOL: Final = (int(lib.RPC_PROTO_MAJOR_VERSION), int(lib.RPC_PROTO_MINOR_VERSION))


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a worker listens."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """HOST:PORT; anything else raises `UsageError`. An empty host is no host."""
        match = re.fullmatch(r"([A-Za-z0-9._-]{1,253}):([0-9]{1,5})", text)
        if match is None or not 1 <= int(match[2]) <= 65535:
            raise UsageError(f"endpoint is {text!r}; it must be HOST:PORT as in 127.0.0.1:50052")
        return cls(match[1], int(match[2]))

    def address(self) -> str:
        """The host's IPv4 address, as ggml knows no others; raises `OSError` if it has none."""
        found = socket.getaddrinfo(self.host, self.port, socket.AF_INET, socket.SOCK_STREAM)
        return str(found[0][4][0])

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def split_name(name: str, option: str = "device") -> tuple[Endpoint, int]:
    """Endpoint and device of 'rpc://HOST:PORT' or 'rpc://HOST:PORT/2'; the first device is 0.

    `option` is what a refusal says was given.
    """
    address, _, index = name.removeprefix(SCHEME).partition("/")
    if "/" in name.removeprefix(SCHEME) and not re.fullmatch(r"[0-9]{1,3}", index):
        raise UsageError(
            f"{option} is {name!r}; behind the port goes the number of a worker's device, as in /1"
        )
    return Endpoint.parse(address), int(index or 0)


class _Connections:
    """Which thread of this process holds which worker, and how often. ggml has the connections themselves."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[Endpoint, tuple[int, int]] = {}

    def is_held(self, endpoint: Endpoint) -> bool:
        """True if the calling thread holds a worker; another thread's raises `BackendError`."""
        with self._lock:
            owner = self._held.get(endpoint, (None, 0))[0]
        if owner not in (None, threading.get_ident()):
            raise BackendError(f"the worker at {endpoint} belongs to another engine of this process")
        return owner is not None

    def take(self, endpoint: Endpoint) -> None:
        """Hold a worker once more."""
        with self._lock:
            _, n = self._held.get(endpoint, (0, 0))
            self._held[endpoint] = threading.get_ident(), n + 1

    def give_back(self, endpoint: Endpoint) -> None:
        """Let go once."""
        with self._lock:
            owner, n = self._held[endpoint]
            if n > 1:
                self._held[endpoint] = owner, n - 1
            else:
                del self._held[endpoint]


CONNECTIONS: Final = _Connections()  # of the process, as ggml's are


@dataclass(frozen=True, slots=True)
class WorkerDevice:
    """One device of a worker, and its memory in bytes when it was asked."""

    name: str
    memory_free: int
    memory_total: int


def ask_worker(endpoint: Endpoint) -> tuple[WorkerDevice, ...]:
    """The devices behind an endpoint; raises `BackendError` if nobody answers, or in another version.

    A worker that an engine of this process holds answers nobody else.
    """
    CONNECTIONS.is_held(endpoint)
    try:
        with socket.create_connection((endpoint.address(), endpoint.port), timeout=ANSWER_S) as link:
            version = _ask(link, HELLO, bytes(CAPABILITIES_BYTES), 4 + CAPABILITIES_BYTES)
            if version[0] != PROTOCOL[0] or version[1] > PROTOCOL[1]:
                theirs, ours = f"{version[0]}.{version[1]}", ".".join(map(str, PROTOCOL))
                raise BackendError(
                    f"the worker at {endpoint} speaks protocol {theirs}; this build has {ours}"
                )
            (n,) = struct.unpack("<I", _ask(link, DEVICE_COUNT, b"", 4))
            memory = [
                struct.unpack("<QQ", _ask(link, DEVICE_MEMORY, struct.pack("<I", i), 16)) for i in range(n)
            ]
    except TimeoutError as error:
        raise BackendError(
            f"the worker at {endpoint} does not answer within {ANSWER_S:.0f} s; it serves one program "
            "at a time"
        ) from error
    except EOFError as error:
        raise BackendError(f"what answers at {endpoint} is no worker of ggml") from error
    except OSError as error:
        raise BackendError(f"no worker answers at {endpoint}: {error.strerror or error}") from error
    names = [f"{SCHEME}{endpoint}" + (f"/{i}" if i else "") for i in range(n)]
    return tuple(WorkerDevice(name, *sizes) for name, sizes in zip(names, memory, strict=True))


def _ask(link: socket.socket, command: int, request: bytes, n_bytes: int) -> bytes:
    link.sendall(struct.pack("<BQ", command, len(request)) + request)
    (size,) = struct.unpack("<Q", _receive(link, 8))
    if size != n_bytes:
        raise EOFError("no answer of the protocol")
    return _receive(link, n_bytes)


def _receive(link: socket.socket, n_bytes: int) -> bytes:
    data = b""
    while len(data) < n_bytes:
        part = link.recv(n_bytes - len(data))
        if not part:
            raise EOFError("no answer of the protocol")
        data += part
    return data


def worker_device(endpoint: Endpoint, index: int, timeout_s: int) -> CData:
    """ggml's device for one that `ask_worker` found; it is lost once an answer takes longer; 0: any time."""
    lib.dflash_rpc_timeout(timeout_s)
    registry = check_pointer(lib.ggml_backend_reg_by_name(b"RPC"), "this build has no RPC back end")
    add = lib.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_rpc_add_server")
    worker = ffi.cast("ggml_backend_rpc_add_server_t", add)(str(endpoint).encode())
    if worker == ffi.NULL or index >= lib.ggml_backend_reg_dev_count(worker):
        raise BackendError(f"the worker at {endpoint} has no device {index}")
    return lib.ggml_backend_reg_dev_get(worker, index)


def n_failures() -> int:
    """How often a worker did not answer, in this process; when it grows, some device may be lost."""
    return int(lib.dflash_rpc_failures())


def serve(endpoint: Endpoint, devices: Sequence[str], threads: int) -> None:
    """Compute for others on these devices until the process ends; one connection at a time."""
    registry = check_pointer(lib.ggml_backend_reg_by_name(b"RPC"), "this build has no RPC back end")
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            address = endpoint.address()  # ggml listens at no name
            free.bind((address, endpoint.port))
        except OSError as error:
            raise UsageError(f"cannot listen at {endpoint}: {error.strerror or error}") from error
    found = ffi.new("ggml_backend_dev_t[]", [lib.ggml_backend_dev_by_name(d.encode()) for d in devices])
    start = lib.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_rpc_start_server")
    start = ffi.cast("ggml_backend_rpc_start_server_t", start)
    start(f"{address}:{endpoint.port}".encode(), ffi.NULL, threads, len(devices), found)
    raise BackendError(f"the worker at {endpoint} could not start")
