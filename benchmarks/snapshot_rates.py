"""How fast states go into snapshots and back, by the memory that snapshots lie in and by length.

    python benchmarks/snapshot_rates.py --preset qwen35-27b --context 32768 --tokens 512 --tokens 6144

A table of slots of a real shape, no model: no number of a state matters. Prints medians and ranges of a
capture (allocation and first touch of its memory included, as in use) and of a restore, in milliseconds,
and 10^9 bytes of strips per second. A discrete GPU is measured with pageable and with pinned memory, and
with snapshots in its own memory, which the engine does not use there.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from model_shapes import PRESETS, Shape, tiny
from rates import Spread

from pyggml_dflash.arch.base import StateLayout, StateTensor
from pyggml_dflash.ggml.device import Backend, choose_device, devices
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.ledger import Ledger
from pyggml_dflash.state.slot import SlotTable
from pyggml_dflash.state.snapshot import SnapshotMemory
from pyggml_dflash.state.snapshot_store import SnapshotStore

N_SLOTS: Final = 2
N_TAPS: Final = 4
LENGTHS: Final = (512, 6144, 16_384)
SHAPES: Final = sorted(name for name, shape in PRESETS.items() if shape.next is None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Captures and restores of one length in one kind of memory."""

    memory: str
    tokens: int
    n_bytes: int
    capture_ms: Spread
    restore_ms: Spread

    @property
    def capture_gbs(self) -> float:
        """10^9 bytes per second of the median."""
        return self.n_bytes / self.capture_ms.median / 1e6

    @property
    def restore_gbs(self) -> float:
        """10^9 bytes per second of the median."""
        return self.n_bytes / self.restore_ms.median / 1e6

    def as_json(self) -> dict[str, Any]:
        """With what follows."""
        return {**asdict(self), "capture_gbs": self.capture_gbs, "restore_gbs": self.restore_gbs}


def layout_of(shape: Shape, n_ctx: int, cache: ElementType) -> StateLayout:
    """The state of one slot, as the architecture would lay it out."""
    tensors = []
    for i in range(shape.n_layer):
        if shape.is_recurrent(i):
            shapes = {
                "conv": (N_TAPS - 1, shape.conv_dim),
                "memory": (shape.state, shape.state, shape.n_value_head),
            }
            for name, extent in shapes.items():
                tensors.append(
                    StateTensor(name=f"blk.{i}.{name}", type=ElementType.F32, shape=extent, grows=False)
                )
        else:
            row = (shape.n_head_kv * shape.head_dim, n_ctx)
            tensors += [StateTensor(name=f"blk.{i}.{x}", type=cache, shape=row, grows=True) for x in "kv"]
    return StateLayout(n_ctx=n_ctx, tensors=tuple(tensors))


def memories(compute: Backend, host: Backend, ledger: Ledger) -> Iterator[tuple[str, SnapshotMemory]]:
    """The kinds of memory that snapshots of this device can lie in."""
    memory = SnapshotMemory(compute, host, ledger)
    if memory.place == "device":
        yield "own", memory
        return
    yield "pageable", memory
    yield "pinned", SnapshotMemory(compute, host, ledger, pinned=True)
    yield "own", SnapshotMemory(compute, compute, ledger)


def measure(store: SnapshotStore, table: SlotTable, name: str, n_tokens: int, n_repeat: int) -> Rate:
    """Capture and restore in turns; a first turn is not counted."""
    source, target = table.slots
    source.reset()
    source.vacate(n_tokens)
    source.commit(n_tokens)
    captures, restores, n_bytes = [], [], 0
    for _ in range(n_repeat + 1):
        target.vacate(n_tokens)
        start = time.perf_counter()
        snapshot = store.capture(source, range(n_tokens))
        middle = time.perf_counter()
        if snapshot is None:
            raise click.ClickException(f"no snapshot: {store.counters.failed or store.counters.skipped}")
        store.restore(target, snapshot)
        captures.append(1e3 * (middle - start))
        restores.append(1e3 * (time.perf_counter() - middle))
        n_bytes = sum(strip.n_bytes for strip in snapshot.contents.all_strips)
        snapshot.close()
    return Rate(
        memory=name,
        tokens=n_tokens,
        n_bytes=n_bytes,
        capture_ms=Spread.of(captures[1:]),
        restore_ms=Spread.of(restores[1:]),
    )


@click.command(help=__doc__)
@click.option("--preset", type=click.Choice(SHAPES), default="qwen35-27b", show_default=True)
@click.option("--small", is_flag=True, help="The preset shrunk to some kilobytes, to try this script.")
@click.option("--device", help="As `dflash devices` lists them; the first GPU, else the CPU.")
@click.option("--context", type=click.IntRange(1), default=32_768, show_default=True)
@click.option(
    "--tokens", type=click.IntRange(1), multiple=True, default=(512, 6144, 16_384), show_default=True
)
@click.option("--cache", type=click.Choice(["f32", "f16", "q8_0"]), default="q8_0", show_default=True)
@click.option("--repeat", type=click.IntRange(1), default=7, show_default=True)
@click.option("--json", "out", type=click.Path(path_type=Path), help="Also write everything here.")
def main(
    preset: str,
    small: bool,
    device: str | None,
    context: int,
    tokens: tuple[int, ...],
    cache: str,
    repeat: int,
    out: Path | None,
) -> None:
    """Measure and print."""
    if max(tokens) > context:
        raise click.BadParameter(f"{max(tokens)} tokens do not fit a context of {context}")
    shape = tiny(PRESETS[preset]) if small else PRESETS[preset]
    found: list[Rate] = []
    with ExitStack() as stack:
        compute = Backend(choose_device(device))
        stack.callback(compute.close)
        host = compute
        if compute.info.kind != "cpu":
            host = Backend(next(d for d in devices() if d.kind == "cpu"))
            stack.callback(host.close)
        ledger = Ledger()
        table = SlotTable(compute, ledger, layout_of(shape, context, ElementType[cache.upper()]), N_SLOTS)
        stack.callback(table.close)
        click.echo(f"{compute.name}, {preset}, {cache}, context {context}, {repeat} repetitions")
        for name, memory in memories(compute, host, ledger):
            store = SnapshotStore(table, compute, memory, fingerprint=bytes(16))
            for n in tokens:
                rate = measure(store, table, name, n, repeat)
                found.append(rate)
                click.echo(
                    f"{name:9} {n:7} tokens {rate.n_bytes / 2**20:8.1f} MiB  "
                    f"capture {rate.capture_ms} ms {rate.capture_gbs:.1f} GB/s  "
                    f"restore {rate.restore_ms} ms {rate.restore_gbs:.1f} GB/s"
                )
    if out is not None:
        out.write_text(json.dumps([rate.as_json() for rate in found], indent=1))


if __name__ == "__main__":
    main()
