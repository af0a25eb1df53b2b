"""Values of flags that come from a profile, a configuration file or the environment. Layer 9.

The order is defaults < profile < file < environment < flag. Click knows all but the second and the third,
which become its `default_map` before it parses. A parameter that has a variable is a setting: any command's
may stand at the top of the file, where commands that lack it pass it over; a table named after a command
holds any flag of that command, and wins there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from dflash_cli.ui import say
from pyggml_dflash.errors import UsageError
from pyggml_dflash.options import refusal

if TYPE_CHECKING:
    from dflash_cli.profiles import Profile

PREFIX: Final = "DFLASH_"
NOT_OURS: Final = ("DFLASH_GGML_SOURCE",)  # read when the package is built
META: Final = "dflash_cli.settings"  # where a context keeps its `Settings`

# Flags that stand for one choice: a stronger source's removes the weaker ones' of the other names.
_ONE_PLACE: Final = frozenset({"device", "devices", "target_device", "target_devices"})
REPLACED: Final[Mapping[str, frozenset[str]]] = {
    "device": _ONE_PLACE | {"expert_device", "split"},
    "devices": _ONE_PLACE | {"expert_device"},
    "target_device": _ONE_PLACE,
    "target_devices": _ONE_PLACE,
}


@dataclass(frozen=True, slots=True)
class Value:
    """What stands for a parameter in some source, in the form that click parses."""

    value: str | int | list[str]  # bool is one of int
    origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the sources say about one command line, by parameter."""

    config: Path | None = None  # the file, which need not be there if nobody named it
    profile: str | None = None
    below: Mapping[str, Value] = field(default_factory=dict)  # profile and file, merged
    stated: Mapping[str, Value] = field(default_factory=dict)  # environment and flags

    @property
    def default_map(self) -> dict[str, str | int | list[str]]:
        """For click."""
        return {name: value.value for name, value in self.below.items()}

    def find(self, name: str) -> Value | None:
        """What decides a parameter; None where its default does."""
        return self.stated.get(name) or self.below.get(name)


def variable(param: click.Parameter) -> str:
    """The environment variable of a setting: `DFLASH_MAX_CTX` for --max-ctx."""
    return PREFIX + key_of(param).upper().replace("-", "_")


def key_of(param: click.Parameter) -> str:
    """A parameter's name in a file: 'max-ctx' for --max-ctx; an argument's own."""
    long = [opt for opt in param.opts if opt.startswith("--")]  # the first has the name, others are aliases
    return (long or param.opts)[0].lstrip("-").replace("_", "-")


def settings_of(command: click.Command) -> dict[str, click.Parameter]:
    """The parameters of a command that have a variable, by their names in a file."""
    return {key_of(param): param for param in command.params if param.envvar}


def resolve(ctx: click.Context, name: str, command: click.Command, args: Sequence[str]) -> Settings:
    """Read what a command line leaves open. `ctx` is the group's; raises `UsageError` for what is unknown."""
    settings = settings_of(command)
    if "config" not in settings:
        return Settings()
    own = click.Context(command, info_name=name, parent=ctx)
    given: Mapping[str, Any] = command.make_parser(own).parse_args(list(args))[0]
    help_option = command.get_help_option(own)
    if help_option is not None and help_option.name in given:
        return Settings()
    stated = _environment(settings.values()) | _flagged(given)
    commands = Commands(ctx)
    config, table = _read_config(stated.get("config"))
    _check_keys(config, table, settings, commands)
    in_file = _file_values(config, table, name, command)
    profile = _find_profile(stated.get("profile") or in_file.get("profile"))
    by_profile = {} if profile is None else _profile_values(profile, name, command)
    if profile is not None:
        _set_environment(profile)
    if not given.get("quiet"):
        _warn_of_unknown(commands, settings)
    return Settings(
        config=config,
        profile=None if profile is None else profile.name,
        below=merge([by_profile, in_file], stated),
        stated=stated,
    )


