"""Lines answered by engines on several machines, as a pipeline of Ray Data. Layer 8.

Every worker is an actor with an engine of its own, which runs the same `LineWorker` as a batch on one
machine. Tasks go to workers in groups and come back as records group by group, so a crash loses a few
groups. The model's file must be at the same path on every machine. Needs the package of the extra `ray`.
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from pyggml_dflash.api import Engine
from pyggml_dflash.errors import DflashError, UsageError
from pyggml_dflash.extras import install_hint
from pyggml_dflash.jsonl.lines import Task
from pyggml_dflash.jsonl.records import Record
from pyggml_dflash.jsonl.worker import LineWorker
from pyggml_dflash.openai.asks import Defaults
from pyggml_dflash.options import EngineOptions, check_int, check_number

LOCAL: Final = "local"
GROUP: Final = 8  # tasks of a group for each slot: the slots idle only where its last ones run
PATIENCE_S: Final = 10.0  # for a cluster to answer; Ray itself tries for minutes
GROUPS_IN_FLIGHT: Final = 2  # of one worker: the next one is there when a group ends


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions:
    """Where Ray runs, and what it gives to the workers."""

    address: str  # of a cluster; 'local': processes on this machine
    workers: int = 1
    gpus: float = 0.0  # of each worker

    def __post_init__(self) -> None:
        if not self.address:
            raise UsageError("--ray is empty; pass the address of a cluster, or 'local'")
        check_int("ray_workers", self.workers, 1, 4096)
        check_number("ray_gpus", self.gpus, 0, 64)


class RecordMaker:
    """What Ray runs in each worker; made once, and called with one group of tasks after the other."""

    def __init__(self, options: EngineOptions, defaults: Defaults, settings: str, ordered: bool) -> None:
        self._ordered = ordered
        self._worker: LineWorker | DflashError
        try:
            self._worker = LineWorker(Engine(options), defaults, settings)
        except DflashError as error:  # Ray would make a worker that fails again and again
            self._worker = error

    def __call__(self, group: dict[str, Any]) -> dict[str, list[bytes]]:
        """Pickled tasks in, pickled records out; one error of ours if the engine cannot work."""
        if isinstance(self._worker, DflashError):
            return {"record": [pickle.dumps(self._worker)]}
        tasks = [pickle.loads(data) for data in group["task"]]
        with self._worker.run(tasks, ordered=self._ordered) as records:
            return {"record": [pickle.dumps(record) for record in records]}


def check_ray() -> None:
    """Raise `UsageError` where the package is missing, before a batch begins."""
    try:
        import ray.data  # noqa: F401
    except ImportError as error:
        raise UsageError(f"--ray needs Ray; install it with: {install_hint('ray')}") from error


def answer_on_ray(
    tasks: Iterable[Task],
    where: RayOptions,
    engine: EngineOptions,
    defaults: Defaults,
    settings: str,
    *,
    ordered: bool,
) -> Generator[Record, None, None]:
    """The records of tasks, in their order or as they get ready; `DflashError` says what Ray failed with.

    All tasks are sent to Ray's object store at the beginning.
    """
    import ray

    _check_reachable(where.address)
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # it repeats what it raises
    model = None if engine.model is None else Path(os.path.abspath(engine.model))
    try:
        ray.init(
            address=None if where.address == LOCAL else where.address,
            num_cpus=where.workers * (engine.threads or 1) + 1 if where.address == LOCAL else None,
            include_dashboard=False if where.address == LOCAL else None,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        yield from _records(tasks, where, replace(engine, model=model), defaults, settings, ordered=ordered)
    except DflashError:
        raise
    except (ray.exceptions.RayError, ConnectionError, RuntimeError, ValueError) as error:
        raise DflashError(f"Ray failed: {' '.join(str(error).split())[-400:]}") from error
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Raise `DflashError` where nothing listens at HOST:PORT or ray://HOST:PORT; Ray finds the rest."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), PATIENCE_S).close()
    except (OSError, OverflowError) as error:  # of a port above 65535
        raise DflashError(f"no cluster of Ray answers at {address}: {error}") from error


def _records(
    tasks: Iterable[Task],
    where: RayOptions,
    engine: EngineOptions,
    defaults: Defaults,
    settings: str,
    *,
    ordered: bool,
) -> Iterator[Record]:
    import ray.data

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = ordered
    rows = [{"task": pickle.dumps(task)} for task in tasks]
    group = GROUP * engine.slots
    made = ray.data.from_items(rows, override_num_blocks=max(1, -(-len(rows) // group))).map_batches(
        RecordMaker,
        fn_constructor_args=(engine, defaults, settings, ordered),
        batch_size=None,  # a block is a group
        compute=ray.data.ActorPoolStrategy(
            size=where.workers,
            max_tasks_in_flight_per_actor=GROUPS_IN_FLIGHT,
            max_concurrent_calls_per_actor=GROUPS_IN_FLIGHT,
            enable_true_multi_threading=True,
        ),
        num_cpus=engine.threads or 1,
        num_gpus=where.gpus or None,
    )
    for row in made.iter_rows():
        found = pickle.loads(row["record"])
        if isinstance(found, DflashError):
            raise found
        yield found
