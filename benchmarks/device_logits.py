"""Logits sections of `device_check`: fixture models on the device against the CPU."""

from __future__ import annotations

import lzma
import math
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from device_report import Report, Setup

from pyggml_dflash import Engine
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.gguf import GgufFile
from pyggml_dflash.ggml.gguf_writer import GgufWriter

MODELS: Final = Path(__file__).resolve().parent.parent / "tests" / "data" / "models"
LIMIT: Final = 2e-2  # between the logits of two devices: F32 weights, F32 KV, no flash attention
HALF_LIMIT: Final = 0.1  # where something is in half precision, F16 weights or KV or flash attention
# Quantised weights: both devices round activations to 8 bits, each in its own blocks and order. How far
# that moves the logits of these random models was measured between two CPU implementations.
QUANTISED_LIMITS: Final = {"Q8_0": 0.6, "Q4_K_M": 1.5}


@dataclass(frozen=True, slots=True)
class Fixture:
    """A small model with its reference file, if it has one."""

    name: str
    weights: str  # 'f32', 'f16', or a quantised file type
    path: Path
    reference: Path | None

    def limit(self, kv: str, flash: str) -> float:
        """How far two devices' logits may lie apart; infinite where one rounding can flip an expert."""
        if self.weights in QUANTISED_LIMITS:
            return QUANTISED_LIMITS[self.weights]
        if (self.weights, kv, flash) == ("f32", "f32", "off"):
            return LIMIT
        return math.inf if "moe" in self.name else HALF_LIMIT


def fixtures(scratch: Path) -> Iterator[Fixture]:
    """Every model of the tests; packed ones are unpacked into `scratch`, F16 ones also written as F32."""
    for path in sorted([*MODELS.glob("**/*.gguf"), *MODELS.glob("**/*.gguf.xz")]):
        own_folder = path.parent != MODELS
        stem, _, weights = path.name.removesuffix(".xz").removesuffix(".gguf").rpartition("-")
        name = path.parent.name if own_folder else stem
        if name.startswith("dflash"):  # a draft has no logits of its own
            continue
        references = sorted(path.parent.glob("reference*.npz")) if own_folder else []
        reference = references[0] if references else None
        if path.suffix == ".xz":
            unpacked = scratch / f"{name}-{weights}.gguf"
            unpacked.write_bytes(lzma.decompress(path.read_bytes()))
            path = unpacked
        yield Fixture(name, weights, path, reference)
        if weights == "f16":
            yield Fixture(name, "f32", widened(path, scratch / f"{name}-f32.gguf"), reference)


def widened(source: Path, target: Path) -> Path:
    """A copy of a model whose F16 tensors are F32: the same numbers."""
    with closing(GgufFile.open(source)) as file:
        writer = GgufWriter()
        writer.copy_metadata(file)
        for tensor in file.tensors.values():
            element = ElementType.F32 if tensor.type is ElementType.F16 else tensor.type
            data = np.frombuffer(file.data(tensor), np.uint8)
            if element is not tensor.type:
                data = data.view("<f2").astype("<f4").view(np.uint8)
            writer.add_raw(tensor.name, data, shape=tensor.shape, element=element)
        writer.write(target)
    return target


def prompts_of(reference: Path | None, n_vocab: int) -> list[tuple[list[int], npt.NDArray[np.int64]]]:
    """Prompts and the positions to compare: the fixture's own, which avoid near ties, or random ones."""
    if reference is None:
        rng = np.random.default_rng(7)
        return [(rng.integers(0, n_vocab, n).tolist(), np.arange(n)) for n in (1, 65, 300, 640)]
    stored = np.load(reference)
    numbers = (i for i in range(100) if f"p{i}_tokens" in stored and f"p{i}_pos" in stored)
    return [(stored[f"p{i}_tokens"].tolist(), stored[f"p{i}_pos"].astype(np.int64)) for i in numbers]


def check_logits(report: Report, setup: Setup) -> None:
    """Every fixture; keys and values in F32 without flash attention, in F16 with it."""
    for fixture in fixtures(setup.scratch):
        for kv, flash in (("f32", "off"), ("f32", "on"), ("f16", "on")):
            compare_logits(report, setup, fixture, kv, flash)


def check_logits_no_tf32(report: Report, setup: Setup) -> None:
    """The F32 fixtures again, in a process in which cuBLAS does not round F32 operands to TF32.

    ggml's own TF32 kernels take over from three rows on; chunks of two rows keep clear of them as well.
    """
    for fixture in fixtures(setup.scratch):
        if fixture.weights == "f32":
            compare_logits(report, setup, fixture, "f32", "off")
            compare_logits(report, setup, fixture, "f32", "off", chunk=2)


def compare_logits(
    report: Report, setup: Setup, fixture: Fixture, kv: str, flash: str, *, chunk: int = 512
) -> None:
    """One check: the device against the CPU."""
    title = f"{fixture.name} {fixture.weights}, KV {kv}, flash {flash}, chunk {chunk}"
    try:
        cpu, gpu = (logits_on(device, fixture, kv, flash, chunk) for device in ("CPU", setup.device))
    except Exception as error:
        report.check(title, f"{type(error).__name__}: {error}", "logits", False)
        return
    differences, limit = np.abs(cpu - gpu).max(axis=1), fixture.limit(kv, flash)
    worst, same = float(differences.max()), int((cpu.argmax(1) == gpu.argmax(1)).sum())
    report.details[title] = {
        "max": worst,
        "median": float(np.median(differences)),
        "rows": len(cpu),
        "same_argmax": same,
        "logit_std": float(cpu.std()),
    }
    expected = "to be seen" if math.isinf(limit) else f"<= {limit:g}"
    report.check(title, f"{worst:.2e}, argmax {same}/{len(cpu)}", expected, worst <= limit)


def logits_on(device: str, fixture: Fixture, kv: str, flash: str, chunk: int) -> npt.NDArray[np.float32]:
    """Logits [positions, n_vocab] of the fixture's prompts."""
    options: dict[str, Any] = {"cache_type_k": kv, "cache_type_v": kv, "flash_attn": flash, "chunk": chunk}
    with Engine.open(fixture.path, max_ctx=768, device=device, **options) as engine:
        prompts = prompts_of(fixture.reference, engine.info.n_vocab)
        return np.concatenate([engine.logits(tokens)[positions] for tokens, positions in prompts])
