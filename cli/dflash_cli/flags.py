"""How flags are put on commands, and those that many commands have. Layer 9."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import click

from dflash_cli.params import ModelFile
from dflash_cli.settings import variable
from pyggml_dflash.errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])
K = TypeVar("K")
V = TypeVar("V")
Flag = Callable[[F], F]

# Read before every flag, so that a model that is missing is told before what is said about it.
MODEL: Final = click.argument("model", type=ModelFile(), required=False, is_eager=True)
JSON: Final = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")


def apply(flags: Sequence[Flag[Any]], command: F) -> F:
    """`command` with the flags, in the order in which help shows them."""
    for flag in reversed(flags):
        command = flag(command)
    return command


def apply_settings(flags: Sequence[Flag[Any]], command: F) -> F:
    """`apply`, for flags that may also stand in the environment and anywhere in a configuration file."""
    command = apply(flags, command)
    added: list[click.Parameter] = vars(command)["__click_params__"][-len(flags) :]
    for param in added:
        param.envvar = variable(param)
    return command


def each_once(flag: str, what: str, pairs: Sequence[tuple[K, V]]) -> dict[K, V]:
    """The values of a flag that may be repeated, by `what` it names; refuses one that it names twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise UsageError(f"{flag} names {what} {twice} twice; give each {what} one")
    return found