def merge(layers: Sequence[Mapping[str, Value]], stronger: Collection[str]) -> dict[str, Value]:
    """One layer of several, weakest first, below parameters that stand in `stronger` sources."""
    merged: dict[str, Value] = {}
    for layer in layers:
        merged = _without_replaced(merged, layer) | dict(layer)
    return _without_replaced(merged, stronger)


def _without_replaced(layer: Mapping[str, Value], stronger: Collection[str]) -> dict[str, Value]:
    gone = frozenset[str]().union(*(REPLACED.get(name, frozenset({name})) for name in stronger))
    return {name: value for name, value in layer.items() if name not in gone}


class Commands:
    """Every command of a group. Importing them all takes a while, so `settings` only does when it is read."""

    def __init__(self, ctx: click.Context) -> None:
        assert isinstance(ctx.command, click.Group)
        self._ctx, self._group = ctx, ctx.command
        self.names: Final = self._group.list_commands(ctx)
        self._settings: dict[str, click.Parameter] = {}

    def get(self, name: str) -> click.Command:
        """One of `names`."""
        command = self._group.get_command(self._ctx, name)
        assert command is not None
        return command

    @property
    def settings(self) -> Mapping[str, click.Parameter]:
        """The settings of all, by their names in a file."""
        if not self._settings:
            for name in self.names:
                self._settings |= settings_of(self.get(name))
        return self._settings


def _flagged(given: Mapping[str, Any]) -> dict[str, Value]:
    """What stands on the command line; click's parser also lists arguments that do not."""
    found = {name: list(v) if isinstance(v, (list, tuple)) else v for name, v in given.items()}
    return {
        name: Value(v, "flag") for name, v in found.items() if isinstance(v, (str, int, list)) and v != []
    }


def _environment(params: Collection[click.Parameter]) -> dict[str, Value]:
    """Variables that are set and not empty, as click takes them."""
    found = {}
    for param in params:
        origin = str(param.envvar)
        text = os.environ.get(origin)
        if text:
            found[param.name or ""] = Value([text] if _many(param) else text, origin)
    return found


def _many(param: click.Parameter) -> bool:
    return isinstance(param, click.Option) and param.multiple


def default_config() -> Path:
    """The configuration file that is read if none is named."""
    from platformdirs import user_config_path

    return user_config_path("pyggml-dflash", appauthor=False) / "config.toml"


