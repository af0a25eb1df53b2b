"""A DFlash draft in any form, written as the GGUF file that llama.cpp's loader reads as well. Layer 6.

The keys and names are those that drafts are opened under, so converting is copying. What a folder does not
have is the tokenizer, which comes from the target.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final, get_args

import numpy as np
from numpy.typing import NDArray

from pyggml_dflash.arch import architecture_of
from pyggml_dflash.arch.dflash_config import DraftConfig, check_pair, draft_tensors, read_draft
from pyggml_dflash.arch.draft_forms import draft_kind, open_draft
from pyggml_dflash.errors import DamagedFileError, UnsupportedModelError, UsageError
from pyggml_dflash.ggml.convert_rows import PLAIN, from_single, largest, to_single
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.gguf import GgufFile, TensorInfo
from pyggml_dflash.ggml.gguf_writer import GgufWriter
from pyggml_dflash.ggml.tensor_file import TensorFile
from pyggml_dflash.model.config import ConfigReader
from pyggml_dflash.model.weights import TensorSpec, check_tensors
from pyggml_dflash.options import DraftType, as_path, check_callback, check_choice, check_flag
from pyggml_dflash.requests import Progress, ProgressCallback

PIECE: Final = 2**22  # elements converted at once: 16 MiB in single precision
FILE_TYPES: Final = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}  # llama.cpp's numbers of whole files
MASK_TOKEN: Final = "tokenizer.ggml.mask_token_id"
TOKENIZER: Final = "tokenizer.ggml.model"
SECTIONS: Final = "rope.dimension_sections"
NOT_COPIED: Final = ("dflash.target_block_count", "dflash.vocab_size", "general.file_type")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertedDraft:
    """What was written. `has_tokenizer`: llama.cpp can speculate with the file, not only load it."""

    path: Path
    n_bytes: int
    types: dict[str, int]  # element type -> tensors
    kept_f16: tuple[str, ...]  # matrices whose rows are no whole number of blocks of the type asked for
    has_tokenizer: bool


def convert_draft(
    source: Path | str,
    out: Path | str,
    *,
    type: DraftType = "keep",
    target: Path | str | None = None,
    overwrite: bool = False,
    progress: ProgressCallback | None = None,
) -> ConvertedDraft:
    """Write the draft `source`, a folder or a GGUF file, as `out`.

    `type`: of the matrices; vectors are in single precision. `target`: the GGUF file of the model that the
    draft was made for, whose tokenizer is copied, over one that the draft has. `out` stands under its
    name only once it is complete.
    UsageError: a value was refused. ModelFileError and its kinds: a file cannot be used.
    """
    check_choice("type", type, get_args(DraftType))
    check_flag("overwrite", overwrite)
    check_callback("progress", progress)
    source, target = as_path("draft", source), None if target is None else as_path("target", target)
    out = _check_out(out, overwrite)
    with ExitStack() as stack:
        draft = stack.enter_context(open_draft(source))
        if draft_kind(draft) != "dflash":
            raise UnsupportedModelError(f"{source} is no DFlash draft; only those are converted")
        config, model = read_draft(draft), None
        if target is not None:
            model = stack.enter_context(GgufFile.open(target))
            _check_target(draft, config, model)
        specs = check_tensors(draft, draft_tensors(config, _n_vocab(draft, config)))
        plans = _plan(draft, specs, type)
        writer = GgufWriter()
        _add_metadata(writer, draft, model, config, [p.element for p in plans if p.spec.use != "vector"])
        done = _Counter(sum(p.info.n_bytes for p in plans), progress)
        for p in plans:
            writer.add_raw(p.info.name, p.chunks(draft, done), shape=p.info.shape, element=p.element)
        writer.write(out)
    return ConvertedDraft(
        path=out,
        n_bytes=out.stat().st_size,
        types=dict(Counter(p.element.label for p in plans)),
        kept_f16=tuple(p.info.name for p in plans if p.fell_back),
        has_tokenizer=model is not None or _has_tokenizer(draft),
    )


def _check_out(file: Path | str, overwrite: bool) -> Path:
    out = as_path("out", file)
    if os.path.isdir(out) or os.fspath(file).endswith(os.sep):  # `Path` drops what stands at the end
        raise UsageError(f"{out} is a directory; name a file in it")
    if os.path.exists(out) and not os.path.isfile(out):
        raise UsageError(f"{out} is no regular file, so it cannot be replaced; name another file")
    if os.path.lexists(out) and not overwrite:  # also a link to nothing
        raise UsageError(f"{out} exists; name another file, or ask to overwrite it")
    return out


def _check_target(draft: TensorFile, config: DraftConfig, model: GgufFile) -> None:
    name, architecture = architecture_of(model)
    n_tokens = len(model.get_strs("tokenizer.ggml.tokens"))
    check_pair(ConfigReader(draft, "dflash"), config, architecture.read_config(model, name), n_tokens)


def _n_vocab(draft: TensorFile, config: DraftConfig) -> int:
    """Rows of the selector's tables; where no key says, those that one of them has."""
    table = draft.tensors.get("selector_predecessor.weight")
    return config.n_vocab or (table.shape[-1] if table is not None else 1)


