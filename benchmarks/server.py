"""Speed of `dflash serve` beside llama-cpp-python's server on one GGUF file, under the same load over HTTP.

    python benchmarks/server.py MODEL.gguf --peer-python PEER/bin/python

Both servers run on loopback for the whole time, with the same file, threads, context, chunk and key/value
type, and take turns; the one whose turn it is not waits. One client alone asks for greedy completions, and
then several at a time. Whole answers give tokens per second, from the first request to the last answer;
streamed ones give the time to the first text. Every request has a prompt that begins differently from all
others, so that neither side saves work by what it has read before; both sides get the same ones. Texts and
lengths of prompts are compared, which shows that both did the same work.

The peer answers one request at a time. Its logits of all rows, its penalty of repetition and its habit of
breaking a stream off for the next request are turned off. Ours runs as many slots as there are clients and
does not speculate, unless `--ours spec=auto` lets it. The peer's interpreter needs the extra 'server' too.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, Final

import click
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from http_load import Answer, Body, Server, ServerError, first_texts_s, tokens_per_s
from peer_env import peer_python as build_peer
from rates import TEXT, Spread, ratio

from pyggml_dflash.engine.assembly import DEFAULT_MODEL
from pyggml_dflash.ggml.device import physical_cores

ROOT: Final = Path(__file__).resolve().parent.parent
PEER_CHECK: Final = "import llama_cpp.server.app, uvicorn"
WORDS: Final = TEXT.split()
OPENING: Final = "\n\nOnce upon a time,"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked of both, and how they run."""

    model: Path
    clients: tuple[int, ...]  # at a time
    n_requests: int  # of each client in a turn
    n_words: int  # of a prompt
    n_answer: int  # most tokens of an answer
    n_ctx: int
    chunk: int
    threads: int
    device: str
    ours: tuple[str, ...] = ()  # more flags of each
    peer: tuple[str, ...] = ()


@dataclass(slots=True)
class Found:
    """One side under one number of clients, turn by turn."""

    tokens_s: list[float] = field(default_factory=list)
    first_text_ms: list[float] = field(default_factory=list)  # the median of each turn
    answers: list[Answer] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """For JSON."""
        figures = {"tokens_s": self.tokens_s, "first_text_ms": self.first_text_ms}
        counts = {
            "n_answers": len(self.answers),
            "n_tokens": sum(answer.n_tokens for answer in self.answers),
            "n_ended": sum(answer.ended for answer in self.answers),
            "prompt_tokens": median(answer.n_prompt for answer in self.answers),
        }
        return {**{n: {**asdict(Spread.of(v)), "all": v} for n, v in figures.items()}, **counts}


Sides = dict[str, dict[int, Found]]  # 'ours' and 'peer', by the number of clients


