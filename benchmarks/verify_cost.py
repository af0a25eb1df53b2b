"""What a speculative step costs beside a plain one, and the acceptance from which it pays.

    python benchmarks/verify_cost.py TARGET.gguf --draft DRAFT.gguf --context 1024 --context 16384
    python benchmarks/verify_cost.py TARGET.gguf --mtp --widths 1-8 --profile

Prints for every width: the verify forward, the same in plain steps, its graph alone, choosing tokens, taking
rows back (one kept, all kept), the draft pass, injecting the kept rows; and what follows: a whole step, the
tokens it must commit on average to be as fast as plain decoding, and the chance of each draft that gives so
many. Medians in milliseconds over --repeat rounds; the JSON has ranges too. Random files do, since no value
matters (random_model.py). --profile takes graphs apart by kind of operation, beside the bandwidth of a copy.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from inside import backend_of, forbidden_of, forwards_of, last_graph, more_forwards, on_core
from op_times import GraphProfile, copy_gb_s, profile
from verify_measure import TOKEN, Bench, WidthCost

from pyggml_dflash import Engine
from pyggml_dflash.arch.base import StateUpdate
from pyggml_dflash.engine.core import EngineCore
from pyggml_dflash.ggml.ledger import Ledger
from pyggml_dflash.options import Spec

ROOM = 512  # positions behind the context for the rounds that move on
UPDATES: tuple[StateUpdate, ...] = ("snapshots", "replay")
WIDE = 110  # columns of tables in a file
N_LARGEST = 16  # widest verify forward that the engine allows


@dataclass(slots=True, kw_only=True)
class Findings:
    """All that was measured, as it goes to the JSON file after every step."""

    target: str
    draft: str  # the file, or what drafts: 'mtp', 'off'
    device: str
    n_repeat: int
    copy_gb_s: float | None = None
    costs: list[WidthCost] = field(default_factory=list)
    profiles: dict[str, GraphProfile] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """With what follows from each width."""
        return {
            **{k: getattr(self, k) for k in ("target", "draft", "device", "n_repeat", "copy_gb_s")},
            "costs": [
                {
                    **asdict(cost),
                    "step_ms": cost.step_ms,
                    "even_length": cost.even_length,
                    "even_rate": cost.even_rate,
                }
                for cost in self.costs
            ],
            "profiles": {name: asdict(found) for name, found in self.profiles.items()},
        }


class WidthList(click.ParamType):
    """'1-16' or '1,2,4,8': verify widths up to 16."""

    name = "widths"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        """The widths, ascending."""
        try:
            spans = [part.split("-") for part in str(value).split(",")]
            widths = sorted({w for span in spans for w in range(int(span[0]), int(span[-1]) + 1)})
        except ValueError:
            widths = []
        if not widths or widths[0] < 1 or widths[-1] > N_LARGEST:
            self.fail(
                f"{value!r} is no list of widths from 1 to {N_LARGEST}, such as 1-8 or 1,4,8", param, ctx
            )
        return widths


def chooses_experts_on_a_host(core: EngineCore) -> bool:
    """Whether indices made of garbage would end the process, as they do on a CPU."""
    return forwards_of(core).model.config.moe is not None and backend_of(core).is_host


def no_model(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    """Refuse to write over a model, which is easily taken for this option's file."""
    if value is not None and value.suffix == ".gguf":
        raise click.BadParameter(f"{value} is a model; name a file to write to")
    return value


def profile_graphs(
    core: EngineCore, context: int, widths: Sequence[int], n_repeat: int
) -> dict[str, GraphProfile]:
    """A plain step's graph and verify graphs, taken apart."""
    slot, own, found = core.slots[0], forwards_of(core), {}
    own.decode(slot, TOKEN)
    found["plain"] = profile(backend_of(core), last_graph(own), n_repeat)
    update: StateUpdate = "snapshots" if own.recording is None else own.recording.update
    with more_forwards(core, update, max(widths)) as forwards:
        for width in widths:
            forwards.verify(slot, [TOKEN] * width)
            found[f"verify {width}"] = profile(backend_of(core), last_graph(forwards), n_repeat)
    return {f"context {context}, {name}": graph for name, graph in found.items()}


