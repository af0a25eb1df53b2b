"""Plain decoding, DFlash and MTP on the same prompts, in turns: rates, acceptance, and where the time goes.

    python benchmarks/speculation.py                                 # the shipped model, on a GPU or the CPU
    python benchmarks/speculation.py MODEL.gguf --draft DRAFT.gguf --device CUDA0 --json > speculation.json
    python benchmarks/speculation.py --plot speculation.png          # needs the extra [plot]

Sides: plain; each drafter with the width left to the engine ('auto'), and with every width of --widths; a
fake drafter whose drafts hold with a chance of --fake and cost nothing. Every turn answers every prompt once
with every side, one after the other, so that a change of the machine's speed meets all of them; the first
turn warms up and does not count. A rate is tokens per second of decoding over all prompts of a turn, printed
as median and range over turns; the ratio to plain is the median of the turns' own ratios. Answers are greedy,
and the table says for how many prompts they are those of plain decoding.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rates import Spread, ratio
from speculation_plot import plot
from speculation_sides import Runner, Side, Tally

from pyggml_dflash import Engine, UsageError

ROOT: Final = Path(__file__).resolve().parent.parent
SHIPPED_PROMPTS: Final = ROOT / "tests" / "data" / "pico" / "reference.json"
QUESTIONS: Final = (
    "Write a Python function that returns the n-th Fibonacci number, and explain it.",
    "A train leaves at 9:40 and arrives at 13:05. How long does the ride take? Think step by step.",
    "Summarise in five sentences why the sky is blue.",
    "List the planets of the solar system with one fact about each.",
    "Write a short story about a lighthouse keeper who finds a map.",
    "Explain the difference between a process and a thread to a beginner.",
)
PARTS: Final = ("draft", "verify", "rollback", "plain")


def open_engines(
    model: Path | None, draft: Path | None, options: dict[str, Any], stack: ExitStack
) -> dict[str, Engine]:
    """One engine per drafter that the model has; at least one."""
    engines: dict[str, Engine] = {}
    common = {"prefix_cache_max_mib": 0, **options}  # prompts are read again and again
    if draft is not None or model is None:
        engines["dflash"] = stack.enter_context(Engine.open(model, draft=draft, spec="dflash", **common))
    try:
        engines["mtp"] = stack.enter_context(Engine.open(model, spec="mtp", **common))
    except UsageError as error:
        if not engines:
            raise click.ClickException(f"{error}; give it a draft with --draft") from error
    return engines


def choose_sides(engines: dict[str, Engine], widths: Sequence[int], fake: float) -> list[Side]:
    """Plain first, since others are compared with it."""
    first = next(iter(engines))
    sides = [Side(name="plain", drafter=first, width=None)]
    for drafter, engine in engines.items():
        most = engine.info.max_width
        sides.append(Side(name=f"{drafter} auto", drafter=drafter))
        fixed = sorted({w for w in widths if w < most} | {most})
        sides += [Side(name=f"{drafter} {w} rows", drafter=drafter, width=w) for w in fixed]
    if fake:
        sides.append(Side(name=f"fake {100 * fake:g}%", drafter=first, chance=fake))
    return sides


def read_prompts(engine: Engine, path: Path | None, *, shipped: bool) -> list[tuple[int, ...]]:
    """Token ids: of a file's lines, of the shipped model's ten stored prompts, or of a few questions."""
    if path is None and shipped:
        return [tuple(p["prompt_ids"]) for p in json.loads(SHIPPED_PROMPTS.read_text())["prompts"]]
    lines = QUESTIONS if path is None else [line for line in path.read_text().splitlines() if line.strip()]
    if not engine.info.has_chat_template:
        return [tuple(engine.tokenize(line)) for line in lines]
    turns = [engine.render_chat([{"role": "user", "content": line}]) for line in lines]
    return [tuple(engine.tokenize(turn, add_special=False)) for turn in turns]


def measure(
    runner: Runner, sides: Sequence[Side], prompts: Sequence[tuple[int, ...]], n_repeat: int, console: Console
) -> tuple[dict[str, list[Tally]], Counter[str]]:
    """Tallies by side, one per turn that counts, and for how many prompts the last answers were plain's."""
    found: dict[str, list[Tally]] = {side.name: [] for side in sides}
    equal: Counter[str] = Counter()
    with console.status("measuring") as status:
        for turn in range(n_repeat + 1):
            tallies = {side.name: Tally() for side in sides}
            equal.clear()
            for i, prompt in enumerate(prompts):
                status.update(f"turn {turn} of {n_repeat}, prompt {i + 1} of {len(prompts)}")
                first = (turn + i) % len(sides) if turn else 0
                for side in [*sides[first:], *sides[:first]]:
                    result = runner.answer(side, prompt)
                    tallies[side.name].add(result)
                    equal[side.name] += runner.agrees(prompt, result)
            if turn:
                for name, tally in tallies.items():
                    found[name].append(tally)
    return found, equal


