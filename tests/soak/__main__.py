"""A storm of any length: `python -m tests.soak --minutes 30 --seed 1`. Exit status 1 if anything is wrong.

Set OMP_WAIT_POLICY=passive: several engines share the cores. The seed gives the same prompts, clients and
faults in the same order; when each comes is the machine's affair.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from pathlib import Path
from typing import Final

import click

from tests.soak.storm import Plan, Report, run

MOST_GROWTH: Final = 0.02


@click.command(help=__doc__)
@click.option("--minutes", type=click.FloatRange(0, min_open=True), default=30.0, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--model", "models", multiple=True, help="Of one model; given again, of several. All, else.")
@click.option("--asks", type=click.IntRange(1), default=160, show_default=True, help="Prompts of each model.")
@click.option("--clients", type=click.IntRange(1), default=5, show_default=True, help="Of each model.")
@click.option("--json", "out", type=click.Path(path_type=Path), help="Also write everything here.")
def main(
    minutes: float, seed: int, models: tuple[str, ...], asks: int, clients: int, out: Path | None
) -> None:
    """Storm and tell."""
    logging.getLogger("pyggml_dflash").setLevel(logging.CRITICAL)  # of faults there are thousands
    plan = Plan(seed=seed, least_s=60 * minutes, most_s=60 * minutes, n_asks=asks, n_clients=clients)
    with tempfile.TemporaryDirectory() as folder:
        report = run(Path(folder), plan, names=models, tell=click.echo)
    if out is not None:
        out.write_text(json.dumps(report.as_json(), indent=1))
    show(report)
    assert report.quiet is not None
    sys.exit(1 if report.wrong or abs(report.quiet.growth) > MOST_GROWTH else 0)


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
    for when, memory in (("all the time", report.memory), ("in lulls", report.quiet)):
        assert memory is not None
        click.echo(
            f"memory {when}: {memory.first / 1024:.1f} MiB in the first quarter, {memory.last / 1024:.1f} in "
            f"the last: {memory.growth:+.2%} over {memory.n} samples"
        )
    for wrong in report.wrong:
        click.echo(f"WRONG: {wrong}")


if __name__ == "__main__":
    main()
