"""Types that parse the values of arguments and flags. Layer 9.

A value that cannot be parsed is quoted and exits 2; ranges are checked by the options they go into.
"""

from __future__ import annotations

import math
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from click.core import ParameterSource

from dflash_cli.settings import elsewhere
from pyggml_dflash.errors import ModelFileError
from pyggml_dflash.options import Auto, parse_trim_interval

if TYPE_CHECKING:
    Param = click.ParamType[Any]
else:
    Param = click.ParamType  # not generic before click 8.4

_UNITS: Final = {"": 1, "k": 1024, "m": 1024 * 1024}
_SIZES: Final = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def _tokens(text: str) -> int:
    """8192, 8k or 1m as a number; 0 for anything else."""
    match = re.fullmatch(r"([0-9]{1,10})([km]?)", text.lower())
    return 0 if match is None else int(match[1]) * _UNITS[match[2]]


class ContextLength(Param):
    """A context in tokens: 8192, 8k, 1m."""

    name = "context"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        """Tokens; at least one."""
        if isinstance(value, int):
            return value
        n = _tokens(value)
        if n == 0:
            self.fail(f"{value!r} is no context length; pass tokens as in 8192, 8k or 1m.")
        return n


class MaxContext(ContextLength):
    """A context in tokens, 'auto' for what fits, or 'auto:N' for what fits up to N tokens."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        """Tokens, or 'auto' with a number of tokens behind it if there is one."""
        if isinstance(value, int) or value == "auto":
            return value  # type: ignore[no-any-return]
        auto, colon, most = value.partition(":")
        n = _tokens(most if colon else value)
        if n == 0 or (colon and auto != "auto"):
            self.fail(
                f"{value!r} is no context length; pass tokens as in 8192, 8k or 1m, or 'auto', or 'auto:64k'."
            )
        return f"auto:{n}" if colon else n


class DeviceCap(Param):
    """DEVICE=MIB: a device's name, and how much of it may be used."""

    name = "device=mib"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, int]:
        """(name, bytes)"""
        if isinstance(value, tuple):
            return value
        device, _, size = value.rpartition("=")
        match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,6})?)(B|KiB|MiB|GiB)?", size)
        if not device or match is None:
            self.fail(f"{value!r} is no cap; pass a device and MiB as in CUDA0=24576, or CUDA0=24GiB.")
        return device, int(float(match[1]) * _SIZES[match[2] or "MiB"])


class DeviceNames(Param):
    """Names of devices with commas between them."""

    name = "device,device"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        """The names."""
        if isinstance(value, tuple):
            return value
        names = tuple(name.strip() for name in value.split(","))
        if not all(names):
            self.fail(f"{value!r} leaves a name out; pass names of devices as in CUDA0,CUDA1.")
        return names


class Parts(Param):
    """Numbers above 0 with commas between them."""

    name = "part,part"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[float, ...]:
        """The numbers."""
        if isinstance(value, tuple):
            return value
        parts = tuple(part.strip() for part in value.split(","))
        if not all(re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", part) and float(part) > 0 for part in parts):
            self.fail(f"{value!r} is no list of parts; pass one above 0 for each device as in 1,3.")
        return tuple(map(float, parts))


class TrimInterval(Param):
    """Tokens between two trims, 'off' or 'auto'."""

    name = "tokens"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | Auto | None:
        """Tokens, 0 for 'off'; None for a value of the environment, which the engine reads itself."""
        source = ctx.get_parameter_source(param.name or "") if ctx and param else None
        if source is ParameterSource.ENVIRONMENT:
            return None
        found = value if isinstance(value, int) else parse_trim_interval(value) if value.strip() else None
        if found is None:
            self.fail(f"{value!r} is no number of tokens; pass one as in 8192, or 'auto', or 'off'.")
        return found


class NumberOrAuto(Param):
    """A whole number, 'auto', or where that means something 'off', which is 0."""

    def __init__(self, name: str, what: str, example: int, *, off: bool = False) -> None:
        """`name`: in help; `what` it is and an `example`: in complaints."""
        self.name, self._off = name, off
        self._wanted = f"no {what}; pass one as in {example}, or 'auto'" + (", or 'off'" if off else "")

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | Auto:
        """A number, or 'auto' as it is."""
        if isinstance(value, int):
            return value
        if value == "auto":
            return "auto"
        if self._off and value == "off":
            return 0
        if not re.fullmatch(r"[0-9]{1,15}", value):
            self.fail(f"{value!r} is {self._wanted}.")
        return int(value)


class Folder(Param):
    """The path of a folder, which need not be there."""

    name = "folder"  # also what it is called
    is_path = True

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The path as given."""
        if value == "":
            self.fail(f"'' is empty; name a {self.name}.")  # it would be the current folder
        return Path(value)


class TextFile(Folder):
    """The path of a file, which whoever reads it checks."""

    name = "file"


class ModelFile(Param):
    """A file that exists; another path is a `ModelFileError`, so that it exits 3."""

    name = "model"
    is_path = True
    takes_folders = False

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The path as given."""
        if value == "":
            self.fail("'' is empty; name a file.")  # it would be the current folder
        path = Path(value)
        where = elsewhere(ctx, param.name if param else None)
        named = f"{path}, named by {where}," if where else f"{path}"
        try:
            mode = path.stat().st_mode
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ModelFileError(f"{named} does not exist") from error
        except OSError as error:
            raise ModelFileError(f"{named} cannot be opened: {error.strerror}") from error
        if stat.S_ISDIR(mode) and not self.takes_folders:
            raise ModelFileError(f"{named} is a directory; name a .gguf file in it")
        return path


class DraftPath(ModelFile):
    """A draft that exists: a file, or the folder of a published one."""

    name = "draft"
    takes_folders = True


class Text(Param):
    """Text of at least one character that can be written as UTF-8."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The text as given."""
        text = str(value)
        try:
            text.encode()
        except UnicodeEncodeError:
            self.fail(f"{text!r} is not valid UTF-8.")
        if not text:
            self.fail("'' is empty; pass at least one character.")
        return text


class TokenBias(Param):
    """TOKEN=BIAS: a token id and what is added to its logit."""

    name = "token=bias"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, float]:
        """(token id, bias)"""
        if isinstance(value, tuple):
            return value
        match = re.fullmatch(r"(-?[0-9]{1,10})=([-+.0-9a-zA-Z]+)", value)
        try:
            token, bias = (int(match[1]), float(match[2])) if match else (0, math.nan)
        except ValueError:
            match = None
        if match is None:
            self.fail(f"{value!r} is no token bias; pass a token id and a number as in 198=-5 or 198=-inf.")
        if math.isinf(bias) and "inf" not in value.lower():
            self.fail(f"{value!r} is out of range; pass a smaller number, or inf as in 198=-inf.")
        return token, bias


class WholeNumber(Param):
    """A whole number in decimal digits, which `int` would take from other scripts and with '_' as well."""

    name = "integer"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number; its range is checked by the options."""
        if isinstance(value, int):
            return value
        if not re.fullmatch(r"[-+]?[0-9]{1,40}", value):
            self.fail(f"{value!r} is no whole number; pass one as in 4.")
        return int(value)


class Seed(Param):
    """A whole number in decimal digits."""

    name = "integer"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number; its range is checked by the options."""
        if isinstance(value, int):
            return value
        if not re.fullmatch(r"-?[0-9]{1,40}", value):
            self.fail(f"{value!r} is no seed; pass a whole number as in 42.")
        return int(value)