def bodies(load: Load) -> Iterator[Body]:
    """Requests without end; the number in front makes each prompt begin differently, the last words go on."""
    for number in count(1):
        turned = WORDS[number % len(WORDS) :] + WORDS * (1 + load.n_words // len(WORDS))
        prompt = " ".join([f"{number}.", *turned[: load.n_words], OPENING])
        yield {"prompt": prompt, "max_tokens": load.n_answer, "temperature": 0}


def ours_server(load: Load) -> Server:
    """`dflash serve`, from this checkout."""
    flags = {
        "--host": "HOST",
        "--port": "PORT",
        "--max-ctx": str(load.n_ctx),
        "--chunk": str(load.chunk),
        "--threads": str(load.threads),
        "--slots": str(max(load.clients)),
        "--queue-limit": str(max(load.clients)),
        "--device": load.device,
        "--spec": "off",
    }
    words = [word for pair in flags.items() for word in pair]
    paths = [str(ROOT), str(ROOT / "cli"), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    command = [sys.executable, "-m", "pyggml_dflash", "serve", str(load.model), *words, *load.ours]
    return Server("dflash serve", command, env)


def peer_server(load: Load, python: Path) -> Server:
    """`llama_cpp.server`, from its interpreter."""
    flags = {
        "--model": str(load.model),
        "--host": "HOST",
        "--port": "PORT",
        "--n_ctx": str(load.n_ctx),
        "--n_batch": str(load.chunk),
        "--n_ubatch": str(load.chunk),
        "--n_threads": str(load.threads),
        "--n_threads_batch": str(load.threads),
        "--n_gpu_layers": "0" if load.device.upper() == "CPU" else "-1",
        "--flash_attn": "True",
        "--logits_all": "False",
        "--interrupt_requests": "False",
        "--verbose": "False",
    }
    words = [word for pair in flags.items() for word in pair]
    command = [str(python), "-m", "llama_cpp.server", *words, *load.peer]
    return Server("llama_cpp.server", command, os.environ, {"repeat_penalty": 1.0})  # its default is 1.1


def check_peer(python: Path) -> None:
    """Refuse an interpreter whose llama_cpp.server cannot start."""
    done = subprocess.run([python, "-c", PEER_CHECK], capture_output=True, text=True, check=False)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        extras = "uvicorn fastapi sse-starlette starlette-context pydantic-settings PyYAML"
        raise click.ClickException(
            f"llama_cpp.server cannot start in {python}: {why}; install what its extra 'server' names:\n"
            f"{shlex.quote(str(python))} -m pip install {extras}"
        )


def take_turns(servers: dict[str, Server], load: Load, n_repeat: int, report: Any) -> Sides:
    """Warm both up with the whole load once, then measure `n_repeat` turns."""
    sides: Sides = {name: {n: Found() for n in load.clients} for name in servers}
    asked = bodies(load)
    for turn in range(n_repeat + 1):
        for n in load.clients:
            report(f"turn {turn} of {n_repeat}" + ("" if turn else " (warm-up)") + f", {n} clients")
            whole, streamed = ([next(asked) for _ in range(n * load.n_requests)] for _ in range(2))
            for name, server in servers.items():
                measure(server, n, whole, streamed, sides[name][n] if turn else Found())
    return sides


def measure(server: Server, n: int, whole: Sequence[Body], streamed: Sequence[Body], into: Found) -> None:
    """One side's part of a turn."""
    rate, answers = tokens_per_s(server, whole, n)
    into.tokens_s.append(rate)
    into.answers += answers
    into.first_text_ms.append(1000 * median(first_texts_s(server, streamed, n)))


def compare(load: Load, python: Path, n_repeat: int, console: Console) -> Sides:
    """Figures of 'ours' and 'peer'."""
    with ExitStack() as stack, console.status("starting") as status:
        servers = {
            "ours": stack.enter_context(ours_server(load)),
            "peer": stack.enter_context(peer_server(load, python)),
        }
        return take_turns(servers, load, n_repeat, status.update)


def n_equal(sides: Sides) -> int:
    """How many answers have the same text on both sides."""
    pairs = (zip(found.answers, sides["peer"][n].answers, strict=True) for n, found in sides["ours"].items())
    return sum(ours.text == peer.text for both in pairs for ours, peer in both)


def ratios(sides: Sides, n: int) -> dict[str, Spread]:
    """Ours over the peer's, turn by turn: more is better for rates, less for times."""
    ours, peer = sides["ours"][n], sides["peer"][n]
    return {
        "tokens_s": ratio(ours.tokens_s, peer.tokens_s),
        "first_text_ms": ratio(ours.first_text_ms, peer.first_text_ms),
    }


def as_json(load: Load, sides: Sides) -> dict[str, Any]:
    """Settings, figures and ratios."""
    return {
        "load": {**asdict(load), "model": load.model.name},
        "figures": {side: {n: f.summary() for n, f in found.items()} for side, found in sides.items()},
        "ratio": {n: {what: asdict(r) for what, r in ratios(sides, n).items()} for n in load.clients},
        "equal_answers": n_equal(sides),
    }


def as_table(load: Load, sides: Sides) -> Table:
    """Figures and ratios for a reader."""
    answers = [answer for found in sides["ours"].values() for answer in found.answers]
    lengths = sorted({answer.n_prompt for answer in answers})
    n_turns = len(sides["ours"][load.clients[0]].tokens_s)
    n_ended = sum(answer.ended for answer in answers)
    table = Table(
        *("", "dflash serve", "llama_cpp.server", "ratio"),
        title=f"{load.model.name}: median (range) of {n_turns} turns",
        caption=f"prompts of {lengths[0]} to {lengths[-1]} tokens, answers of up to {load.n_answer}; "
        f"of {len(answers)} answers {n_ended} ended before, and {n_equal(sides)} are equal; "
        f"{load.threads} threads, chunk {load.chunk}, context {load.n_ctx}, {load.device}",
    )
    for n in load.clients:
        who = "1 client" if n == 1 else f"{n} clients"
        for figure, name in (("tokens_s", "tokens/s"), ("first_text_ms", "ms to the first text")):
            values = (getattr(sides[side][n], figure) for side in ("ours", "peer"))
            table.add_row(f"{who}, {name}", *map(str, map(Spread.of, values)), str(ratios(sides, n)[figure]))
    return table


def as_flags(prefix: str) -> Any:
    """A callback that makes flags of NAME=VALUE."""

    def parse(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
        words: list[str] = []
        for text in values:
            name, _, value = text.partition("=")
            if not name or not value:
                raise click.BadParameter(f"{text!r} is no flag; use NAME=VALUE, such as {prefix}")
            words += [f"--{name}", value]
        return tuple(words)

    return parse


@click.command()
@click.argument("model", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=False)
@click.option("--peer-python", type=click.Path(exists=True, path_type=Path), help="Interpreter with it.")
@click.option(
    "--clients",
    multiple=True,
    type=click.IntRange(1),
    default=(1, 4),
    show_default=True,
    help="Clients at a time; repeatable.",
)
@click.option("--requests", "n_requests", default=2, show_default=True, help="Of each client in a turn.")
@click.option("--prompt-words", default=64, show_default=True, help="Words of a prompt.")
@click.option("--answer", "n_answer", default=64, show_default=True, help="Most tokens of an answer.")
@click.option("--repeat", "n_repeat", default=5, show_default=True, help="Turns that count.")
@click.option("--max-ctx", default=1024, show_default=True, help="Context of a slot, and of the peer.")
@click.option("--chunk", default=512, show_default=True, help="Rows of a chunk of the prompt.")
@click.option("--threads", default=0, help="CPU threads of both.  [default: physical cores]")
@click.option("--device", default="CPU", show_default=True, help="Ours; the peer uses a GPU unless CPU.")
@click.option(
    "--ours",
    multiple=True,
    callback=as_flags("spec=auto"),
    help="Another flag of dflash serve, NAME=VALUE as in spec=auto; repeatable.",
)
@click.option(
    "--peer",
    multiple=True,
    callback=as_flags("cache=True"),
    help="Another flag of llama_cpp.server, NAME=VALUE as in cache=True; repeatable.",
)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write all of it there.")
def main(
    model: Path | None,
    peer_python: Path | None,
    clients: tuple[int, ...],
    n_requests: int,
    prompt_words: int,
    n_answer: int,
    n_repeat: int,
    max_ctx: int,
    chunk: int,
    threads: int,
    device: str,
    ours: tuple[str, ...],
    peer: tuple[str, ...],
    json_path: Path | None,
) -> None:
    """Compare servers on MODEL, by default the model that ships with the package."""
    load = Load(
        model=model or DEFAULT_MODEL,
        clients=clients,
        n_requests=n_requests,
        n_words=prompt_words,
        n_answer=n_answer,
        n_ctx=max_ctx,
        chunk=chunk,
        threads=threads or physical_cores(),
        device=device,
        ours=ours,
        peer=peer,
    )
    backend = "cpu" if device.upper() == "CPU" else "cuda"
    python = peer_python or build_peer(backend, os.environ, os.cpu_count() or 1)
    check_peer(python)
    console = Console()
    try:
        sides = compare(load, python, n_repeat, console)
    except ServerError as error:
        raise click.ClickException(str(error)) from error
    console.print(as_table(load, sides))
    if json_path is not None:
        json_path.write_text(json.dumps(as_json(load, sides), indent=1) + "\n")


if __name__ == "__main__":
    main()