def _read_config(named: Value | None) -> tuple[Path, dict[str, Any]]:
    """The file and what is in it; nothing if it was not named and is not there."""
    path = Path(str(named.value)) if named else default_config()
    try:
        return path, parse_toml(path.read_bytes())
    except FileNotFoundError as error:
        if named is None:
            return path, {}
        raise UsageError(f"configuration file {path} does not exist") from error
    except OSError as error:
        raise UsageError(f"configuration file {path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"configuration file {path} is not TOML: {error}") from error


def parse_toml(data: bytes) -> dict[str, Any]:
    """A TOML document; ValueError if it is none."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(data.decode())


def _check_keys(
    path: Path, table: Mapping[str, Any], own: Mapping[str, click.Parameter], commands: Commands
) -> None:
    """Refuse names that no command has, wherever they stand in the file."""
    for key, value in table.items():
        if key in commands.names:
            _check_table(path, key, value, commands.get(key))
        elif key == "config" or (key not in own and key not in commands.settings):
            known = {*commands.settings, *commands.names} - {"config"}
            tables = [name for name in commands.names if key in flags_of(commands.get(name))]
            if tables:
                where = f"write it in a table, as [{tables[0]}]"
                raise UsageError(f"{path}: {key!r} is for some commands only: {where}")
            raise UsageError(f"{path}: {key!r} is unknown; {_nearest(key, known)}")


def _check_table(path: Path, name: str, table: object, command: click.Command) -> None:
    known = flags_of(command)
    if not known:
        raise UsageError(f"{path}: 'dflash {name}' has no settings")
    if not isinstance(table, dict):
        raise refusal(f"{path}: {name}", table, f"it must be a table, as in [{name}]")
    for key in table:
        if key not in known:
            raise UsageError(f"{path}: {key!r} in [{name}] is unknown; {_nearest(key, known)}")


def flags_of(command: click.Command) -> dict[str, click.Parameter]:
    """What a command's own table in a file may hold; nothing if the command reads no file."""
    found = {key_of(param): param for param in command.params}
    return found if found.pop("config", None) else {}


def _nearest(name: str, known: Collection[str]) -> str:
    separator = "_" if name.startswith(PREFIX) else "-"
    near = get_close_matches(name.replace("_", separator), known, n=1)
    return f"did you mean {near[0]}?" if near else "'dflash env' lists what there is"


def _file_values(path: Path, table: Mapping[str, Any], name: str, command: click.Command) -> dict[str, Value]:
    """What a file whose names are right says for a command."""
    layers = (table, settings_of(command)), (table.get(name, {}), flags_of(command))
    return {
        params[key].name or "": _read(path, key, params[key], value)
        for values, params in layers
        for key, value in values.items()
        if key in params
    }


def _read(path: Path, key: str, param: click.Parameter, value: object) -> Value:
    """A TOML value as a command line would have it."""
    if isinstance(param, click.Option) and param.is_flag:
        if not isinstance(value, bool):
            raise refusal(f"{path}: {key}", value, "it must be true or false")
        return Value(value, str(path))
    if _many(param):
        items = value if isinstance(value, list) else [value]
        return Value([_text(path, key, param, item) for item in items], str(path))
    return Value(_text(path, key, param, value), str(path))


def _text(path: Path, key: str, param: click.Parameter, value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise refusal(f"{path}: {key}", value, "it must be text or a number")
    text = str(value)
    is_path = isinstance(param.type, click.Path) or getattr(param.type, "is_path", False)
    if not is_path or text in ("", "-"):
        return text
    try:
        return str(path.parent / Path(text).expanduser())
    except RuntimeError as error:  # no such user
        raise refusal(f"{path}: {key}", value, "there is no such home folder") from error


def _find_profile(named: Value | None) -> Profile | None:
    from dflash_cli.profiles import find_profile

    if named is None:
        return None
    names = named.value if isinstance(named.value, list) else [str(named.value)]
    if len(names) != 1:
        raise UsageError(f"{len(names)} profiles are asked for ({', '.join(names)}); name one")
    return find_profile(names[0], origin="" if named.origin == "flag" else named.origin)


def _profile_values(profile: Profile, name: str, command: click.Command) -> dict[str, Value]:
    params = {opt: param for param in command.params for opt in param.opts}
    values = {}
    for flag, text in profile.flags:
        if flag not in params:
            raise UsageError(f"profile {profile.name} sets {flag}, which 'dflash {name}' does not have")
        param = params[flag]
        values[param.name or ""] = Value([text] if _many(param) else text, f"profile {profile.name}")
    return values


def _set_environment(profile: Profile) -> None:
    for name, value in profile.environment:
        if os.environ.setdefault(name, value) != value:
            say(f"{name} stays {os.environ[name]!r} as it is set; profile {profile.name} has {value!r}")


def _warn_of_unknown(commands: Commands, own: Mapping[str, click.Parameter]) -> None:
    """A line for each variable that looks like ours and is not."""
    known = {str(param.envvar) for param in own.values()} | set(NOT_OURS)
    if all(name in known for name in os.environ if name.startswith(PREFIX)):
        return
    known |= {str(param.envvar) for param in commands.settings.values()}
    for name in sorted(os.environ):
        if name.startswith(PREFIX) and name not in known:
            say(f"{name} is set and means nothing; {_nearest(name, known)}")


def elsewhere(ctx: click.Context | None, name: str | None) -> str | None:
    """The source of a parameter's value if it is no flag and no default, so that messages have to name it."""
    settings: Settings = Settings() if ctx is None else ctx.meta.get(META, Settings())
    found = settings.find(name or "")
    return None if found is None or found.origin == "flag" else found.origin


def named_in(error: Exception, ctx: click.Context) -> str | None:
    """`elsewhere` for the value that an error made by `refusal` is about."""
    name, is_, _ = str(error).partition(" is ")
    return elsewhere(ctx, name) if is_ and isinstance(error, UsageError) else None
