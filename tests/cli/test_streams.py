"""Standard streams that are full, closed or left: what fails, and what goes on."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from tests.cli.dflash_command import COMMAND, LIMIT_S

RUN = ("run", "-p", "Tell me a story.", "-n", "2", "--threads", "1")


def shell(args: tuple[str, ...], redirect: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/sh", "-c", f"{shlex.join([*COMMAND, *args])} {redirect}"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        cwd=cwd,
    )


@pytest.mark.parametrize("redirect", [">/dev/full", ">&-"])
@pytest.mark.parametrize(
    "args",
    [
        (*RUN, "--quiet"),
        (*RUN, "--quiet", "--json"),
        ("inspect", "--json"),
        ("score", "-p", "A fox.", "--quiet"),
        ("--help",),
        ("run", "--help"),
        ("version",),
    ],
)
def test_an_output_that_takes_nothing_is_one_line_and_exit_1(
    tmp_path: Path, args: tuple[str, ...], redirect: str
) -> None:
    done = shell(args, redirect, tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("dflash: error: cannot write: ")
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1 + done.stderr.count("no MODEL given")


@pytest.mark.parametrize("redirect", ["2>/dev/full", "2>&-"])
def test_notices_that_nobody_takes_do_not_stop_the_answer(tmp_path: Path, redirect: str) -> None:
    done = shell(RUN, redirect, tmp_path)
    assert done.returncode == 0
    assert done.stdout.startswith("Once")


def test_a_reader_that_leaves_standard_error_leaves_the_answer_whole(tmp_path: Path) -> None:
    shell(RUN, "2>&1 >out | true", tmp_path)
    assert (tmp_path / "out").read_text().startswith("Once")
