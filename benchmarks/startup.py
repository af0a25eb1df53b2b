"""Seconds until the package is there: `import pyggml_dflash`, the engine, and `dflash --help`.

    python benchmarks/startup.py

Each is a fresh interpreter. What the bare interpreter takes is measured beside it and shown, not taken off.
Targets: 150 ms for the import, 300 ms for `dflash --help`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rates import Spread

ROOT: Final = Path(__file__).resolve().parent.parent
COMMANDS: Final = {
    "python -c pass": ("-c", "pass"),
    "import pyggml_dflash": ("-c", "import pyggml_dflash"),
    "from pyggml_dflash import Engine": ("-c", "from pyggml_dflash import Engine"),
    "dflash --help": ("-m", "pyggml_dflash", "--help"),
}


def run_once(arguments: tuple[str, ...]) -> float:
    """Milliseconds of one process from start to end."""
    paths = [str(ROOT), str(ROOT / "cli"), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p)}
    started = time.perf_counter()
    subprocess.run([sys.executable, *arguments], env=env, stdout=subprocess.DEVNULL, check=True)
    return 1000 * (time.perf_counter() - started)


@click.command()
@click.option("--runs", "n_runs", default=20, show_default=True, help="Runs that count, after one.")
def main(n_runs: int) -> None:
    """Measure start-up times."""
    found: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for run in range(n_runs + 1):
        for name, arguments in COMMANDS.items():
            milliseconds = run_once(arguments)
            if run:
                found[name].append(milliseconds)
    for name, values in found.items():
        print(f"{name:34} {Spread.of(values)} ms; n = {n_runs}")


if __name__ == "__main__":
    main()
