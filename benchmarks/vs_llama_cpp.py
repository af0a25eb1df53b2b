"""Speed of pyggml_dflash beside llama-cpp-python's on one GGUF file, in one run, on the same ggml.

    python benchmarks/vs_llama_cpp.py MODEL.gguf

Prefill of 512 tokens and greedy decode of 128, in turns, median of five after a warm-up; the same threads,
key/value type, flash attention, chunk and context on both sides. Both run the same forwards: the prompt with
logits of its last row, then one forward per token with the best token fed back. Ours is timed through
`Engine.stream`, with all its Python; the peer through llama.cpp's C functions, without its Python sampling.
The ids that both chose are compared, which shows that they did the same work.

    python benchmarks/vs_llama_cpp.py MOE.gguf --device CUDA0 --experts-on-cpu --prefill 8192 --chunk 2048 \
        --ours stream_experts=1024 --ours expert_memory=pinned

keeps routed experts in host memory on both sides; `--ours` gives options that only ours has.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from peer_env import peer_python as build_peer
from rates import Side, SideRates, Spread, Work, n_equal, ours_command, peer_command, ratio, take_turns
from worker import Worker

from pyggml_dflash.engine.assembly import DEFAULT_MODEL
from pyggml_dflash.ggml.device import physical_cores


def compare(work: Work, python: Path, n_repeat: int, console: Console) -> dict[str, SideRates]:
    """Rates of 'ours' and 'peer'."""
    with ExitStack() as stack:
        ours = Side.open(stack.enter_context(Worker(ours_command())), work)
        peer = Side.open(stack.enter_context(Worker(peer_command(python))), work)
        prompt = ours.tokenize(work.n_prefill)
        with console.status("measuring") as status:
            return take_turns({"ours": ours, "peer": peer}, prompt, n_repeat=n_repeat, report=status.update)


def as_json(work: Work, sides: Mapping[str, SideRates]) -> dict[str, Any]:
    """Settings, rates and ratios."""
    ours, peer = sides["ours"], sides["peer"]
    return {
        "work": {**asdict(work), "model": work.model.name},
        "rates": {name: side.summary() for name, side in sides.items()},
        "ratio": {
            "prefill": asdict(ratio(ours.prefill, peer.prefill)),
            "decode": asdict(ratio(ours.decode, peer.decode)),
        },
        "equal_tokens": n_equal(ours.tokens, peer.tokens),
    }


def as_table(work: Work, sides: Mapping[str, SideRates]) -> Table:
    """Rates and ratios for a reader."""
    ours, peer = sides["ours"], sides["peer"]
    table = Table(
        "tokens per second",
        f"prefill {work.n_prefill}",
        f"decode {work.n_decode}",
        title=f"{work.model.name}: median (range) of {len(ours.prefill)}",
        caption=f"{work.threads} threads, KV {work.kv}, chunk {work.chunk}, context {work.n_ctx}, "
        f"flash attention {work.flash_attn}, repacking {'on' if work.repack else 'off'}; "
        f"of {len(ours.tokens)} chosen tokens the first {n_equal(ours.tokens, peer.tokens)} are equal",
    )
    for name, side in (("pyggml_dflash", ours), ("llama-cpp-python", peer)):
        table.add_row(name, str(Spread.of(side.prefill)), str(Spread.of(side.decode)))
    table.add_section()
    table.add_row("ratio", str(ratio(ours.prefill, peer.prefill)), str(ratio(ours.decode, peer.decode)))
    return table


def parse_ours(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, Any]:
    """Options of `Engine.open` from NAME=VALUE; whole numbers become such."""
    found: dict[str, Any] = {}
    for text in values:
        name, _, value = text.partition("=")
        if not name or not value:
            raise click.BadParameter(f"{text!r} is no option; use NAME=VALUE, such as stream_experts=1024")
        found[name] = int(value) if value.isdigit() else value
    return found


def no_model(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    """Refuse to write over a model, the argument that is easily taken for this option's."""
    if value is not None and str(value.name).endswith(".gguf"):
        raise click.BadParameter(f"{value.name} is a model; name a file to write to")
    return value


@click.command()
@click.argument("model", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=False)
@click.option("--peer-python", type=click.Path(exists=True, path_type=Path), help="Interpreter with it.")
@click.option("--prefill", "n_prefill", default=512, show_default=True, help="Tokens of the prompt.")
@click.option("--decode", "n_decode", default=128, show_default=True, help="Tokens decoded after it.")
@click.option("--repeat", "n_repeat", default=5, show_default=True, help="Turns that count.")
@click.option("--threads", default=0, help="CPU threads of both.  [default: physical cores]")
@click.option("--kv", default="f16", show_default=True, help="Type of keys and values.")
@click.option("--flash-attn", type=click.Choice(["auto", "on", "off"]), default="auto", show_default=True)
@click.option("--repack", type=click.Choice(["on", "off"]), default="on", show_default=True)
@click.option(
    "--device",
    default="CPU",
    show_default=True,
    help="Name of ours; the peer uses a GPU unless CPU.  [default: CPU]",
)
@click.option("--chunk", default=512, show_default=True, help="Rows of a chunk of the prompt.")
@click.option("--experts-on-cpu", is_flag=True, help="Routed experts in host memory, the rest on the device.")
@click.option(
    "--ours",
    multiple=True,
    callback=parse_ours,
    help="Another option of Engine.open, NAME=VALUE as in stream_experts=1024 (0: off); repeatable.",
)
@click.option(
    "--json",
    "json_file",
    type=click.File("w", lazy=True),
    callback=no_model,
    help="Where to write all of it as JSON; - prints it.",
)
def main(
    model: Path | None,
    peer_python: Path | None,
    n_prefill: int,
    n_decode: int,
    n_repeat: int,
    threads: int,
    kv: str,
    flash_attn: str,
    repack: str,
    device: str,
    chunk: int,
    experts_on_cpu: bool,
    ours: dict[str, Any],
    json_file: Any,
) -> None:
    """Compare speeds on MODEL, by default the model that ships with the package."""
    work = Work(
        model=model or DEFAULT_MODEL,
        n_prefill=n_prefill,
        n_decode=n_decode,
        n_ctx=-(-(n_prefill + n_decode + 1) // 256) * 256,
        chunk=min(chunk, n_prefill),
        threads=threads or physical_cores(),
        kv=kv,
        flash_attn=flash_attn,
        repack=repack == "on",
        device=device,
        experts_on_cpu=experts_on_cpu,
        ours=ours,
    )
    console = Console(stderr=json_file is not None and json_file.name == "<stdout>")
    backend = "cpu" if device.upper() == "CPU" else "cuda"
    python = peer_python or build_peer(backend, os.environ, os.cpu_count() or 1)
    sides = compare(work, python, n_repeat, console)
    console.print(as_table(work, sides))
    if json_file is not None:
        json.dump(as_json(work, sides), json_file, indent=1)
        json_file.write("\n")


if __name__ == "__main__":
    main()