def summarise(side: Side, turns: Sequence[Tally], plain: Sequence[Tally], n_equal: int) -> dict[str, Any]:
    """A side for JSON."""
    n_tokens, seconds = sum(t.n_tokens for t in turns), sum((t.seconds for t in turns), Counter[str]())
    rest = sum(t.decode_s for t in turns) - sum(seconds.values())
    verify, plain_steps = sum(t.verify_steps for t in turns), sum(t.plain_steps for t in turns)
    accepted, drafted = sum(t.accepted for t in turns), sum(t.drafted for t in turns)
    tried = sum((t.tried for t in turns), Counter[int]())
    held = sum((t.held for t in turns), Counter[int]())
    rates = [t.rate for t in turns]
    return {
        "name": side.name,
        "drafter": side.drafter,
        "width": side.width,
        "rate": {**asdict(Spread.of(rates)), "all": rates},
        "ratio": asdict(ratio(rates, [t.rate for t in plain])),
        "equal_answers": n_equal,
        "acceptance_length": 1 + accepted / verify if verify else None,
        "accept_rate": accepted / drafted if drafted else None,
        "accept_rates": [held[i] / tried[i] for i in sorted(tried) if tried[i]],
        "verify_steps": verify,
        "plain_steps": plain_steps,
        "steps_by_width": dict(sorted(sum((t.steps_by_width for t in turns), Counter[int]()).items())),
        "put_aside": sum(t.gave_up for t in turns),
        "ms_per_token": {**{p: 1e3 * seconds[p] / n_tokens for p in PARTS}, "rest": 1e3 * rest / n_tokens},
        "step_costs": turns[-1].step_costs,
        "reasons": turns[-1].reasons,
    }


