"""A storm of any length: `python -m tests.soak --minutes 30 --seed 1`. Exit status 1 if anything is wrong.

The seed gives the same prompts, clients and faults in the same order; when each comes is the machine's
affair. Unless they are set, OMP_WAIT_POLICY is passive, as several engines share the cores, and
GLIBC_TUNABLES have the C library keep nothing of what is freed: what is resident, somebody holds.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Final

import click

from tests.soak.asks import NAMES
from tests.soak.memory import BLOCKS, IN_USE, KEEP_NOTHING, QUIET
from tests.soak.storm import Plan, Report, run

ENVIRONMENT: Final = {"OMP_WAIT_POLICY": "passive", "GLIBC_TUNABLES": KEEP_NOTHING}  # read at start
MOST_GROWTH: Final = 0.02
FLAT: Final = (QUIET, IN_USE, BLOCKS)


@click.command(help=__doc__)
@click.option("--minutes", type=click.FloatRange(0, min_open=True), default=30.0, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True)
@click.option(
    "--model",
    "models",
    type=click.Choice(NAMES),
    multiple=True,
    help="Of one model; given again, of several. All, else.",
)
@click.option("--asks", type=click.IntRange(1), default=160, show_default=True, help="Prompts of each model.")
@click.option("--clients", type=click.IntRange(1), default=5, show_default=True, help="Of each model.")
@click.option(
    "--lull-s",
    type=click.FloatRange(0, min_open=True),
    default=15.0,
    show_default=True,
    help="Between two lulls, in which memory is looked at.",
)
@click.option("--json", "out", type=click.Path(path_type=Path), help="Also write everything here.")
def main(
    minutes: float,
    seed: int,
    models: tuple[str, ...],
    asks: int,
    clients: int,
    lull_s: float,
    out: Path | None,
) -> None:
    """Storm and tell."""
    logging.getLogger("pyggml_dflash").setLevel(logging.CRITICAL)  # of faults there are thousands
    seconds = 60 * minutes
    plan = Plan(seed=seed, least_s=seconds, most_s=seconds, n_asks=asks, n_clients=clients, lull_s=lull_s)
    with tempfile.TemporaryDirectory() as folder:
        report = run(Path(folder), plan, names=models, tell=click.echo)
    if out is not None:
        out.write_text(json.dumps(report.as_json(), indent=1))
    show(report)
    is_flat = all(abs(flat.growth) <= MOST_GROWTH for what, flat in report.memory.items() if what in FLAT)
    sys.exit(0 if is_flat and not report.wrong else 1)


def show(report: Report) -> None:
    """Print what happened."""
    names = sorted(report.total)
    click.echo(f"\n{report.seconds:.0f} s, seed {report.seed}\n")
    click.echo(f"| {'':60} | {' | '.join(f'{name:>9}' for name in report.counts)} |")
    for name in names:
        row = " | ".join(f"{counts[name]:9}" for counts in report.counts.values())
        click.echo(f"| {name:60} | {row} |")
    click.echo("")
    for kind, n in report.faults.items():
        click.echo(f"{n:9} {kind}")
    for what, flat in report.memory.items():
        click.echo(
            f"{what}: {flat.first:,.0f} in the first quarter, {flat.last:,.0f} in the last: "
            f"{flat.growth:+.2%} over {len(flat.warm)} samples"
        )
    for wrong in report.wrong:
        click.echo(f"WRONG: {wrong}")


if __name__ == "__main__":
    missing = {name: value for name, value in ENVIRONMENT.items() if name not in os.environ}
    if missing:
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **missing})
    main()
