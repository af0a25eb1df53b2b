"""`dflash env`: the values in force for a command, and where each comes from. Layer 9."""

from __future__ import annotations

from typing import Any, Final

import click

from dflash_cli.flags import JSON
from dflash_cli.settings import META, Settings, flags_of, settings_of
from dflash_cli.streams import printable
from dflash_cli.ui import open_stdout, print_json, print_table
from pyggml_dflash.errors import DflashError, UsageError

HIDDEN: Final = "(hidden)"


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@JSON
@click.argument("command_line", nargs=-1, type=click.UNPROCESSED, metavar="[COMMAND] [ARGS]...")
@click.pass_context
def env(ctx: click.Context, command_line: tuple[str, ...], as_json: bool) -> None:
    """Show the values of a command's settings, and where each comes from.

    Takes the command line that is meant; without COMMAND it is 'run'. Values are checked as the command
    does, once they are shown. From weakest to strongest, they come from defaults, a profile, a
    configuration file, the environment, and flags. A file has a flag's name for a key, such as
    max-ctx = "auto"; a table such as [run] holds what is meant for that command only. Variables are named
    as in DFLASH_MAX_CTX.
    """
    open_stdout()
    words = ("run", *command_line) if "".join(command_line[:1])[:1] in ("", "-") else command_line
    command, values, problem = read_settings(ctx, words)
    show(ctx.meta[META], command, values, as_json=as_json)
    if problem is not None:
        raise problem


def show(settings: Settings, command: str, values: dict[str, dict[str, Any]], *, as_json: bool) -> None:
    """Print the values of a command's settings."""
    if as_json:
        print_json({"command": command, "config": settings.config, "settings": values})
        return
    there = settings.config is not None and settings.config.exists()
    click.echo(f"configuration file: {settings.config}{'' if there else ' (not there)'}\n")
    rows = [["setting", "value", "from"]]
    rows += [[key, printable(_shown(v["value"])), printable(v["from"])] for key, v in values.items()]
    print_table(rows, "<<<")


def read_settings(
    ctx: click.Context, words: tuple[str, ...]
) -> tuple[str, dict[str, dict[str, Any]], Exception | None]:
    """The command meant, its settings' values with their origins, and why it refuses one, if it does.

    Raises what is wrong with anything but a value.
    """
    outer = ctx.parent
    assert outer is not None
    assert isinstance(outer.command, click.Group)
    name, command, args = outer.command.resolve_command(outer, list(words))
    assert name is not None
    assert command is not None
    found = settings_of(command)
    if not found:
        raise UsageError(f"'dflash {name}' has no settings")
    problem: Exception | None = None
    try:
        own = command.make_context(name, list(args), parent=outer)
    except (DflashError, click.BadParameter) as error:
        own, problem = command.make_context(name, args, parent=outer, resilient_parsing=True), error
    settings: Settings = own.meta[META]
    others = {key: param for key, param in flags_of(command).items() if settings.find(param.name or "")}
    with own:
        values = {key: _value(own, param) for key, param in (found | others).items() if key != "config"}
    return name, values, problem


def _value(ctx: click.Context, param: click.Parameter) -> dict[str, Any]:
    """What was given for a parameter, as it was given, and where; else what it is by default."""
    settings: Settings = ctx.meta[META]
    found = settings.find(param.name or "")
    if param.name == "profile":
        value: Any = settings.profile
    else:
        value = ctx.params.get(param.name or "") if found is None else found.value
    is_secret = isinstance(param, click.Option) and param.hide_input and value is not None
    return {"value": HIDDEN if is_secret else value, "from": "default" if found is None else found.origin}


def _shown(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "-"
    return "-" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
