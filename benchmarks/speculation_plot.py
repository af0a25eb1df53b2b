"""The plot of `speculation.py`: acceptance by position, and tokens per second by width."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click


def plot(report: dict[str, Any], path: Path) -> None:
    """Write what `speculation.py --json` prints as a picture; needs matplotlib."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise click.ClickException("--plot needs matplotlib: pip install matplotlib") from error
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    sides = {side["name"]: side for side in report["sides"]}
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for drafter in ("dflash", "mtp"):
        fixed = [s for s in sides.values() if s["drafter"] == drafter and isinstance(s["width"], int)]
        if not fixed:
            continue
        widest = max(fixed, key=lambda side: side["width"])
        positions = range(1, len(widest["accept_rates"]) + 1)
        left.plot(positions, widest["accept_rates"], marker="o", label=f"{drafter}, {widest['width']} rows")
        points = sorted((s["width"], s["rate"]["median"]) for s in fixed)
        right.plot(*zip(*points, strict=True), marker="o", label=drafter)
        if (auto := sides.get(f"{drafter} auto")) is not None:
            right.axhline(auto["rate"]["median"], linestyle=":", label=f"{drafter} auto", color=_last(right))
    right.axhline(sides["plain"]["rate"]["median"], color="black", linewidth=1, label="plain")
    left.set(xlabel="position in the block", ylabel="drafts that hold", ylim=(0, 1))
    right.set(xlabel="rows of a verify step", ylabel="tokens per second", ylim=(0, None))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(f"{report['model']} on {report['device']}")
    figure.savefig(path, dpi=150)


def _last(axes: Any) -> Any:
    """The colour of the line that was drawn last."""
    return axes.get_lines()[-1].get_color()
