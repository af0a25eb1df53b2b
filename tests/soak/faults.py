"""Faults that a storm meets: each is raised where the real one would be, and as what it would be.

Nothing in the package knows of them: while a `Faults` is entered, methods of real classes look first whether
they should fail. Every error is kept in mind, so that an answer that ends in one can be told from an answer
that ends in another.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest import mock
from weakref import WeakSet

import pyggml_dflash.engine.graphs as graphs
import pyggml_dflash.state.disk_tier as disk_tier
from pyggml_dflash import BackendError, DeviceMemoryError, DflashError
from pyggml_dflash.ggml.graph import StepGraph
from pyggml_dflash.ggml.ledger import Charge, Ledger
from pyggml_dflash.ggml.transfer import Transfer
from pyggml_dflash.state.snapshot import LABEL as SNAPSHOTS

MEMORY: Final = "no memory for anything"
GRAPH_MEMORY: Final = "no memory for a graph"
SNAPSHOT_MEMORY: Final = "no memory for a snapshot"
COPY: Final = "a copy of a state fails"
BUILD: Final = "a graph cannot be built"
REFUSED: Final = "a step is refused"
TORN: Final = "a step fails half-way"
DISK: Final = "the disk is full"
KINDS: Final = (MEMORY, GRAPH_MEMORY, SNAPSHOT_MEMORY, COPY, BUILD, REFUSED, TORN, DISK)
MOST_AT_ONCE: Final = 3  # of a kind, one after the other; the first is often made good by a second try


class Faults:
    """What is to fail next, and what has failed."""

    def __init__(self) -> None:
        self.fired: Counter[str] = Counter()
        self._armed: Counter[str] = Counter()
        self._raised: WeakSet[DflashError] = WeakSet()
        self._n_calm = 0
        self._lock = threading.Lock()
        self._patches = ExitStack()

    def arm(self, kind: str, n: int = 1) -> None:
        """Have the next `n` occasions fail, on whatever engine they come."""
        with self._lock:
            self._armed[kind] = n

    def disarm(self) -> None:
        """Have nothing fail any more."""
        with self._lock:
            self._armed.clear()

    @contextmanager
    def calm(self) -> Iterator[None]:
        """Nothing fails meanwhile, on any engine."""
        with self._lock:
            self._n_calm += 1
        try:
            yield
        finally:
            with self._lock:
                self._n_calm -= 1

    def are_behind(self, error: BaseException | None) -> bool:
        """True if it is one of these faults, or was raised because of one."""
        while error is not None:
            if isinstance(error, DflashError) and error in self._raised:
                return True
            error = error.__cause__ or error.__context__
        return False

    def _due(self, *kinds: str) -> str | None:
        if not self._armed or self._n_calm:
            return None
        with self._lock:
            for kind in kinds:
                if self._armed[kind]:
                    self._armed[kind] -= 1
                    self.fired[kind] += 1
                    return kind
        return None

    def _noted(self, error: DflashError) -> DflashError:
        self._raised.add(error)
        return error

    def __enter__(self) -> Faults:
        for owner, name, made in (
            (Ledger, "charge", self._charge),
            (graphs, "build_graph", self._failing(BUILD)),
            (StepGraph, "run", self._run),
            (Transfer, "copy", self._failing(COPY)),
            (disk_tier, "write_snapshot", self._write),
        ):
            self._patches.enter_context(mock.patch.object(owner, name, made(getattr(owner, name))))
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()

    def _charge(self, real: Callable[..., Charge]) -> Callable[..., Charge]:
        def charge(ledger: Ledger, device: str, label: str, n_bytes: int) -> Charge:
            own = (SNAPSHOT_MEMORY,) if label == SNAPSHOTS else (GRAPH_MEMORY,) if "graphs" in label else ()
            if not ledger.dry and self._due(*own, MEMORY):
                cap = ledger.caps.get(device)
                raise self._noted(
                    DeviceMemoryError(what=label, wanted=n_bytes, free=0, device=device, cap=cap)
                )
            return real(ledger, device, label, n_bytes)

        return charge

    def _run(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def run(graph: StepGraph) -> Any:
            kind = self._due(REFUSED, TORN)
            if kind == REFUSED:
                raise self._noted(BackendError(f"{REFUSED}, on purpose"))
            found = real(graph)
            if kind == TORN:
                for array in found:
                    array[:] = 1  # nobody may use what a failed step left
                raise self._noted(BackendError(f"{TORN}, on purpose"))
            return found

        return run

    def _failing(self, kind: str) -> Callable[..., Callable[..., Any]]:
        """Makes of a function one that fails before it has done anything."""

        def made(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                if self._due(kind):
                    raise self._noted(BackendError(f"{kind}, on purpose"))
                return real(*args)

            return call

        return made

    def _write(self, real: Callable[..., None]) -> Callable[..., None]:
        def write(stream: Any, *args: Any) -> None:
            if self._due(DISK):
                stream.write(b"the beginning")
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(stream, *args)

        return write
