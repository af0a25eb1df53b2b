"""`dflash devices`: what this build can compute on. Layer 9."""

from __future__ import annotations

import click

from dflash_cli.flags import JSON
from dflash_cli.ui import print_json, print_table
from pyggml_dflash import api
from pyggml_dflash.errors import human_bytes


@click.command()
@click.argument("worker", nargs=-1)
@JSON
def devices(worker: tuple[str, ...], as_json: bool) -> None:
    """List the devices that this build can compute on.

    Names are those that --device takes; memory is what is free now. Devices of workers are listed where
    WORKER names them, as in rpc://HOST:PORT.
    """
    found = [*api.devices(), *(device for name in worker for device in api.worker_devices(name))]
    if as_json:
        print_json(found)
        return
    rows = [["name", "kind", "free", "total", "description"]]
    for device in found:
        free, total = human_bytes(device.memory_free), human_bytes(device.memory_total)
        rows.append([device.name, device.kind, free, total, device.description])
    print_table(rows, "<<>><")
