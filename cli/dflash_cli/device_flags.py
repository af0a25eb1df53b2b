"""Flags that say what computes a model and how much of it may be used. Layer 9."""

from __future__ import annotations

from pathlib import Path
from typing import Final, get_args

import click

from dflash_cli.params import DeviceCap, DeviceNames, NumberOrAuto, Parts, WholeNumber
from pyggml_dflash.options import HostMemory, LinkType, Split

DEVICES: Final = (
    click.option(
        "--device",
        "--target-device",
        "device",
        help="Device by its name in 'dflash devices', or a worker's as in rpc://HOST:PORT."
        "  [default: the roomiest GPU, else the CPU]",
    ),
    click.option(
        "--devices",
        type=DeviceNames(),
        default=(),
        help="Devices that share the layers, as in CUDA0,CUDA1; the first one has inputs and drafts.",
    ),
    click.option(
        "--split",
        type=click.Choice(get_args(Split)),
        default="auto",
        show_default=True,
        help="What goes to other devices: routed experts, layers or nothing; 'auto': what makes it fit.",
    ),
    click.option(
        "--tensor-split",
        type=Parts(),
        default=(),
        help="Parts of the layers for each of --devices, as in 1,3.  [default: by free memory]",
    ),
    click.option("--expert-device", help="Device for the routed experts, such as CPU beside a GPU."),
    click.option(
        "--link-type",
        type=click.Choice(get_args(LinkType)),
        default="f32",
        show_default=True,
        help="How a prompt's rows go from device to device; f16 is half the bytes, and rounds.",
    ),
    click.option(
        "--prompt-streams",
        type=NumberOrAuto("streams", "number of streams", 2),
        default="auto",
        show_default=True,
        help="Forwards of a chunk of 1024 rows or more, 1 or 2; two take turns on several devices. 'auto': 2 "
        "from 2048 rows on where GPUs share the layers.",
    ),
    click.option(
        "--kv-overflow-device",
        help="Device for keys and values of layers that the first one has no room for.",
    ),
    click.option(
        "--expert-placement",
        type=click.Path(path_type=Path, dir_okay=False),
        help="Counts of 'dflash route-stats': the experts picked most are copied to the target.",
    ),
    click.option(
        "--expert-budget-mib",
        type=WholeNumber(),
        default=8192,
        show_default=True,
        help="Most memory of the target for such copies.",
    ),
    click.option(
        "--stream-experts",
        type=NumberOrAuto("rows", "number of rows", 1024, off=True),
        default="auto",
        show_default=True,
        help="Prompt rows of a forward from which on experts in host memory are copied to --device, and"
        " computed there; 'auto': 1024 beside a GPU, 256 from pinned memory; 'off'.",
    ),
    click.option(
        "--expert-memory",
        type=click.Choice(get_args(HostMemory)),
        default="pageable",
        show_default=True,
        help="Host memory of experts that are copied so; pinned is copied faster, but is a copy of the file.",
    ),
    click.option(
        "--worker-timeout-s",
        type=WholeNumber(),
        default=600,
        show_default=True,
        help="Most seconds that a worker may leave an answer out before it counts as lost; 0: any time.",
    ),
    click.option(
        "--device-cap",
        type=DeviceCap(),
        multiple=True,
        help="Most memory to hold on a device, in MiB or as in CUDA0=24GiB; repeatable.",
    ),
    click.option(
        "--device-reserve-mib",
        type=WholeNumber(),
        default=0,
        show_default=True,
        help="Take this much memory of the device and leave it alone.",
    ),
)
