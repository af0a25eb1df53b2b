"""The README's copies of --help texts are what the commands print."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
BLOCK = re.compile(r"<!-- generated: dflash (?P<args>.*?) -->\n(?P<text>.*?)<!-- /generated -->", re.DOTALL)


def generated(args: str) -> str:
    """A block's content, as `python tests/test_readme.py` writes it."""
    command = [sys.executable, "-m", "pyggml_dflash", *args.split()]
    environment = {**os.environ, "COLUMNS": "100", "TERM": "dumb"}
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return f"```text\n{run.stdout.rstrip()}\n```\n"


@pytest.mark.parametrize("match", list(BLOCK.finditer(README.read_text())), ids=lambda m: m["args"])
def test_the_readme_shows_what_help_prints(match: re.Match[str]) -> None:
    assert match["text"] == generated(match["args"])


def test_the_readme_has_generated_blocks() -> None:
    assert len(BLOCK.findall(README.read_text())) >= 2


if __name__ == "__main__":
    README.write_text(
        BLOCK.sub(
            lambda m: f"<!-- generated: dflash {m['args']} -->\n{generated(m['args'])}<!-- /generated -->",
            README.read_text(),
        )
    )
