"""`dflash version`: versions of the package, its build and its requirements. Layer 9."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from typing import Any, Final

import click

from dflash_cli.build_info import read_build
from dflash_cli.flags import JSON
from dflash_cli.ui import print_json, print_table
from pyggml_dflash import __version__

REQUIREMENTS: Final = (
    "cffi",
    "click",
    "jinja2",
    "numpy",
    "platformdirs",
    "rich",
    "safetensors",
    "tokenizers",
    *(() if sys.version_info >= (3, 11) else ("tomli",)),
)


def requirement_versions() -> dict[str, str | None]:
    """Versions of the packages that this one needs; None for one that is missing."""
    found: dict[str, str | None] = {}
    for name in REQUIREMENTS:
        try:
            found[name] = installed_version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


@click.command()
@JSON
def version(as_json: bool) -> None:
    """Show versions of the package, its build and its requirements."""
    build = read_build()
    found: dict[str, Any] = {
        "pyggml-dflash": __version__,
        "ggml": None if build is None else build.ggml,
        "backend": None if build is None else build.backend,
        "python": platform.python_version(),
        "platform": platform.platform(),
        **requirement_versions(),
    }
    if as_json:
        print_json(found)
    else:
        print_table([[name, "missing" if value is None else value] for name, value in found.items()], "<<")
