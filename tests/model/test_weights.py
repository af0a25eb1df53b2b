"""Tensors are checked by name, shape and type before memory is taken, and lie where they compute best."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from pyggml_dflash.arch import ARCHITECTURES, architecture_of
from pyggml_dflash.arch.qwen4exp.ngram import TABLE
from pyggml_dflash.errors import DamagedFileError, ModelFileError, UnsupportedModelError
from pyggml_dflash.ggml.arena import read_bytes
from pyggml_dflash.ggml.device import Backend, choose_device
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.gguf import GgufFile
from pyggml_dflash.ggml.gguf_writer import GgufWriter
from pyggml_dflash.ggml.ledger import Ledger
from pyggml_dflash.model.weights import (
    EMBEDDING,
    HEAD,
    LoadedWeights,
    TensorSpec,
    check_tensors,
    place_weights,
)
from tests.tiny import Tiny, tensor_shapes, write_tiny

EVERY = sorted(ARCHITECTURES)


def specs_of(file: GgufFile) -> dict[str, TensorSpec]:
    """What the file's architecture uses of it, checked."""
    name, architecture = architecture_of(file)
    return check_tensors(file, architecture.tensors(architecture.read_config(file, name), file))


def refusal(folder: Path, tiny: Tiny, kind: type[ModelFileError]) -> str:
    """The message of a refused file, after its name."""
    path = write_tiny(folder, tiny)
    with GgufFile.open(path) as file, pytest.raises(kind) as raised:
        specs_of(file)
    assert raised.type is kind
    assert str(raised.value).startswith(f"{path}: ")
    return str(raised.value).removeprefix(f"{path}: ")


def trunk(architecture: str) -> list[tuple[str, str, tuple[int, ...]]]:
    """(architecture, name, shape) of tensors that a file must have: outside layers and in two of them."""
    found = tensor_shapes(Tiny(architecture=architecture))
    kept = {name: shape for name, shape in found.items() if not name.startswith(("blk.2", "blk.3"))}
    return [
        (architecture, name, shape) for name, shape in kept.items() if name not in (HEAD, EMBEDDING, TABLE)
    ]


TENSORS = [case for name in EVERY for case in trunk(name)]


@pytest.mark.parametrize(("architecture", "name", "shape"), TENSORS)
def test_a_missing_tensor_is_named_with_the_shape_it_should_have(
    tmp_path: Path, architecture: str, name: str, shape: tuple[int, ...]
) -> None:
    message = refusal(tmp_path, Tiny(architecture=architecture, shapes={name: None}), DamagedFileError)
    if re.search("ffn_gate(_exps|_shexp)?.weight", name) and "missing" not in message:
        # without a gate, the tensor beside it is taken for both, and has the wrong shape
        assert re.match(r"tensor 'blk.\d.ffn_up.weight' has shape .*; expected \[64, 192\]", message)
        return
    assert message == f"tensor {name!r} is missing; expected {list(shape)}"


@pytest.mark.parametrize(("architecture", "name", "shape"), TENSORS)
def test_a_misshapen_tensor_is_named_with_both_shapes(
    tmp_path: Path, architecture: str, name: str, shape: tuple[int, ...]
) -> None:
    for wrong in ((shape[0] + 1, *shape[1:]), (*shape[:-1], shape[-1] + 1), (*shape, 2)):
        message = refusal(tmp_path, Tiny(architecture=architecture, shapes={name: wrong}), DamagedFileError)
        assert message == f"tensor {name!r} has shape {list(wrong)}; expected {list(shape)}"


@pytest.mark.parametrize("architecture", EVERY)
def test_a_table_of_another_width_is_refused(tmp_path: Path, architecture: str) -> None:
    tiny = Tiny(architecture=architecture, shapes={EMBEDDING: (32, 264)})
    message = refusal(tmp_path, tiny, DamagedFileError)
    assert message == f"tensor {EMBEDDING!r} has shape [32, 264]; expected [64, 264]"