@dataclass(frozen=True, slots=True)
class _Plan:
    """One tensor: where it is, what it is for, and the type in which it is written."""

    info: TensorInfo
    spec: TensorSpec
    element: ElementType
    fell_back: bool

    def chunks(self, draft: TensorFile, done: _Counter) -> Iterator[NDArray[np.uint8]]:
        """The tensor's bytes as they are written; a number that the type cannot hold raises."""
        data, info = draft.data(self.info), self.info
        n_columns = info.shape[0]
        step = max(1, PIECE // n_columns) * info.type.row_bytes(n_columns)
        for start in range(0, info.n_bytes, step):
            part = data[start : start + step]
            if self.element == info.type:
                yield part
            else:
                values = to_single(part, info.type).reshape(-1, n_columns)
                self._check(draft, values)
                yield from_single(values, self.element)
            done.add(len(part))
        draft.forget(info)

    def _check(self, draft: TensorFile, values: NDArray[np.float32]) -> None:
        size = float(np.abs(values).max())
        if not np.isfinite(size):
            raise DamagedFileError(
                f"{draft.path}: tensor {draft.shown(self.info.name)!r} has numbers that are not finite"
            )
        if size > largest(self.element):
            raise UsageError(
                f"{draft.path}: tensor {draft.shown(self.info.name)!r} has numbers of {size:g}; "
                f"{self.element.label} ends at {largest(self.element):g}: use bf16 or f32"
            )


class _Counter:
    """Bytes done, reported as they grow."""

    def __init__(self, total: int, report: ProgressCallback | None) -> None:
        self._done, self._total, self._report = 0, total, report

    def add(self, n: int) -> None:
        """`n` more bytes of the source are converted."""
        self._done += n
        if self._report is not None:
            self._report(Progress(phase="convert", done=self._done, total=self._total))


def _plan(draft: TensorFile, specs: Mapping[str, TensorSpec], type: DraftType) -> list[_Plan]:
    """The type of every tensor, in the order in which GGUF names them."""
    plans = []
    for name, spec in specs.items():
        info = draft.tensors[name]
        wanted = info.type if type == "keep" or spec.use == "vector" else ElementType[type.upper()]
        if wanted != info.type and info.type not in PLAIN:
            raise UnsupportedModelError(
                f"{draft.path}: tensor {draft.shown(name)!r} has type {info.type.label}, not converted; "
                f"use 'keep'"
            )
        fits = info.shape[0] % wanted.block == 0
        plans.append(_Plan(info, spec, wanted if fits else ElementType.F16, not fits))
    return plans


def _has_tokenizer(file: TensorFile) -> bool:
    return file.get_str(TOKENIZER, "none") != "none"


def _add_metadata(
    writer: GgufWriter,
    draft: TensorFile,
    model: GgufFile | None,
    config: DraftConfig,
    types: list[ElementType],
) -> None:
    """The draft's own keys, the tokenizer from where there is one, and what llama.cpp says of a file."""
    left_out = {*NOT_COPIED, MASK_TOKEN}
    if model is not None or not _has_tokenizer(draft):
        left_out |= {key for key in draft.metadata if key.startswith("tokenizer.")}
    writer.copy_metadata(draft, without=left_out)
    writer.set(MASK_TOKEN, config.mask_token)
    most = max(FILE_TYPES, key=lambda name: types.count(ElementType[name]))
    more: dict[str, object] = {
        "general.type": "model",
        "general.name": draft.path.resolve().name,
        "general.file_type": FILE_TYPES[most],
        "general.quantization_version": 2,
    }
    if model is not None and f"{model.get_str('general.architecture')}.{SECTIONS}" in model.metadata:
        more[f"dflash.{SECTIONS}"] = [config.head_dim // 2, 0, 0, 0]  # of the same kind, and equal for text
    if model is None and not _has_tokenizer(draft):
        more |= {TOKENIZER: "none", "dflash.vocab_size": config.n_vocab}
    for key, value in more.items():
        if key in left_out or key not in draft.metadata:
            writer.set(key, value)
    if model is not None:
        others = {key for key in model.metadata if not key.startswith("tokenizer.")}
        writer.copy_metadata(model, without=others | {MASK_TOKEN})
