"""A converted draft is the GGUF file that llama.cpp's converter makes; no failure leaves a file behind."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyggml_dflash import ConvertedDraft, ModelFileError, Progress, UnsupportedModelError, UsageError
from pyggml_dflash import convert_draft as convert
from pyggml_dflash.arch.dflash_config import read_draft
from pyggml_dflash.arch.draft_forms import open_draft
from pyggml_dflash.ggml.convert_rows import from_single, to_single
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.gguf import GgufFile
from pyggml_dflash.ggml.gguf_writer import GgufWriter
from tests.drafts.drafted import draft_file
from tests.drafts.published import Stored, as_bf16, publish
from tests.drafts.test_older_drafts import older
from tests.reference.stored import model_file, q8_0_blocks

DRAFTS = ("dflash-tiny", "dflash-swa-tiny", "dflash-swa-default-tiny", "dflash2-tiny", "dflash-fitted-tiny")
OF_THE_FILE = {"general.name", "general.size_label"}  # what is no part of the draft


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drafts")


@pytest.fixture(scope="module")
def target(folder: Path) -> Path:
    return model_file("qwen35-tiny", "F32", folder)


def same_metadata(found: GgufFile, expected: GgufFile, without: set[str]) -> None:
    keys = {*expected.metadata} - without
    assert {*found.metadata} - without == keys
    for key in keys:
        assert found.value_types[key] == expected.value_types[key], key
        np.testing.assert_array_equal(found.metadata[key], expected.metadata[key], err_msg=key)


def same_tensors(found: GgufFile, expected: GgufFile) -> None:
    assert {*found.tensors} == {*expected.tensors}
    for t in expected.tensors.values():
        ours = found.tensors[t.name]
        assert (ours.shape, ours.type) == (t.shape, t.type), t.name
        np.testing.assert_array_equal(found.data(ours), expected.data(t), err_msg=t.name)


@pytest.mark.parametrize("name", DRAFTS)
def test_a_converted_folder_is_the_file_that_llama_cpp_made(
    folder: Path, target: Path, tmp_path: Path, name: str
) -> None:
    kind = "F16" if name == "dflash-fitted-tiny" else "F32"
    out = tmp_path / "out.gguf"
    done = convert(publish(name, tmp_path, kind=kind), out, target=target)  # type: ignore[arg-type]
    with GgufFile.open(out) as file, GgufFile.open(draft_file(name, folder, kind)) as expected:  # type: ignore[arg-type]
        same_metadata(file, expected, OF_THE_FILE)
        same_tensors(file, expected)
        assert read_draft(file) == read_draft(expected)
    assert done.has_tokenizer
    assert done.n_bytes == out.stat().st_size
    assert [p.name for p in tmp_path.iterdir() if p.suffix != ""] == ["out.gguf"]


def test_without_a_target_the_file_says_that_it_has_no_tokenizer(tmp_path: Path) -> None:
    path, out = publish("dflash-tiny", tmp_path), tmp_path / "out.gguf"
    done = convert(path, out)
    with GgufFile.open(out) as file, open_draft(path) as source:
        assert file.get_str("tokenizer.ggml.model") == "none"
        assert file.get_int("dflash.vocab_size") == 768
        assert read_draft(file) == read_draft(source)
    assert not done.has_tokenizer


def test_a_file_without_tokenizer_gets_it_from_a_target_later(
    folder: Path, target: Path, tmp_path: Path
) -> None:
    bare, out = tmp_path / "bare.gguf", tmp_path / "out.gguf"
    convert(publish("dflash2-tiny", tmp_path), bare)
    assert convert(bare, out, target=target).has_tokenizer
    with GgufFile.open(out) as file, GgufFile.open(draft_file("dflash2-tiny", folder)) as expected:
        same_metadata(file, expected, OF_THE_FILE)
        same_tensors(file, expected)


def test_an_older_file_becomes_todays(folder: Path, target: Path, tmp_path: Path) -> None:
    source, out = draft_file("dflash-swa-default-tiny", folder), tmp_path / "out.gguf"
    convert(older(source, tmp_path), out, target=target)
    with GgufFile.open(out) as file, GgufFile.open(source) as expected:
        same_metadata(file, expected, OF_THE_FILE)
        same_tensors(file, expected)


def singles(file: GgufFile, name: str) -> np.ndarray[Any, Any]:
    t = file.tensors[name]
    return to_single(file.data(t), t.type)


TYPES = ("f32", "f16", "bf16", "q8_0")


@pytest.mark.parametrize("type", TYPES)
def test_matrices_have_the_type_asked_for_and_vectors_keep_theirs(
    folder: Path, target: Path, tmp_path: Path, type: Any
) -> None:
    source, out = draft_file("dflash2-tiny", folder), tmp_path / "out.gguf"
    done = convert(publish("dflash2-tiny", tmp_path), out, type=type, target=target)
    codebooks = ("selector_predecessor.weight", "selector_successor.weight")  # rows of 16, half a block
    counts: dict[str, int] = {}
    with GgufFile.open(out) as file, GgufFile.open(source) as exact:
        for t in file.tensors.values():
            vector = len(t.shape) == 1 or t.name.endswith("_conv_base")
            wanted = "f32" if vector else "f16" if type == "q8_0" and t.name in codebooks else type
            counts[wanted] = counts.get(wanted, 0) + 1
            assert t.type.label == wanted, t.name
            expected = singles(exact, t.name)
            if wanted == "q8_0":
                np.testing.assert_array_equal(file.data(t), q8_0_blocks(expected))
            elif wanted == "bf16":
                np.testing.assert_allclose(singles(file, t.name), expected, rtol=2**-8, atol=0)
            else:  # the stored matrices are exactly representable in half precision
                np.testing.assert_array_equal(singles(file, t.name), expected)
        assert file.get_int("general.file_type") == {"f32": 0, "f16": 1, "bf16": 32, "q8_0": 7}[type]
        assert read_draft(file) == read_draft(exact)
    assert done.types == counts
    assert done.kept_f16 == (codebooks if type == "q8_0" else ())


def test_bf16_is_rounded_to_nearest_even() -> None:
    values = np.array([[1, 1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8 - 2**-12, 0]], np.float32)
    found = to_single(from_single(values, ElementType.BF16), ElementType.BF16)
    np.testing.assert_array_equal(found, np.array([1, 1, 1 + 2**-6, -1 - 2**-7, 0], np.float32))


def test_a_folder_in_bf16_is_kept_bit_by_bit(tmp_path: Path) -> None:
    path, out = publish("dflash-tiny", tmp_path, change=as_bf16), tmp_path / "out.gguf"
    done = convert(path, out)
    assert done.types == {"bf16": 22, "f32": 14}
    with GgufFile.open(out) as file, open_draft(path) as source:
        for t in source.tensors.values():
            assert file.tensors[t.name].type == t.type
            np.testing.assert_array_equal(file.data(file.tensors[t.name]), source.data(t))


def test_progress_ends_at_the_bytes_of_the_draft(tmp_path: Path) -> None:
    path, seen = publish("dflash-tiny", tmp_path), list[Progress]()
    convert(path, tmp_path / "out.gguf", type="f16", progress=seen.append)
    assert {p.phase for p in seen} == {"convert"}
    assert [p.done for p in seen] == sorted(p.done for p in seen)
    with open_draft(path) as file:
        assert seen[-1].done == seen[-1].total == sum(t.n_bytes for t in file.tensors.values())


def files_in(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir())


def with_value(name: str, value: float) -> Any:
    def change(tensors: Stored) -> Stored:
        dtype, values = tensors[name]
        changed = values.copy()
        changed[-1, -1] = value
        return tensors | {name: (dtype, changed)}

    return change


DOWN = "layers.2.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("type", "value", "text"),
    [
        ("f16", 1e5, "has numbers of 100000; f16 ends at 65504: use bf16 or f32"),
        ("q8_0", -1e7, "has numbers of 1e+07; q8_0 ends at 8.31901e+06: use bf16 or f32"),
        ("bf16", np.nan, "has numbers that are not finite"),
        ("f16", np.inf, "has numbers that are not finite"),
    ],
)
def test_a_number_that_the_type_cannot_hold_is_refused_and_leaves_no_file(
    tmp_path: Path, type: Any, value: float, text: str
) -> None:
    path, out = publish("dflash-tiny", tmp_path, change=with_value(DOWN, value)), tmp_path / "out"
    out.mkdir()
    with pytest.raises((UsageError, ModelFileError)) as caught:
        convert(path, out / "draft.gguf", type=type)
    assert text in str(caught.value)
    assert f"tensor '{DOWN}'" in str(caught.value)
    assert files_in(out) == []


class Interrupted(KeyboardInterrupt):
    """Ctrl-C."""


def interrupt(progress: Progress) -> None:
    if progress.done > progress.total // 2:
        raise Interrupted


@pytest.mark.parametrize("existing", [False, True])
def test_an_interrupt_leaves_what_was_there(tmp_path: Path, existing: bool) -> None:
    path, out = publish("dflash-tiny", tmp_path), tmp_path / "out"
    out.mkdir()
    if existing:
        (out / "draft.gguf").write_bytes(b"what was there")
    with pytest.raises(Interrupted):
        convert(path, out / "draft.gguf", overwrite=True, progress=interrupt)
    assert files_in(out) == (["draft.gguf"] if existing else [])
    if existing:
        assert (out / "draft.gguf").read_bytes() == b"what was there"


def test_a_file_is_replaced_only_when_asked_to(tmp_path: Path) -> None:
    path, out = publish("dflash-tiny", tmp_path), tmp_path / "out.gguf"
    out.write_bytes(b"what was there")
    with pytest.raises(UsageError, match=r"out\.gguf exists; name another file, or ask to overwrite it"):
        convert(path, out)
    assert out.read_bytes() == b"what was there"
    assert isinstance(convert(path, out, overwrite=True), ConvertedDraft)
    with GgufFile.open(out) as file:
        assert file.get_str("general.architecture") == "dflash"


def test_a_draft_may_be_converted_in_its_place(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "draft.gguf"
    path.write_bytes(draft_file("dflash-tiny", folder).read_bytes())
    convert(path, path, type="f16", overwrite=True)
    with GgufFile.open(path) as file, GgufFile.open(draft_file("dflash-tiny", folder)) as exact:
        assert read_draft(file) == read_draft(exact)
        assert len(file.get_strs("tokenizer.ggml.tokens")) == 768


def test_what_is_no_file_is_never_replaced(tmp_path: Path) -> None:
    path, pipe = publish("dflash-tiny", tmp_path), tmp_path / "pipe"
    os.mkfifo(pipe)
    for out, text in ((tmp_path, "is a directory; name a file in it"), (pipe, "is no regular file")):
        with pytest.raises(UsageError, match=text):
            convert(path, out, overwrite=True)
    for out in (tmp_path / "no" / "such.gguf", tmp_path / ("x" * 300)):
        with pytest.raises(ModelFileError, match="cannot be written"):
            convert(path, out)


def test_a_link_is_replaced_itself_and_only_when_asked_to(tmp_path: Path) -> None:
    path, out, other = publish("dflash-tiny", tmp_path), tmp_path / "link.gguf", tmp_path / "other"
    out.symlink_to(other)
    with pytest.raises(UsageError, match=r"link\.gguf exists"):
        convert(path, out)
    convert(path, out, overwrite=True)
    assert out.is_file()
    assert not out.is_symlink()
    assert not other.exists()


@pytest.mark.parametrize("path", ["", 3, b"x.gguf", "a\0b"])
@pytest.mark.parametrize("name", ["draft", "out", "target"])
def test_what_is_no_path_is_refused_by_name(tmp_path: Path, name: str, path: object) -> None:
    given: dict[str, Any] = {"draft": tmp_path / "draft.gguf", "out": tmp_path / "out.gguf", name: path}
    with pytest.raises(UsageError, match=f"^{name} is .*; it must be the path of a file"):
        convert(given["draft"], given["out"], target=given.get("target"))


def test_a_file_is_not_written_where_a_folder_was_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="new is a directory; name a file in it"):
        convert(publish("dflash-tiny", tmp_path), f"{tmp_path}/new/")
    assert not (tmp_path / "new").exists()


def test_progress_is_told_to_a_function(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="progress is 5; it must be a function or None"):
        convert(tmp_path / "draft.gguf", tmp_path / "out.gguf", progress=5)  # type: ignore[arg-type]


def test_overwrite_is_true_or_false(tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    out.write_bytes(b"what was there")
    with pytest.raises(UsageError, match="overwrite is 'no'; it must be True or False"):
        convert(publish("dflash-tiny", tmp_path), out, overwrite="no")  # type: ignore[arg-type]
    assert out.read_bytes() == b"what was there"


def test_the_tokenizer_is_that_of_the_target_also_where_the_draft_has_another(
    folder: Path, target: Path, tmp_path: Path
) -> None:
    other, out = tmp_path / "other.gguf", tmp_path / "out.gguf"
    with GgufFile.open(draft_file("dflash-tiny", folder)) as file, GgufFile.open(target) as model:
        writer, expected = GgufWriter(), list(model.get_strs("tokenizer.ggml.tokens"))
        writer.copy_metadata(file, without={"tokenizer.ggml.tokens"})
        writer.set("tokenizer.ggml.tokens", [f"other{i}" for i in range(len(expected))])
        for t in file.tensors.values():
            writer.add_raw(t.name, file.data(t), shape=t.shape, element=t.type)
        writer.write(other)
    convert(other, out, target=target)
    with GgufFile.open(out) as file, GgufFile.open(other) as source:
        assert list(file.get_strs("tokenizer.ggml.tokens")) == expected
        assert read_draft(file) == read_draft(source)


def test_a_target_that_the_draft_was_not_made_for_is_refused(folder: Path, tmp_path: Path) -> None:
    path, out = publish("dflash-tiny", tmp_path), tmp_path / "out.gguf"
    with pytest.raises(UnsupportedModelError, match="this draft is for another target: its width is 128"):
        convert(path, out, target=model_file("qwen3-tiny", "F16", folder))
    assert not out.exists()


def test_what_is_no_dflash_draft_is_refused(target: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="is no DFlash draft; only those are converted"):
        convert(target, tmp_path / "out.gguf")


def test_blocks_are_not_converted_into_other_types(tmp_path: Path) -> None:
    blocks, out = tmp_path / "blocks.gguf", tmp_path / "out.gguf"
    convert(publish("dflash-tiny", tmp_path), blocks, type="q8_0")
    assert convert(blocks, out).types == {"q8_0": 22, "f32": 14}
    with pytest.raises(UnsupportedModelError, match="has type q8_0, not converted; use 'keep'"):
        convert(blocks, tmp_path / "other.gguf", type="f16")


def test_an_unknown_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="type is 'q4_7'; it must be one of keep, f32, f16, bf16, q8_0"):
        convert(publish("dflash-tiny", tmp_path), tmp_path / "out.gguf", type="q4_7")  # type: ignore[arg-type]