@pytest.mark.parametrize("architecture", EVERY)
def test_a_head_of_another_vocabulary_is_refused(tmp_path: Path, architecture: str) -> None:
    message = refusal(tmp_path, Tiny(architecture=architecture, shapes={HEAD: (64, 265)}), DamagedFileError)
    assert message == f"tensor {HEAD!r} has shape [64, 265]; expected [64, 264]"


@pytest.mark.parametrize(
    ("architecture", "name"), [(a, name) for a, name, shape in TENSORS if len(shape) == 1 or "conv1d" in name]
)
def test_a_vector_of_another_type_is_refused(tmp_path: Path, architecture: str, name: str) -> None:
    tiny = Tiny(architecture=architecture, elements={name: ElementType.F16})
    message = refusal(tmp_path, tiny, UnsupportedModelError)
    assert message == f"tensor {name!r} has type f16; expected f32"


COMPANIONS = [
    (architecture, name, shape)
    for architecture in EVERY
    for name, shape in tensor_shapes(Tiny(architecture=architecture, biases=True, scales=True)).items()
    if re.fullmatch(r"blk\.[01]\..+\.(bias|scale)", name) and "ssm_dt" not in name
]


@pytest.mark.parametrize(("architecture", "name", "shape"), COMPANIONS)
def test_a_misshapen_bias_or_scale_is_refused(
    tmp_path: Path, architecture: str, name: str, shape: tuple[int, ...]
) -> None:
    tiny = Tiny(architecture=architecture, biases=True, scales=True, shapes={name: (shape[0] + 1,)})
    message = refusal(tmp_path, tiny, DamagedFileError)
    assert message == f"tensor {name!r} has shape [{shape[0] + 1}]; expected [{shape[0]}]"


@pytest.mark.parametrize("element", ["I8", "I16", "I32", "I64", "F64"])
@pytest.mark.parametrize("name", [EMBEDDING, HEAD, "blk.0.ffn_down.weight"])
def test_a_matrix_of_a_type_that_is_not_for_weights_is_refused(
    tmp_path: Path, name: str, element: str
) -> None:
    tiny = Tiny(architecture="llama", elements={name: ElementType[element]})
    message = refusal(tmp_path, tiny, UnsupportedModelError)
    assert message.startswith(f"tensor {name!r} has type {element.lower()}; expected ")


@pytest.mark.parametrize("architecture", ["qwen35", "qwen35moe"])
@pytest.mark.parametrize("n_mtp", [1, 2])
def test_an_mtp_block_is_left_alone(tmp_path: Path, architecture: str, n_mtp: int) -> None:
    tiny = Tiny(architecture=architecture, n_mtp=n_mtp)
    with GgufFile.open(write_tiny(tmp_path, tiny)) as file:
        used = specs_of(file)
        unused = set(file.tensors) - set(used)
    assert unused
    assert all(name.startswith(("blk.4.", "blk.5.")) for name in unused)
    assert not any(name.startswith(("blk.4.", "blk.5.")) for name in used)


@pytest.mark.parametrize("architecture", EVERY)
def test_every_tensor_of_a_trunk_is_used(tmp_path: Path, architecture: str) -> None:
    tiny = Tiny(architecture=architecture, biases=True, scales=True)
    with GgufFile.open(write_tiny(tmp_path, tiny)) as file:
        assert set(specs_of(file)) == set(file.tensors) - {TABLE}  # whose rows are read from the file


def test_a_shape_may_have_ones_behind_it(tmp_path: Path) -> None:
    tiny = Tiny(architecture="qwen35moe", shapes={"blk.0.ffn_gate_inp_shexp.weight": (64,)})
    with GgufFile.open(write_tiny(tmp_path, tiny)) as file:
        assert "blk.0.ffn_gate_inp_shexp.weight" in specs_of(file)


@pytest.mark.parametrize("architecture", ["qwen35moe"])
def test_a_shared_expert_without_its_router_is_refused(tmp_path: Path, architecture: str) -> None:
    name = "blk.1.ffn_gate_inp_shexp.weight"
    message = refusal(tmp_path, Tiny(architecture=architecture, shapes={name: None}), DamagedFileError)
    assert message == f"tensor {name!r} is missing; expected [64, 1]"


