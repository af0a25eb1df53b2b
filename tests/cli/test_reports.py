"""`dflash devices` and `dflash version`: tables for people, JSON for scripts."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from dflash_cli.settings import parse_toml
from dflash_cli.version import REQUIREMENTS

from pyggml_dflash import __version__
from pyggml_dflash.api import devices
from tests.cli.dflash_command import dflash, told


def test_devices_are_those_of_the_build() -> None:
    found = dflash("devices", "--json").json
    assert [device["name"] for device in found] == [device.name for device in devices()]
    cpu = next(device for device in found if device["kind"] == "cpu")
    assert 0 < cpu["memory_free"] <= cpu["memory_total"]
    header, *rows = told("devices").splitlines()
    assert header.split() == ["name", "kind", "free", "total", "description"]
    assert [row.split()[0] for row in rows] == [device.name for device in devices()]


def test_version_tells_the_package_its_build_and_its_requirements() -> None:
    found = dflash("version", "--json").json
    assert found["pyggml-dflash"] == __version__
    assert found["backend"] in ("cpu", "cuda", "hip", "vulkan")
    assert all(found[name] for name in ("ggml", "python", "numpy", "cffi", "click", "tokenizers"))
    assert told("version").splitlines()[0].split() == ["pyggml-dflash", __version__]
    assert told("--version") == f"dflash {__version__}\n"


def test_the_requirements_shown_are_those_of_the_package() -> None:
    project = parse_toml((Path(__file__).parents[2] / "pyproject.toml").read_bytes())["project"]
    named = [re.split("[>=;]", requirement)[0] for requirement in project["dependencies"]]
    assert [name for name in named if name != "tomli" or sys.version_info < (3, 11)] == list(REQUIREMENTS)
