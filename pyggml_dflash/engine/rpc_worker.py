"""Computing for engines of other processes and machines. Layer 6."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Sequence
from typing import Final

from pyggml_dflash.errors import UsageError
from pyggml_dflash.ggml import rpc
from pyggml_dflash.ggml.device import DeviceInfo, check_threads, devices, named_device, physical_cores
from pyggml_dflash.options import MAX_THREADS, check_int

LOG: Final = logging.getLogger(__name__)
WARNING: Final = (
    "whoever can reach %s can use this worker, and the protocol has neither authentication nor encryption: "
    "listen on a network only where everybody is trusted"
)


def serve_worker(listen: str, names: Sequence[str] = (), threads: int | None = None) -> None:
    """Compute for one engine at a time, which names this worker as rpc://HOST:PORT; ends with the process.

    `names`: devices of this build to lend, else its GPUs, else its CPU.
    """
    endpoint = rpc.Endpoint.parse(listen)
    if threads is not None:
        check_int("threads", threads, 1, MAX_THREADS)
    lent = _lent(names)
    n_threads = threads or physical_cores()
    check_threads(n_threads)
    if not _is_loopback(endpoint.host):
        LOG.warning(WARNING, endpoint)
    rpc.serve(endpoint, [device.name for device in lent], n_threads)


def _lent(names: Sequence[str]) -> tuple[DeviceInfo, ...]:
    for name in names:
        if name.lower().startswith(rpc.SCHEME):
            raise UsageError(f"devices names {name!r}; a worker lends its own devices only")
    present = devices()
    lent = tuple(named_device(name, present, option="devices") for name in names)
    for device in lent:
        if lent.count(device) > 1:
            raise UsageError(f"devices names {device.name!r} twice; its memory can be lent once")
    return (
        lent or tuple(d for d in present if d.kind == "gpu") or tuple(d for d in present if d.kind == "cpu")
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
