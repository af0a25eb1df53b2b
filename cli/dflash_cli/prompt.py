"""Where a prompt comes from: a flag, a file or standard input, exactly one of them. Layer 9."""

from __future__ import annotations

import functools
import select
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click

from dflash_cli.flags import apply
from dflash_cli.params import Text
from dflash_cli.ui import say
from pyggml_dflash.errors import UsageError

STDIN: Final = "-"
PATIENCE_S: Final = 1.0  # after this long without input, say what is being waited for

_PROMPT: Final = (
    click.option("-p", "--prompt", type=Text(), help="The prompt; '-' reads standard input, as does a pipe."),
    click.option(
        "-f",
        "--file",
        type=click.Path(exists=True, dir_okay=False, readable=True, allow_dash=True, path_type=Path),
        help="File that holds the prompt, in UTF-8.",
    ),
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as it was given."""

    text: str
    typed: bool  # as an argument, so that it has no line break that an editor or echo put at its end

    @property
    def turn(self) -> str:
        """The prompt as a message: the last line break of a file or a pipe is not part of it."""
        return self.text if self.typed else self.text.removesuffix("\n").removesuffix("\r")


@dataclass(frozen=True, slots=True)
class PromptSource:
    """Where a command line says that the prompt is."""

    text: str | None  # -p
    file: Path | None  # -f

    def __post_init__(self) -> None:
        if self.text is not None and self.file is not None:
            raise UsageError("-p and -f both give a prompt; pass one of them")

    def read(self) -> Prompt | None:
        """The prompt; None if no flag gives one and nothing is piped in. Waits for the end of a pipe."""
        if self.text is not None and self.text != STDIN:
            return Prompt(self.text, True)
        if self.file is not None and str(self.file) != STDIN:
            return Prompt(_decoded(_read_file(self.file), str(self.file)), False)
        asked = self.text is not None or self.file is not None
        if not asked and (sys.stdin is None or sys.stdin.isatty()):
            return None
        data = b"" if sys.stdin is None else _read_stdin()
        return Prompt(_decoded(data, "standard input"), False) if data or asked else None


def prompt_options(command: Callable[..., None]) -> Callable[..., None]:
    """-p and -f; the command receives them as `source`."""

    @functools.wraps(command)
    def with_source(*, prompt: str | None, file: Path | None, **rest: Any) -> None:
        command(source=PromptSource(prompt, file), **rest)

    return apply(_PROMPT, with_source)


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error


def _read_stdin() -> bytes:
    with suppress(OSError, ValueError):  # a system that can wait for sockets only
        if not select.select([sys.stdin.buffer], [], [], PATIENCE_S)[0]:
            say("reading the prompt from standard input")
    return sys.stdin.buffer.read()


def _decoded(data: bytes, source: str) -> str:
    if not data:
        raise UsageError(f"{source} is empty; a prompt has at least one character")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{source} is not UTF-8: byte {error.start} is {data[error.start]:#04x}") from error
