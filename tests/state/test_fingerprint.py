"""A fingerprint is the same for what computes the same numbers, and another one for everything else."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from pyggml_dflash.arch.base import StateLayout
from pyggml_dflash.arch.draft_forms import open_draft
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.gguf import GgufFile
from pyggml_dflash.state.fingerprint import SAMPLE_BYTES, fingerprint, model_identity
from tests.drafts.published import publish
from tests.state.stored import LAYOUT
from tests.tiny import Tiny, write_tiny

MODEL = bytes(16)


def identity(path: Path) -> bytes:
    with GgufFile.open(path) as file:
        return model_identity(file)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("identity"), Tiny(architecture="qwen35"))


def copied(path: Path, folder: Path) -> Path:
    """The same bytes with the same time."""
    return Path(shutil.copy2(path, folder / "copy.gguf"))


def test_a_file_keeps_its_identity_under_another_name(model: Path, tmp_path: Path) -> None:
    assert identity(model) == identity(model) == identity(copied(model, tmp_path))


def test_another_time_is_another_model(model: Path, tmp_path: Path) -> None:
    path = copied(model, tmp_path)
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    assert identity(path) != identity(model)


@pytest.mark.parametrize("what", ["metadata", "table", "first", "last", "longer"])
def test_an_edit_that_keeps_its_time_is_another_model(model: Path, tmp_path: Path, what: str) -> None:
    path = copied(model, tmp_path)
    with GgufFile.open(path) as file:
        tensors = list(file.tensors.values())
    data = bytearray(path.read_bytes())
    if what == "metadata":
        data[data.index(b"rope.freq_base") + len("rope.freq_base") + 4] ^= 1
    elif what == "table":
        data[data.index(b"blk.1.ffn_up.weight") + 4] = ord("9")
    elif what == "longer":
        data += bytes(32)
    else:
        tensor = tensors[0 if what == "first" else -1]
        data[tensor.offset + tensor.n_bytes // 2] ^= 1
    time_ns = path.stat().st_mtime_ns
    path.write_bytes(data)
    os.utime(path, ns=(time_ns, time_ns))
    assert identity(path) != identity(model)


def test_a_model_in_parts_has_an_identity(tmp_path: Path) -> None:
    path = write_tiny(tmp_path, Tiny(architecture="llama"), n_parts=3)
    assert identity(path) == identity(path)


@pytest.mark.parametrize("what", ["nothing", "time", "config", "weights"])
def test_a_published_folder_has_an_identity(tmp_path: Path, what: str) -> None:
    folder = publish("dflash-tiny", tmp_path)
    with open_draft(folder) as file:
        before = model_identity(file)
    path = folder / ("config.json" if what == "config" else next(folder.glob("*.safetensors")).name)
    time_ns, data = path.stat().st_mtime_ns, bytearray(path.read_bytes())
    if what == "config":
        data += b" "
    elif what == "weights":
        data[len(data) - SAMPLE_BYTES :] = bytes(SAMPLE_BYTES)  # the middle of the last, short tensor
    path.write_bytes(data)
    new_ns = time_ns + (what == "time")
    os.utime(path, ns=(new_ns, new_ns))
    with open_draft(folder) as file:
        assert (model_identity(file) == before) == (what == "nothing")


def test_the_context_does_not_matter() -> None:
    wider = tuple(replace(t, shape=(t.shape[0], 4 * t.shape[1])) if t.grows else t for t in LAYOUT.tensors)
    assert fingerprint(MODEL, LAYOUT, {}) == fingerprint(MODEL, StateLayout(n_ctx=256, tensors=wider), {})


def test_everything_else_does() -> None:
    k, v, conv, pooled, memory = LAYOUT.tensors
    layouts = [
        LAYOUT.tensors,
        (v, k, conv, pooled, memory),
        (k, v, conv, pooled),
        (replace(k, name="K"), v, conv, pooled, memory),
        (replace(k, type=ElementType.BF16), v, conv, pooled, memory),
        (replace(k, shape=(64, 64)), v, conv, pooled, memory),
        (k, v, replace(conv, shape=(8, 3)), pooled, memory),
        (k, v, conv, replace(pooled, positions_per_row=8), memory),
        (k, v, conv, pooled, replace(memory, grows=True)),
    ]
    marks = [fingerprint(MODEL, StateLayout(n_ctx=64, tensors=tensors), {}) for tensors in layouts]
    marks.append(fingerprint(b"another model   ", LAYOUT, {}))
    marks += [
        fingerprint(MODEL, LAYOUT, settings)
        for settings in ({"chunk": 64}, {"chunk": 512}, {"chunk": "64"}, {"flash": 64}, {"a": 1, "b": 2})
    ]
    assert len(set(marks)) == len(marks)
    assert fingerprint(MODEL, LAYOUT, {"a": 1, "b": 2}) == fingerprint(MODEL, LAYOUT, {"b": 2, "a": 1})