def cost_table(costs: Sequence[WidthCost]) -> Table:
    """Costs of one context and update."""
    first = costs[0]
    table = Table(
        title=f"context {first.context}, {first.update}: milliseconds, median of rounds",
        caption=f"plain step {first.plain}, its graph {first.plain_graph}\nkeep: one row, all rows; "
        "even: tokens per step, and chance per draft, from which steps pay",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for name in (
        "width",
        "verify",
        "/ plain",
        "graph",
        "choose",
        "keep",
        "draft",
        "inject",
        "step",
        "even",
        "",
    ):
        table.add_column(name, no_wrap=True)
    for cost in costs:
        verify = (f"{cost.verify.median:.2f}", f"{cost.ratio.median:.2f}")
        keep = f"{cost.keep_one.median:.2f}, {cost.keep_all.median:.2f}"
        graph, choose, draft, inject = (
            f"{part.median:.2f}" if part else ""
            for part in (cost.graph, cost.choose, cost.draft, cost.inject)
        )
        even = ("", "", "")
        if cost.step_ms is not None:
            rate = "never" if cost.even_rate is None else f"{cost.even_rate:.2f}"
            even = (f"{cost.step_ms:.2f}", f"{cost.even_length:.2f}", rate)
        table.add_row(str(cost.width), *verify, graph, choose, keep, draft, inject, *even)
    return table


def profile_table(name: str, found: GraphProfile, copy: float | None) -> Table:
    """Kinds of operations of one graph."""
    table = Table(
        "operation", "n", "MiB", "alone ms", "saved ms", "GB/s alone",
        title=f"{name}: {found.whole_ms:.3f} ms, {found.n_nodes} operations",
        caption="" if copy is None else f"a plain copy moves {copy:.0f} GB/s",
    )  # fmt: skip
    for kind in found.kinds:
        mib = f"{kind.n_bytes / 2**20:.1f}"
        times = (f"{kind.alone_ms:.3f}", f"{kind.saved_ms:.3f}")
        table.add_row(kind.kind, str(kind.n), mib, *times, f"{kind.gb_s:.0f}")
    return table


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to measure."""

    contexts: Sequence[int]
    widths: Sequence[int]
    updates: Sequence[StateUpdate]
    profile_widths: Sequence[int]  # none: no profile
    n_repeat: int


class Run:
    """Measures into `findings`; prints each part when it is there and writes the JSON file as it grows."""

    def __init__(self, engine: Engine, plan: Plan, findings: Findings, json_path: Path | None) -> None:
        self._engine, self._plan, self._findings, self._json_path = engine, plan, findings, json_path
        self._console = Console()
        if not self._console.is_terminal:
            self._console = Console(width=WIDE)

    def all(self) -> None:
        """Every context, then the profiles, which leave garbage behind."""
        plan, forbidden = self._plan, forbidden_of(self._engine)
        with self._console.status("measuring") as status:
            bench = on_core(self._engine, lambda core: Bench(core, plan.n_repeat, status.update, forbidden))
            for context in plan.contexts:
                self._costs(bench, context)
            if plan.profile_widths:
                self._profiles(bench)

    def _costs(self, bench: Bench, context: int) -> None:
        on_core(self._engine, lambda core: bench.fill(context))
        for update in self._plan.updates:
            costs = on_core(self._engine, lambda core, u=update: bench.widths(context, self._plan.widths, u))
            self._findings.costs += costs
            self._keep(cost_table(costs))

    def _profiles(self, bench: Bench) -> None:
        findings, plan = self._findings, self._plan

        def graphs(core: EngineCore, context: int) -> dict[str, GraphProfile]:
            bench.set_back(context)
            return profile_graphs(core, context, plan.profile_widths, plan.n_repeat)

        findings.copy_gb_s = on_core(
            self._engine, lambda core: copy_gb_s(backend_of(core), Ledger(), plan.n_repeat)
        )
        for context in plan.contexts:
            found = on_core(self._engine, partial(graphs, context=context))
            findings.profiles |= found
            self._keep(*(profile_table(name, graph, findings.copy_gb_s) for name, graph in found.items()))

    def _keep(self, *tables: Table) -> None:
        if self._json_path is not None:
            self._json_path.write_text(json.dumps(self._findings.as_json(), indent=1) + "\n")
        for table in tables:
            self._console.print(table)


@click.command()
@click.argument("target", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--draft", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A DFlash draft.")
@click.option("--mtp", is_flag=True, help="Draft with the target's own MTP block.")
@click.option(
    "--context", "contexts", multiple=True, type=click.IntRange(1), default=(1024,), show_default=True
)
@click.option(
    "--widths", type=WidthList(), default="1-16", show_default=True, help="Rows of verify forwards."
)
@click.option(
    "--update", type=click.Choice(["both", *UPDATES]), default="both", help="How rows are taken back."
)
@click.option("--profile", "profile_widths", type=WidthList(), help="Widths whose graphs are taken apart.")
@click.option("--repeat", "n_repeat", type=click.IntRange(1), default=15, show_default=True)
@click.option("--device", help="Device's name.  [default: the first GPU, else the CPU]")
@click.option("--threads", type=click.IntRange(1), help="CPU threads.  [default: physical cores]")
@click.option("--kv", default="f16", show_default=True, help="Type of keys and values.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), callback=no_model)
def main(
    target: Path,
    draft: Path | None,
    mtp: bool,
    contexts: tuple[int, ...],
    widths: list[int],
    update: str,
    profile_widths: list[int] | None,
    n_repeat: int,
    device: str | None,
    threads: int | None,
    kv: str,
    json_path: Path | None,
) -> None:
    """Measure TARGET; without a draft, the verify forwards alone."""
    spec: Spec = "mtp" if mtp else "dflash" if draft else "off"
    plan = Plan(
        contexts=contexts,
        widths=widths,
        updates=[u for u in UPDATES if update in (u, "both")],
        profile_widths=profile_widths or (),
        n_repeat=n_repeat,
    )
    options: dict[str, Any] = {"spec_width": max(2, *widths)} if mtp else {}
    with Engine.open(
        target, draft=draft, spec=spec, max_ctx=max(contexts) + ROOM, device=device, threads=threads,
        cache_type_k=kv, cache_type_v=kv, prefix_cache_max_mib=0, **options,
    ) as engine:  # fmt: skip
        findings = Findings(
            target=target.name,
            draft=spec if draft is None else draft.name,
            device=engine.info.device,
            n_repeat=n_repeat,
        )
        if plan.profile_widths and on_core(engine, chooses_experts_on_a_host):
            raise click.UsageError("--profile: a model with experts can be taken apart on a GPU only")
        Run(engine, plan, findings, json_path).all()


if __name__ == "__main__":
    main()
