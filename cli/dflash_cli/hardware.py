"""What `dflash doctor` checks of the hardware: devices, CPU features, memory, a trial run. Layer 9."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from dflash_cli.checks import BACKEND_VARIABLE, Check
from pyggml_dflash.api import DeviceInfo
from pyggml_dflash.errors import human_bytes

LOW_MEMORY_BYTES: Final = 2**30
TRIAL_LIMIT_S: Final = 300  # the first run on a GPU may compile kernels

# ggml's name of a feature -> the kernel's, for those that make a build fast, or end it on a CPU without.
CPU_FLAGS: Final = {
    "AVX": "avx",
    "AVX2": "avx2",
    "FMA": "fma",
    "F16C": "f16c",
    "BMI2": "bmi2",
    "AVX_VNNI": "avx_vnni",
    "AVX512": "avx512f",
    "AVX512_VBMI": "avx512vbmi",
    "AVX512_VNNI": "avx512_vnni",
    "AVX512_BF16": "avx512_bf16",
    "AMX_INT8": "amx_int8",
    "DOTPROD": "asimddp",
    "MATMUL_INT8": "i8mm",
    "SVE": "sve",
}

_LOOK: Final = {
    "cuda": "see whether 'nvidia-smi' lists the card, and whether CUDA_VISIBLE_DEVICES hides it",
    "hip": "see whether 'rocminfo' lists the card, and whether HIP_VISIBLE_DEVICES hides it",
    "vulkan": "see whether 'vulkaninfo --summary' lists the card, and whether its driver is installed",
}


def present_hardware() -> tuple[str, ...]:
    """Back ends whose kernel driver is loaded on this machine."""
    drivers = {"cuda": Path("/proc/driver/nvidia/version"), "hip": Path("/dev/kfd")}
    return tuple(backend for backend, path in drivers.items() if path.exists())


def check_devices(backend: str, devices: Sequence[DeviceInfo], hardware: Sequence[str]) -> Check:
    """Whether the build finds a device of the back end it is for, and uses the cards that are there."""
    listed = ", ".join(f"{d.name} ({d.description})" for d in devices) or "none"
    cards = [d for d in devices if d.kind in ("gpu", "igpu")]
    if backend != "cpu" and not cards:
        return Check(
            name="devices",
            status="fail",
            detail=f"built for {backend}, but no such device is found; devices: {listed}",
            remedy=_LOOK.get(backend, "see whether the driver is installed"),
        )
    if backend == "cpu" and hardware:
        return Check(
            name="devices",
            status="warn",
            detail=f"a card for {hardware[0]} is there, but this build is for the CPU; devices: {listed}",
            remedy=f"install the package again with {BACKEND_VARIABLE}={hardware[0]}",
        )
    return Check(name="devices", status="ok", detail=listed)


def machine_flags() -> frozenset[str]:
    """CPU flags as the kernel tells; empty where it does not."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    found = next((line for line in lines if line.lower().startswith(("flags", "features"))), ":")
    return frozenset(found.split(":", 1)[1].split())


def check_cpu(features: Mapping[str, str], flags: frozenset[str]) -> Check:
    """Whether the library is built for this CPU: for no more, which crashes, and no less, which is slow."""
    compiled = {name for name, value in features.items() if value not in ("", "0")}
    listed = ", ".join(sorted(compiled)) or "none"
    if not flags:
        return Check(name="cpu", status="ok", detail=f"built with {listed}")
    lacking = sorted(name for name in compiled if name in CPU_FLAGS and CPU_FLAGS[name] not in flags)
    if lacking:
        remedy = "build on this machine, or with CMAKE_ARGS=-DGGML_NATIVE=OFF"
        detail = f"built for {', '.join(lacking)}, which this CPU lacks"
        return Check(name="cpu", status="fail", detail=detail, remedy=remedy)
    unused = sorted(name for name, flag in CPU_FLAGS.items() if flag in flags and name not in compiled)
    if unused:
        detail = f"built without {', '.join(unused)}, which this CPU has"
        remedy = "build on this machine, or with CMAKE_ARGS=-DGGML_NATIVE=ON, to compute faster"
        return Check(name="cpu", status="warn", detail=detail, remedy=remedy)
    return Check(name="cpu", status="ok", detail=f"built with {listed}")


def check_memory(device: DeviceInfo) -> Check:
    """Whether a device has room for a small model."""
    free, total = human_bytes(device.memory_free), human_bytes(device.memory_total)
    low = device.memory_free < LOW_MEMORY_BYTES
    return Check(
        name=f"memory {device.name}",
        status="warn" if low else "ok",
        detail=f"{free} of {total} free",
        remedy="close what uses it, or choose a smaller model or --max-ctx" if low else "",
    )


def try_device(device: DeviceInfo) -> Check:
    """Let the shipped model say a word on a device, in its own process, since ggml ends it on an error."""
    arguments = ["run", "--raw", "-p", "Once upon a time", "-n", "2", "--quiet", "--device", device.name]
    code = f"import sys; sys.path[:] = {sys.path!r}; from dflash_cli.main import cli; cli({arguments!r})"
    name = f"trial {device.name}"
    remedy = "build for this card: CMAKE_ARGS=-DCMAKE_CUDA_ARCHITECTURES=native, or update its driver"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], stdin=subprocess.DEVNULL, capture_output=True, timeout=TRIAL_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        detail = f"the shipped model did not answer within {TRIAL_LIMIT_S} s"
        return Check(
            name=name, status="fail", detail=detail, remedy="see whether another program uses the device"
        )
    if done.returncode == 0:
        return Check(name=name, status="ok", detail="the shipped model runs")
    return Check(
        name=name,
        status="fail",
        detail=f"the shipped model does not run: {_reason(done)}",
        remedy=remedy if device.kind in ("gpu", "igpu") else "see the other findings",
    )


def _reason(done: subprocess.CompletedProcess[bytes]) -> str:
    """The line that tells most: the one with 'error' in it, else the last."""
    lines = [line.strip() for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
    if lines:
        return next((line for line in lines if "error" in line.lower()), lines[-1])
    if done.returncode < 0:
        return f"ended by {signal.Signals(-done.returncode).name}"
    return f"exit code {done.returncode}"
