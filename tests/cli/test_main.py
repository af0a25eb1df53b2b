"""The group: its overview, its start, and how errors become lines and exit codes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from dflash_cli.main import COMMANDS, DflashGroup, cli

from tests.cli.dflash_command import PICO, dflash


@pytest.mark.parametrize("name", COMMANDS)
def test_the_overview_tells_what_the_command_itself_tells(name: str) -> None:
    command = cli.get_command(None, name)  # type: ignore[arg-type]
    assert command is not None
    assert command.name == name
    assert command.get_short_help_str(limit=200) == COMMANDS[name]


def test_help_imports_nothing_that_is_slow() -> None:
    code = (
        "import sys\nfrom dflash_cli.main import cli\n"
        "try: cli(['--help'])\n"
        "except SystemExit: print(*sorted(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stderr.split())
    assert "Commands:" in done.stdout
    assert not loaded & {"numpy", "rich", "tokenizers", "jinja2", "cffi", "asyncio", "pyggml_dflash.api"}


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, flag: str) -> None:
    done = CliRunner().invoke(cli, [name, flag])
    assert done.exit_code == 0
    assert done.output.startswith("Usage:")


def test_python_m_is_the_same_group() -> None:
    done = dflash("--help")
    assert done.code == 0
    assert done.out.split() == CliRunner().invoke(cli, ["--help"], prog_name="dflash").output.split()


def test_an_unknown_command_exits_2_and_is_quoted() -> None:
    done = CliRunner().invoke(cli, ["rum"])
    assert done.exit_code == 2
    assert "'rum'" in done.output


@pytest.mark.parametrize("command", ["run", "score"])
def test_a_missing_model_exits_3_with_its_path(command: str) -> None:
    done = dflash(command, "no/such.gguf", "-p", "x")
    assert (done.code, done.out) == (3, "")
    assert done.err == "dflash: error: no/such.gguf does not exist\n"


def test_a_directory_as_model_exits_3(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["run", str(tmp_path), "-p", "x"])
    assert done.exit_code == 3
    assert done.output == f"dflash: error: {tmp_path} is a directory; name a .gguf file in it\n"


def test_a_model_path_that_cannot_be_exits_3(tmp_path: Path) -> None:
    loop = tmp_path / "loop.gguf"
    loop.symlink_to(loop)
    for path in ("x" * 300, str(loop)):
        done = CliRunner().invoke(cli, ["run", path, "-p", "x"])
        assert done.exit_code == 3
        assert done.output.startswith(f"dflash: error: {path} cannot be opened: ")


def test_an_error_does_not_steer_a_terminal() -> None:
    done = CliRunner().invoke(cli, ["run", "a\x1b[2J.gguf", "-p", "x"])
    assert done.output == "dflash: error: a\\x1b[2J.gguf does not exist\n"


def test_a_prompt_file_that_cannot_be_read_exits_2() -> None:
    done = CliRunner().invoke(cli, ["run", "-f", "/proc/self/mem"])
    assert done.exit_code == 2
    assert done.output.startswith("dflash: error: /proc/self/mem cannot be read: ")


@pytest.mark.parametrize("n_bytes", [0, 10, 5000])
def test_a_damaged_model_exits_3_in_one_line(tmp_path: Path, n_bytes: int) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(PICO.read_bytes()[:n_bytes])
    done = dflash("run", str(path), "-p", "x")
    assert (done.code, done.out) == (3, "")
    assert done.err.startswith(f"dflash: error: {path}")
    assert done.err.count("\n") == 1


def test_an_interrupt_while_a_class_is_made_exits_130() -> None:
    class Interrupted:
        def __set_name__(self, owner: type, name: str) -> None:
            raise KeyboardInterrupt

    class Group(DflashGroup):
        def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
            type("Half", (), {"field": Interrupted()})
            return None

    done = CliRunner().invoke(Group(), ["fit"])
    assert (done.exit_code, done.output) == (130, "\n")


def test_another_runtime_error_is_not_taken_for_an_interrupt() -> None:
    class Group(DflashGroup):
        def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
            raise RuntimeError("a bug")

    done = CliRunner().invoke(Group(), ["fit"])
    assert isinstance(done.exception, RuntimeError)