# where they lie


@contextmanager
def loaded(
    path: Path, *, repack: bool, reports: list[tuple[int, int]] | None = None
) -> Iterator[LoadedWeights]:
    with ExitStack() as stack:
        file = stack.enter_context(GgufFile.open(path))
        backend = Backend(choose_device("CPU"), threads=1)
        stack.callback(backend.close)
        ledger = Ledger()
        placements = place_weights(file, specs_of(file), backend, repack=repack)
        progress = None if reports is None else lambda done, total: reports.append((done, total))
        weights = LoadedWeights(file, placements, backend, ledger, progress)
        stack.callback(weights.close)
        yield weights
        weights.close()
        assert ledger.charged("CPU") == 0


@pytest.mark.parametrize("architecture", EVERY)
@pytest.mark.parametrize("n_parts", [1, 4])
def test_weights_are_the_bytes_of_the_file(tmp_path: Path, architecture: str, n_parts: int) -> None:
    path = write_tiny(tmp_path, Tiny(architecture=architecture), n_parts=n_parts)
    with loaded(path, repack=False) as weights:
        assert set(weights.n_bytes) == {"mapped"}
        for name, info in weights.file.tensors.items():
            if name == TABLE:
                assert weights.get(name) is None
                continue
            tensor = weights[name]
            assert (tensor.type, tensor.n_bytes) == (info.type, info.n_bytes)
            assert read_bytes(tensor, 0, info.n_bytes) == weights.file.data(info).tobytes()
        assert weights.get("blk.0.absent.weight") is None


def test_a_tied_head_is_the_table(tmp_path: Path) -> None:
    with loaded(write_tiny(tmp_path, Tiny(architecture="llama", tied=True)), repack=False) as weights:
        table = weights.file.data(weights.file.tensors[EMBEDDING]).tobytes()
        assert read_bytes(weights[HEAD], 0, len(table)) == table


def test_repacking_copies_matrices_and_leaves_the_table_in_the_file(tmp_path: Path) -> None:
    tiny = Tiny(architecture="llama", tied=True, elements={"": ElementType.Q4_0})
    path, reports = write_tiny(tmp_path, tiny), list[tuple[int, int]]()
    with loaded(path, repack=True, reports=reports) as weights:
        layouts = set(weights.n_bytes) - {"mapped"}
        if not layouts:  # a processor for which ggml has no layout of its own
            return
        assert all(weights.n_bytes[layout] > 0 for layout in layouts)
        table = weights.file.tensors[EMBEDDING]
        assert read_bytes(weights[EMBEDDING], 0, table.n_bytes) == weights.file.data(table).tobytes()
    totals = {total for _, total in reports}
    assert len(totals) == 1
    assert [done for done, _ in reports] == sorted(done for done, _ in reports)
    assert reports[-1][0] == totals.pop()


@pytest.mark.parametrize("repack", [True, False])
def test_a_tensor_that_lies_unaligned_in_the_file_is_copied(tmp_path: Path, repack: bool) -> None:
    source = write_tiny(tmp_path, Tiny(architecture="llama", n_embd=50, head_dim=12))
    with GgufFile.open(source) as file:
        writer = GgufWriter(alignment=8)
        writer.copy_metadata(file)
        for info in file.tensors.values():
            writer.add_raw(info.name, file.data(info), shape=info.shape, element=info.type)
        (path,) = writer.write(tmp_path / "unaligned.gguf")
    with loaded(path, repack=repack) as weights:
        for name, info in weights.file.tensors.items():
            assert read_bytes(weights[name], 0, info.n_bytes) == weights.file.data(info).tobytes()
        offsets = np.array([info.offset for info in weights.file.tensors.values()])
        assert (offsets % 32 != 0).any()
        assert weights.n_bytes["uploaded"] > 0
