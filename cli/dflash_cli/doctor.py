"""`dflash doctor`: checks the installation and says how to mend it. Layer 9."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Final

import click

import pyggml_dflash
from dflash_cli.build_info import BuildInfo, native_folder, read_build
from dflash_cli.checks import (
    BUILD_AGAIN,
    Check,
    Status,
    check_build,
    check_command,
    check_package,
    check_python,
    check_requirements,
    check_variable,
)
from dflash_cli.flags import JSON
from dflash_cli.ui import print_json
from dflash_cli.version import requirement_versions
from pyggml_dflash.errors import DflashError

COLOURS: Final[dict[Status, str]] = {"ok": "green", "warn": "yellow", "fail": "red"}


@click.command()
@JSON
@click.pass_context
def doctor(ctx: click.Context, as_json: bool) -> None:
    """Check the installation and say how to mend it.

    Looks at the package, its native build, its requirements, the environment, the 'dflash' that is first
    on PATH, and the devices, each of which runs the shipped model for a moment. Exits 1 if a check fails.
    """
    found: list[Check] = []
    for check in all_checks():
        found.append(check)
        if not as_json:
            print_check(check)
    failed = [check for check in found if check.status == "fail"]
    if as_json:
        print_json({"ok": not failed, "checks": found})
    ctx.exit(1 if failed else 0)


def print_check(check: Check) -> None:
    """A line, and one more with the remedy."""
    click.echo(f"{click.style(f'{check.status:4}', fg=COLOURS[check.status])}  {check.name}: {check.detail}")
    if check.remedy:
        click.echo(f"      {check.remedy}")


def all_checks() -> Iterator[Check]:
    """Every finding, one after the other; those on hardware need a build that can be loaded."""
    folder = native_folder()
    build = read_build()
    yield check_python()
    yield check_package(pyggml_dflash.__version__, folder.parent, sys.path)
    yield check_requirements(requirement_versions())
    yield check_build(build, folder)
    yield check_variable(build, os.environ)
    yield check_command(os.environ.get("PATH", ""), sys.executable)
    yield from hardware_checks(build)


def hardware_checks(build: BuildInfo | None) -> Iterator[Check]:
    """Devices against the build, CPU, memory, and a trial on each device."""
    try:
        from dflash_cli import hardware
        from pyggml_dflash import api
    except (ImportError, DflashError) as error:
        yield Check(name="library", status="fail", detail=" ".join(str(error).split()), remedy=BUILD_AGAIN)
        return
    devices = api.devices()
    if build is not None:
        yield hardware.check_devices(build.backend, devices, hardware.present_hardware())
    yield hardware.check_cpu(api.backend_features().get("CPU", {}), hardware.machine_flags())
    for device in devices:
        yield hardware.check_memory(device)
    for device in devices:
        if device.kind in ("cpu", "gpu", "igpu"):
            yield hardware.try_device(device)
