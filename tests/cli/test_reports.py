"""`dflash devices` and `dflash version`: tables for people, JSON for scripts."""

from __future__ import annotations

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