def rate_table(report: dict[str, Any]) -> Table:
    """Rates, acceptance and where time goes."""
    table = Table(
        title=f"{report['model']} on {report['device']}: {report['prompts']} prompts, "
        f"up to {report['tokens']} tokens, median of {report['repeat']} turns",
        caption="length: tokens per verify step; plain: steps without drafts; then milliseconds per token",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("side", no_wrap=True)
    for name in ("t/s", "/ plain", "length", "accepted", "plain", *PARTS, "rest", "equal"):
        table.add_column(name, justify="right", no_wrap=True)
    for side in report["sides"]:
        steps = side["verify_steps"] + side["plain_steps"]
        table.add_row(
            side["name"],
            str(Spread(**{k: side["rate"][k] for k in ("median", "low", "high")})),
            f"{side['ratio']['median']:.3f}",
            _number(side["acceptance_length"], "{:.2f}"),
            _number(side["accept_rate"], "{:.0%}"),
            f"{side['plain_steps'] / steps:.0%}" if steps else "",
            *(f"{side['ms_per_token'][part]:.3f}" for part in (*PARTS, "rest")),
            f"{side['equal_answers']}/{report['prompts']}",
        )
    return table


def depth_table(report: dict[str, Any]) -> Table:
    """Drafts that hold, by position, of the widest steps of each drafter; and what steps cost."""
    table = Table(title="drafts that hold, by position", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    fixed = [s for s in report["sides"] if isinstance(s["width"], int)]
    widest = {s["drafter"]: s for s in sorted(fixed, key=lambda side: side["width"])}
    table.add_column("side", no_wrap=True)
    for i in range(max((len(s["accept_rates"]) for s in widest.values()), default=0)):
        table.add_column(str(i + 1), justify="right")
    for side in widest.values():
        table.add_row(side["name"], *(f"{rate:.2f}" for rate in side["accept_rates"]))
    return table


def print_report(report: dict[str, Any], console: Console) -> None:
    """Tables, and what 'auto' found out."""
    console.print(rate_table(report), depth_table(report))
    for side in report["sides"]:
        if side["width"] == "auto" and side["step_costs"]:
            costs = ", ".join(f"{w}: {c:.2f}" for w, c in side["step_costs"].items() if w != 1)
            console.print(f"{side['name']}: rows and plain steps that they cost: {costs}", highlight=False)
        for reason in side["reasons"] if side["width"] == "auto" else ():
            console.print(f"  plain steps since {reason}", highlight=False)


def _number(value: float | None, text: str) -> str:
    return "" if value is None else text.format(value)


@click.command()
@click.argument("model", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--draft", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A DFlash draft.")
@click.option("--device", help="Device's name.  [default: the first GPU, else the CPU]")
@click.option("--threads", type=click.IntRange(1), help="CPU threads.  [default: physical cores]")
@click.option("--max-ctx", type=click.IntRange(1), default=2048, show_default=True)
@click.option("--tokens", "n_tokens", type=click.IntRange(2), default=128, show_default=True)
@click.option("--repeat", "n_repeat", type=click.IntRange(1), default=5, show_default=True, help="Turns.")
@click.option("--widths", default="2,4,8", show_default=True, help="Fixed widths, beside the widest.")
@click.option("--fake", type=click.FloatRange(0, 1), default=0.05, show_default=True, help="Chance; 0: none.")
@click.option("--prompts", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="One a line.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.option("--plot", "plot_path", type=click.Path(dir_okay=False, path_type=Path), help="Write a picture.")
def main(
    model: Path | None,
    draft: Path | None,
    device: str | None,
    threads: int | None,
    max_ctx: int,
    n_tokens: int,
    n_repeat: int,
    widths: str,
    fake: float,
    prompts: Path | None,
    as_json: bool,
    plot_path: Path | None,
) -> None:
    """Compare drafters on MODEL, by default the model that ships with the package."""
    fixed = [int(w) for w in widths.split(",") if w]
    options = {"device": device, "threads": threads, "max_ctx": max_ctx}
    console = Console(stderr=as_json)
    with ExitStack() as stack:
        engines = open_engines(model, draft, options, stack)
        first = next(iter(engines.values()))
        texts = read_prompts(first, prompts, shipped=model is None)
        sides = choose_sides(engines, fixed, fake)
        found, equal = measure(Runner(engines, n_tokens), sides, texts, n_repeat, console)
        info = first.info
    report = {
        "model": info.model.name,
        "draft": None if info.draft is None else info.draft.path.name,
        "device": info.device,
        "threads": info.threads,
        "rollback": info.rollback,
        "prompts": len(texts),
        "tokens": n_tokens,
        "repeat": n_repeat,
        "sides": [summarise(s, found[s.name], found["plain"], equal[s.name]) for s in sides],
    }
    if as_json:
        print(json.dumps(report, indent=1))
    else:
        print_report(report, console if console.is_terminal else Console(width=130))
    if plot_path is not None:
        plot(report, plot_path)


if __name__ == "__main__":
    main()
