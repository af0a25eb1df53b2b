"""Opening GGUF files: what is accepted, how long bytes live, and sets of several files."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from pyggml_dflash.errors import DamagedFileError, EngineClosed, ModelFileError, UsageError
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.gguf import GgufFile
from pyggml_dflash.ggml.gguf_writer import GgufWriter
from tests.ggml.handmade import I32, STR, U16, U32, entry, gguf, opened, row, text

MODELS = Path(__file__).parents[1] / "data" / "models"
KEY = entry("a", U32, bytes(4))


def test_a_published_file_opens_with_metadata_and_tensors() -> None:
    with GgufFile.open(MODELS / "llama-tiny-Q8_0.gguf") as file:
        assert (file.version, file.alignment, file.n_bytes) == (3, 32, 569_824)
        assert file.get_str("general.architecture") == "llama"
        tokens = file.get_strs("tokenizer.ggml.tokens")
        embedding = file.tensors["token_embd.weight"]
        assert embedding.type is ElementType.Q8_0
        assert embedding.shape == (file.get_int("llama.embedding_length"), len(tokens))
        assert embedding.n_bytes == embedding.n_elements // 32 * 34 == file.data(embedding).nbytes
        assert file.parts == (file.path,)


@pytest.mark.parametrize("version", [2, 3])
def test_versions_2_and_3_are_read_alike(version: int, tmp_path: Path) -> None:
    weights = np.arange(12, dtype="<f4")
    entries = [entry("a", U32, struct.pack("<I", 7)), entry("b", STR, text("é"))]
    content = gguf(entries, [row("w", (4, 3))], weights.tobytes(), version=version)
    with opened(tmp_path, content) as file:
        assert file.version == version
        assert dict(file.metadata) == {"a": 7, "b": "é"}
        tensor = file.tensors["w"]
        assert (tensor.shape, tensor.type, tensor.part) == ((4, 3), ElementType.F32, 0)
        assert file.data(tensor).view("<f4").tolist() == weights.tolist()
        assert tensor.offset == len(content) - 48


def test_a_tensor_without_dimensions_is_one_element(tmp_path: Path) -> None:
    with opened(tmp_path, gguf([], [row("scale", ())], struct.pack("<f", 2.5))) as file:
        assert file.tensors["scale"].shape == ()
        assert file.data(file.tensors["scale"]).view("<f4")[0] == 2.5


def test_tensors_may_stand_in_any_order_with_gaps(tmp_path: Path) -> None:
    rows = [row("late", (8,), offset=96), row("early", (8,), offset=0)]
    with opened(tmp_path, gguf([], rows, bytes(128))) as file:
        assert list(file.tensors) == ["late", "early"]


def test_the_alignment_of_the_file_is_used(tmp_path: Path) -> None:
    entries = [entry("general.alignment", U32, struct.pack("<I", 256))]
    content = gguf(entries, [row("w", (1,))], b"\0\0\x80\x3f", alignment=256)
    with opened(tmp_path, content) as file:
        assert file.alignment == 256
        assert file.tensors["w"].offset == 256


def test_the_last_tensor_needs_no_padding_behind_it(tmp_path: Path) -> None:
    with opened(tmp_path, gguf([], [row("w", (3,))], bytes(12))) as file:
        assert file.tensors["w"].offset + 12 == file.n_bytes


def test_a_file_of_metadata_only_opens(tmp_path: Path) -> None:
    with opened(tmp_path, gguf([entry("a", STR, text(""))], [])) as file:
        assert file.get_str("a") == ""
        assert not file.tensors


def test_views_are_read_only_share_the_mapping_and_outlive_the_file(tmp_path: Path) -> None:
    with opened(tmp_path, gguf([], [row("w", (4,))], np.arange(4, dtype="<f4").tobytes())) as file:
        tensor, whole = file.tensors["w"], file.mapping(0)
        view = file.data(tensor)
        assert np.shares_memory(view, whole)
        assert whole.nbytes == file.n_bytes
        assert whole.ctypes.data % 4096 == 0
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 1
    assert view.view("<f4").tolist() == [0, 1, 2, 3]


def test_a_closed_file_refuses_its_bytes_and_keeps_its_tables(tmp_path: Path) -> None:
    file = opened(tmp_path, gguf([KEY], [row("w", (4,))], bytes(16)))
    file.close()
    file.close()
    with pytest.raises(EngineClosed, match=r"model\.gguf is closed"):
        file.data(file.tensors["w"])
    assert file.get_int("a") == 0


def test_a_tensor_of_another_file_is_refused(tmp_path: Path) -> None:
    with (
        GgufFile.open(MODELS / "llama-tiny-Q8_0.gguf") as other,
        opened(tmp_path, gguf([], [row("w", (4,))], bytes(16))) as file,
        pytest.raises(UsageError, match=r"'output_norm\.weight' is not one of"),
    ):
        file.data(other.tensors["output_norm.weight"])


def write_set(folder: Path, n_parts: int = 3, name: str = "m", fill: int = 0) -> tuple[Path, ...]:
    folder.mkdir(exist_ok=True)
    writer = GgufWriter()
    writer.set("general.architecture", "llama")
    writer.set("general.name", name)
    for i in range(6):
        writer.add_tensor(f"t{i}", np.full((2, 8 + i), fill + i, np.float32))
    return writer.write(folder / "m.gguf", n_parts=n_parts)


@pytest.mark.parametrize("first", [0, 1, 2])
def test_any_part_opens_the_whole_set(first: int, tmp_path: Path) -> None:
    paths = write_set(tmp_path)
    with GgufFile.open(paths[first]) as file:
        assert file.path == paths[first]
        assert file.parts == paths
        assert [p.name for p in paths] == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
        assert [t.part for t in file.tensors.values()] == [0, 0, 1, 1, 2, 2]
        assert file.n_bytes == sum(p.stat().st_size for p in paths)
        assert file.get_str("general.name") == "m"
        for i, tensor in enumerate(file.tensors.values()):
            assert set(file.data(tensor).view("<f4").tolist()) == {float(i)}


def test_a_missing_part_is_named_with_the_parts_that_are_there(tmp_path: Path) -> None:
    paths = write_set(tmp_path)
    paths[1].unlink()
    with pytest.raises(ModelFileError) as caught:
        GgufFile.open(paths[0])
    assert not isinstance(caught.value, DamagedFileError)
    assert (
        "1 of 3 parts missing: m-00002-of-00003.gguf; there: m-00001-of-00003.gguf, m-00003-of-00003.gguf"
        in str(caught.value)
    )


def test_a_renamed_part_says_what_its_name_must_be(tmp_path: Path) -> None:
    renamed = write_set(tmp_path)[1].rename(tmp_path / "second.gguf")
    with pytest.raises(DamagedFileError, match=r"part 2 of 3, so its name must end in -00002-of-00003\.gguf"):
        GgufFile.open(renamed)


def test_parts_in_the_wrong_order_are_refused(tmp_path: Path) -> None:
    paths = write_set(tmp_path)
    paths[1].rename(tmp_path / "x")
    paths[2].rename(paths[1])
    (tmp_path / "x").rename(paths[2])
    with pytest.raises(
        DamagedFileError, match="metadata this is part 3 of 3, by its name part 2 of 3; it was"
    ):
        GgufFile.open(paths[0])


def test_a_doubled_part_is_refused(tmp_path: Path) -> None:
    paths = write_set(tmp_path)
    paths[2].write_bytes(paths[1].read_bytes())
    with pytest.raises(DamagedFileError, match="metadata this is part 2 of 3, by its name part 3 of 3"):
        GgufFile.open(paths[0])


def test_a_part_of_a_set_of_another_size_is_refused(tmp_path: Path) -> None:
    paths, others = write_set(tmp_path), write_set(tmp_path / "o", 2)
    paths[1].write_bytes(others[1].read_bytes())
    with pytest.raises(DamagedFileError, match="part 2 of 2, by its name part 2 of 3"):
        GgufFile.open(paths[0])


def part(
    folder: Path,
    no: int,
    *tensors: str,
    n_tensors: int = 2,
    keys: dict[str, str] | None = None,
    alignment: int = 32,
) -> Path:
    """Part `no` of 2, by hand, so that it can be wrong."""
    entries = [
        entry("split.no", U16, struct.pack("<H", no)),
        entry("split.count", U16, struct.pack("<H", 2)),
        entry("split.tensors.count", I32, struct.pack("<i", n_tensors)),
        *(entry(key, STR, text(value)) for key, value in (keys or {}).items()),
    ]
    if alignment != 32:
        entries.append(entry("general.alignment", U32, struct.pack("<I", alignment)))
    rows = [row(name, (1,), offset=i * alignment) for i, name in enumerate(tensors)]
    data = b"".join(struct.pack("<f", no + i / 10) + bytes(alignment - 4) for i in range(len(tensors)))
    path = folder / f"m-0000{no + 1}-of-00002.gguf"
    path.write_bytes(gguf(entries, rows, data, alignment=alignment))
    return path


def test_parts_that_count_tensors_differently_are_of_two_models(tmp_path: Path) -> None:
    part(tmp_path, 0, "a")
    wrong = part(tmp_path, 1, "b", n_tensors=9)
    with pytest.raises(
        DamagedFileError, match=r"another model than m-00001.*split\.tensors\.count is 9, not 2"
    ):
        GgufFile.open(wrong)


def test_parts_that_name_two_models_are_refused(tmp_path: Path) -> None:
    part(tmp_path, 0, "a", keys={"general.name": "one"})
    wrong = part(tmp_path, 1, "b", keys={"general.name": "two"})
    with pytest.raises(DamagedFileError, match=r"another model.*general\.name is two, not one"):
        GgufFile.open(wrong)


def test_a_set_that_lacks_tensors_is_refused(tmp_path: Path) -> None:
    first = part(tmp_path, 0, "a", n_tensors=3)
    part(tmp_path, 1, "b", n_tensors=3)
    with pytest.raises(DamagedFileError, match=r"the parts have 2 tensors, split\.tensors\.count is 3"):
        GgufFile.open(first)


def test_a_tensor_in_two_parts_is_refused(tmp_path: Path) -> None:
    first = part(tmp_path, 0, "a")
    part(tmp_path, 1, "a")
    with pytest.raises(DamagedFileError, match=r"tensor 'a' is both in .* and in m-00002-of-00002\.gguf"):
        GgufFile.open(first)


def test_the_first_part_may_hold_metadata_and_no_tensor(tmp_path: Path) -> None:
    first = part(tmp_path, 0, keys={"general.architecture": "qwen4exp"})
    second = part(tmp_path, 1, "a", "b")
    for path in (first, second):
        with GgufFile.open(path) as file:
            assert file.get_str("general.architecture") == "qwen4exp"
            assert [(t.name, t.part) for t in file.tensors.values()] == [("a", 1), ("b", 1)]
            assert file.data(file.tensors["b"]).view("<f4")[0] == np.float32(1.1)
            assert file.mapping(0).nbytes == first.stat().st_size


def test_every_part_has_its_own_alignment(tmp_path: Path) -> None:
    first = part(tmp_path, 0, "a", "b", n_tensors=4, alignment=64)
    part(tmp_path, 1, "c", "d", n_tensors=4, alignment=256)
    with GgufFile.open(first) as file:
        assert file.alignment == 64
        found = {name: float(file.data(t).view("<f4")[0]) for name, t in file.tensors.items()}
    assert found == pytest.approx({"a": 0, "b": 0.1, "c": 1, "d": 1.1})


def test_later_parts_may_repeat_the_architecture_but_not_name_another(tmp_path: Path) -> None:
    first = part(tmp_path, 0, "a", keys={"general.architecture": "qwen4exp"})
    part(tmp_path, 1, "b", keys={"general.architecture": "qwen4exp"})
    with GgufFile.open(first) as file:
        assert list(file.tensors) == ["a", "b"]
    part(tmp_path, 1, "b", keys={"general.architecture": "llama"})
    with pytest.raises(DamagedFileError, match=r"general\.architecture is llama, not qwen4exp"):
        GgufFile.open(first)


def test_a_part_that_ends_in_its_metadata_names_its_own_path(tmp_path: Path) -> None:
    first = part(tmp_path, 0, "a")
    second = part(tmp_path, 1, "b")
    second.write_bytes(second.read_bytes()[:80])
    with pytest.raises(DamagedFileError, match=r"m-00002-of-00002\.gguf: .*the file has 80 \(truncated\?\)"):
        GgufFile.open(first)
    second.write_bytes(b"")
    with pytest.raises(DamagedFileError, match=r"m-00002-of-00002\.gguf has 0 bytes, fewer than the 24"):
        GgufFile.open(first)


def test_a_merged_file_that_counts_no_parts_is_a_single_file(tmp_path: Path) -> None:
    entries = [entry("split.count", U16, struct.pack("<H", 0))]
    with opened(tmp_path, gguf(entries, [row("w", (1,))], bytes(4))) as file:
        assert len(file.parts) == 1


def test_a_cut_part_names_its_own_path(tmp_path: Path) -> None:
    paths = write_set(tmp_path)
    paths[2].write_bytes(paths[2].read_bytes()[:-64])
    with pytest.raises(DamagedFileError, match=r"m-00003-of-00003\.gguf: tensor 't5' needs bytes"):
        GgufFile.open(paths[0])
