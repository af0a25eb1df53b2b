"""`dflash rpc-worker`: lends devices of this machine to an engine elsewhere. Layer 9."""

from __future__ import annotations

import signal

import click

from dflash_cli.params import DeviceNames, Text, WholeNumber
from pyggml_dflash import api


@click.command()
@click.option(
    "--listen",
    type=Text(),
    default="127.0.0.1:50052",
    show_default=True,
    help="HOST:PORT to answer at. The protocol has no authentication: keep it off networks you do not trust.",
)
@click.option(
    "--devices", type=DeviceNames(), default=(), help="Devices to lend.  [default: every GPU, else the CPU]"
)
@click.option("--threads", type=WholeNumber(), help="CPU threads.  [default: one per physical core]")
def rpc_worker(listen: str, devices: tuple[str, ...], threads: int | None) -> None:
    """Compute for an engine elsewhere, until interrupted.

    Engines name it as rpc://HOST:PORT wherever they take a device. It serves one engine at a time.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ggml's loop does not come back to Python
    api.serve_worker(listen, devices, threads)
