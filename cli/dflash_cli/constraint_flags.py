"""Flags that hold an answer to a schema, a grammar or a budget of reasoning. Layer 9."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast

import click

from dflash_cli.flags import apply
from dflash_cli.params import Param, Text, WholeNumber
from pyggml_dflash.errors import UsageError
from pyggml_dflash.requests import MAX_CONSTRAINT_CHARS, Constraint, ConstraintKind


class FileOrText(Param):
    """The name of a file that holds a text, or the text itself where it cannot be a name."""

    name = "file|text"

    def __init__(self, what: str, looks_like: str) -> None:
        """`looks_like`: an expression that is found in texts and not in names of files."""
        self._what, self._looks_like = what, re.compile(looks_like)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The text; of a file, in UTF-8."""
        text = Text().convert(value, param, ctx)
        if self._looks_like.search(text):
            return text
        most = 4 * MAX_CONSTRAINT_CHARS  # bytes of a text that is not too long
        try:
            with Path(text).open("rb") as file:
                data = file.read(most + 1)
        except (OSError, ValueError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            self.fail(f"{text!r} is neither {self._what} nor a file that can be read: {reason}.")
        if len(data) > most:
            self.fail(f"{text} has more than {most} bytes, too many for {self._what}.")
        try:
            return data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            self.fail(f"{text} is not valid UTF-8: {error.reason} at byte {error.start}.")


_CONSTRAINTS: Final = (
    click.option(
        "--json-schema",
        type=FileOrText("a JSON schema", r"^\s*[{]"),
        help="Make the answer JSON of this schema, after its reasoning.",
    ),
    click.option(
        "--grammar",
        type=FileOrText("a grammar", r"::=|\bstart\s*:|\n"),
        help="Make the answer a text of this grammar, in Lark or GBNF.",
    ),
    click.option(
        "--regex",
        type=Text(),
        help="Make the whole answer match this regular expression, as in '[0-9]+ (km|mi)'.",
    ),
    click.option(
        "--reasoning-budget",
        type=WholeNumber(),
        default=-1,
        show_default=True,
        help="Most tokens of reasoning; 0: none, -1: any number.",
    ),
)


def constraint_options(command: Callable[..., None]) -> Callable[..., None]:
    """The flags; the command receives what they ask for as `constraint` and `reasoning_budget`."""

    @functools.wraps(command)
    def with_constraint(
        *, json_schema: str | None, grammar: str | None, regex: str | None, **rest: Any
    ) -> None:
        texts = {"json_schema": json_schema, "grammar": grammar, "regex": regex}
        given = {kind: text for kind, text in texts.items() if text is not None}
        if len(given) > 1:
            flags = " and ".join(f"--{kind.replace('_', '-')}" for kind in given)
            raise UsageError(f"{flags} cannot hold at the same time; give one")
        found = [Constraint(kind=cast(ConstraintKind, kind), text=text) for kind, text in given.items()]
        command(constraint=found[0] if found else None, **rest)

    return apply(_CONSTRAINTS, with_constraint)
