"""Speed of pyggml_dflash under several settings on one GGUF file, in turns: what 'auto' should choose.

    python benchmarks/settings.py MODEL.gguf flash-attn=on flash-attn=off repack=off,threads=1

Each argument is one side: settings that differ from the default, with commas between. The first is the one
that ratios refer to. Settings: flash-attn (auto, on, off), repack (on, off), threads, kv, chunk, device,
prefill, decode.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rates import Side, SideRates, Spread, Work, ours_command, ratio, take_turns
from worker import Worker

from pyggml_dflash.ggml.device import physical_cores

FIELDS = {"prefill": "n_prefill", "decode": "n_decode", "flash-attn": "flash_attn"}


def parse_settings(text: str) -> dict[str, Any]:
    """Fields of `Work` from 'name=value,name=value'; 'default' has none."""
    settings: dict[str, Any] = {}
    for part in text.split(",") if text != "default" else ():
        name, _, value = part.partition("=")
        field = FIELDS.get(name, name)
        if field not in Work.__slots__ or not value:
            raise click.BadParameter(f"{part!r} is no setting; use NAME=VALUE, such as flash-attn=off")
        settings[field] = value == "on" if field == "repack" else int(value) if value.isdigit() else value
    return settings


def compare(works: dict[str, Work], n_repeat: int, console: Console) -> dict[str, SideRates]:
    """Rates by settings."""
    with ExitStack() as stack:
        sides = {
            name: Side.open(stack.enter_context(Worker(ours_command())), work) for name, work in works.items()
        }
        prompt = next(iter(sides.values())).tokenize(max(w.n_prefill for w in works.values()))
        with console.status("measuring") as status:
            return take_turns(sides, prompt, n_repeat=n_repeat, report=status.update)


@click.command()
@click.argument("model", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("settings", nargs=-1, required=True)
@click.option("--repeat", "n_repeat", default=5, show_default=True, help="Turns that count.")
def main(model: Path, settings: tuple[str, ...], n_repeat: int) -> None:
    """Compare SETTINGS on MODEL."""
    usual = Work(model=model, threads=physical_cores())
    works = {text: replace(usual, **parse_settings(text)) for text in settings}
    console = Console()
    sides = compare(works, n_repeat, console)
    first = next(iter(sides.values()))
    table = Table("settings", "prefill t/s", "ratio", "decode t/s", "ratio", title=model.name)
    for name, side in sides.items():
        table.add_row(
            name,
            str(Spread.of(side.prefill)),
            f"{ratio(side.prefill, first.prefill).median:.3f}",
            str(Spread.of(side.decode)),
            f"{ratio(side.decode, first.decode).median:.3f}",
        )
    console.print(table)


if __name__ == "__main__":
    main()
