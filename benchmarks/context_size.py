"""What room for a long context costs a short prompt: prefill of the same tokens in two contexts, in turns.

    python benchmarks/context_size.py [MODEL.gguf] --prompt 2048 --small 4096 --large 65536

Both engines are open in processes of their own and take turns. The figure is seconds of prefill in the large
context over seconds in the small one, turn by turn: median and range. Without a model a random hybrid of 4
layers is written. Above --limit the exit status is 1.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from model_shapes import PRESETS
from random_model import write_model
from rates import Side, SideRates, Spread, Work, ours_command, ratio, take_turns
from worker import Worker

from pyggml_dflash.ggml.device import physical_cores

SHAPE = replace(PRESETS["qwen35-4b"], n_layer=4, n_embd=1024, n_head=4, n_head_kv=2, n_ff=3072, n_vocab=4096)


def measure(work: Work, contexts: tuple[int, int], n_repeat: int, console: Console) -> dict[str, SideRates]:
    """Rates by context."""
    with ExitStack() as stack:
        sides = {
            str(n): Side.open(stack.enter_context(Worker(ours_command())), replace(work, n_ctx=n))
            for n in contexts
        }
        prompt = sides[str(contexts[0])].tokenize(work.n_prefill)
        with console.status("measuring") as status:
            return take_turns(sides, prompt, n_repeat=n_repeat, report=status.update)


@click.command()
@click.argument("model", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=False)
@click.option("--prompt", "n_prompt", type=click.IntRange(1), default=2048, show_default=True)
@click.option("--small", type=click.IntRange(1), default=4096, show_default=True, help="Tokens of context.")
@click.option("--large", type=click.IntRange(1), default=65_536, show_default=True, help="Likewise.")
@click.option("--device", help="A device by its ggml name; the first GPU, else the CPU.")
@click.option("--threads", type=click.IntRange(1), help="On the CPU; all cores if not given.")
@click.option("--repeat", "n_repeat", type=click.IntRange(1), default=5, show_default=True)
@click.option("--limit", default=1.1, show_default=True, help="Largest median ratio that is good.")
def main(
    model: Path | None,
    n_prompt: int,
    small: int,
    large: int,
    device: str | None,
    threads: int | None,
    n_repeat: int,
    limit: float,
) -> None:
    """Prefill the same prompt of MODEL in a small and in a large context."""
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        if model is None:
            model = Path(folder) / "random.gguf"
            write_model(model, SHAPE, "Q4_K_M")
        work = Work(
            model=model, n_prefill=n_prompt, n_decode=8, threads=threads or physical_cores(), device=device
        )
        sides = measure(work, (small, large), n_repeat, console)
    first, second = sides.values()
    table = Table("context", "prefill t/s", "decode t/s", title=f"{n_prompt} tokens, {n_repeat} turns")
    for name, side in sides.items():
        table.add_row(name, str(Spread.of(side.prefill)), str(Spread.of(side.decode)))
    console.print(table)
    found = ratio(first.prefill, second.prefill)  # of rates, which is one of seconds upside down
    console.print(f"seconds in {large} over seconds in {small}: {found}; the same ids: ", end="")
    console.print(first.tokens == second.tokens)
    sys.exit(found.median > limit)


if __name__ == "__main__":
    main()
