"""The n-gram hash is exact, its constants are read at full width and checked, its rows are read in order."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from pyggml_dflash.arch.qwen4exp.ngram import (
    TABLE,
    NgramConfig,
    NgramHash,
    NgramReader,
    read_ngram_config,
)
from pyggml_dflash.errors import DamagedFileError, ModelFileError, UnsupportedModelError
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.gguf import GgufFile
from pyggml_dflash.ggml.gguf_writer import GgufWriter
from pyggml_dflash.model.config import ConfigReader
from tests.engine.apart import program
from tests.reference.blocks import numbers, random_tensor
from tests.reference.ngram import hashed

# The constants of Qwen3.8-Flash-Next.
SIZES = tuple(20_000_000 + n for n in (3, 23, 33, 47, 59, 63, 69, 77, 81, 93, 107, 147, 153, 159, 161, 171))
REAL = NgramConfig(
    layer=1,
    n_gram=3,
    row_dim=160,
    n_taps=4,
    eos_id=248044,
    multipliers=(23703573157769, 20109073645365, 8052911324071),
    sizes=SIZES,
    offsets=tuple(sum(SIZES[:i]) for i in range(16)),
)
# Rows of the last token, as computed by the published module.
KNOWN = {
    (9707,): (
        "16410909 39682429 55103279 60931720 87006904 116506179 131512017 152932897 "
        "169641436 182022480 209277433 237891023 256841529 277007269 290665954 300984276"
    ),
    (9707, 11): (
        "18158303 36390029 45652312 70783524 98191154 114024957 127804916 159566246 "
        "175132467 192583600 217919476 237199054 259336807 261799367 289359313 307699687"
    ),
    (9707, 11, 1879): (
        "6380558 26411572 56460672 78566983 94693008 106742196 124822692 148942556 "
        "164226950 190352573 210933682 238908951 242182004 265475238 299910982 312121804"
    ),
    (9707, 248044, 1879): (
        "4534223 34461195 53188831 67623329 89624755 104428266 137386396 149402401 "
        "160426620 196479308 211378993 239143795 249988146 262053263 299679851 309845962"
    ),
    (1, 2, 248044): (
        "2993698 22555595 46746235 65551934 83400007 116956842 138173940 148109607 "
        "165238550 195531093 219556029 234233279 250491792 267808615 280482789 305617187"
    ),
    (248045, 846, 198): (
        "4582007 37691206 44255274 65455601 89351473 103985474 135938409 145212418 "
        "163775156 199680439 200044921 228961047 240669798 272736434 296838250 317942745"
    ),
}


def config(
    *,
    n_gram: int = 3,
    heads: int = 2,
    eos: int = 5,
    row_dim: int = 32,
    multipliers: tuple[int, ...] = (3, 5, 7, 11, 13, 17, 19, 23),
) -> NgramConfig:
    """A small hash with a prime per head."""
    sizes = (101, 103, 107, 109, 113, 127, 131, 137, 139, 149, 151, 157, 163, 167)[: (n_gram - 1) * heads]
    return NgramConfig(
        layer=1,
        n_gram=n_gram,
        row_dim=row_dim,
        n_taps=4,
        eos_id=eos,
        multipliers=multipliers[:n_gram],
        sizes=sizes,
        offsets=tuple(sum(sizes[:i]) for i in range(len(sizes))),
    )


def some_tokens(n: int, *, n_vocab: int, eos: int, seed: int = 0) -> list[int]:
    """Random tokens, every fifth or so an end token."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, n_vocab, n)
    return [int(t) for t in np.where(rng.random(n) < 0.2, eos, ids)]


# the hash


@pytest.mark.parametrize("tokens", KNOWN)
def test_the_rows_are_those_of_the_published_module(tokens: tuple[int, ...]) -> None:
    found = NgramHash(REAL).rows(tokens, ())
    assert (found.dtype, found.shape) == (np.int32, (len(tokens), 16))
    assert found[-1].tolist() == [int(n) for n in KNOWN[tokens].split()]


def test_the_small_case_has_its_known_rows() -> None:
    small = NgramConfig(
        layer=0,
        n_gram=3,
        row_dim=1,
        n_taps=4,
        eos_id=99,
        multipliers=(3, 5, 7),
        sizes=(101, 103),
        offsets=(0, 101),
    )
    assert NgramHash(small).rows([7, 9, 11], ()).tolist() == [[1, 124], [56, 136], [12, 162]]


@pytest.mark.parametrize("n_gram", range(2, 9))
@pytest.mark.parametrize("multiplier", [101, 2**45 + 1, 2**54 - 33, 2**63 - 25, 2**64 - 59])
def test_products_of_any_size_wrap_as_in_64_bits(n_gram: int, multiplier: int) -> None:
    wide = config(n_gram=n_gram, multipliers=tuple(multiplier - 2 * j for j in range(8)))
    tokens = some_tokens(60, n_vocab=1000, eos=wide.eos_id)
    assert NgramHash(wide).rows(tokens, ()).tolist() == hashed(
        tokens,
        n_gram=n_gram,
        eos=wide.eos_id,
        multipliers=wide.multipliers,
        sizes=wide.sizes,
        offsets=wide.offsets,
    )


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("n_gram", [2, 3, 5])
def test_rows_do_not_depend_on_the_chunk_size(chunk: int, n_gram: int) -> None:
    small = config(n_gram=n_gram)
    tokens, hash = some_tokens(200, n_vocab=12, eos=small.eos_id), NgramHash(small)
    chunked = [
        hash.rows(tokens[start : start + chunk], tokens[:start][-small.n_before :])
        for start in range(0, len(tokens), chunk)
    ]
    assert np.concatenate(chunked).tolist() == hash.rows(tokens, ()).tolist()


def test_more_of_the_past_than_the_hash_looks_at_changes_nothing() -> None:
    hash = NgramHash(config())
    assert hash.rows([7], [1, 2, 3, 4]).tolist() == hash.rows([7], [3, 4]).tolist()
    assert hash.rows([7], [1, 2, 3, 4]).tolist() != hash.rows([7], [4]).tolist()


def test_the_start_of_a_sequence_is_like_an_end_token_before_it() -> None:
    hash = NgramHash(config(n_gram=4, eos=5))
    assert hash.rows([7, 8, 9], ()).tolist() == hash.rows([7, 8, 9], [1, 2, 5]).tolist()


def test_an_end_token_hides_what_is_older_but_not_from_itself() -> None:
    hash = NgramHash(config(n_gram=4, eos=5))
    assert hash.rows([7], [1, 5, 2]).tolist() == hash.rows([7], [3, 5, 2]).tolist()
    assert hash.rows([7], [1, 5, 2]).tolist() == hash.rows([7], [5, 5, 2]).tolist()
    assert hash.rows([7], [1, 5, 2]).tolist() != hash.rows([7], [1, 4, 2]).tolist()
    assert hash.rows([5], [1, 3, 2]).tolist() != hash.rows([5], [1, 3, 4]).tolist()


# the constants


def keys(config: NgramConfig) -> dict[str, object]:
    """What a file says of it."""
    return {
        "ple.layers": [config.layer],
        "ple.ngram_size": config.n_gram,
        "ple.heads_per_ngram": config.n_head // config.n_before,
        "ple.conv_kernel": config.n_taps,
        "ple.eos_token_id": config.eos_id,
        "embedding_length_per_layer_input": config.row_dim,
        "ple.layer_multipliers": np.array(config.multipliers, np.uint64),
        "ple.head_vocab_sizes": np.array(config.sizes, np.uint64),
        "ple.head_offsets": np.array(config.offsets, np.uint64),
    }


@contextmanager
def reader(
    folder: Path,
    config: NgramConfig,
    *,
    shape: tuple[int, ...] | None = None,
    element: ElementType = ElementType.Q8_0,
    **changes: object,
) -> Iterator[ConfigReader]:
    """The metadata of a file that holds a table and nothing else; a changed key that is None is left out."""
    writer = GgufWriter()
    for key, value in (keys(config) | {key.replace("__", "."): v for key, v in changes.items()}).items():
        if value is not None:
            writer.set(f"qwen4exp.{key}", value)
    shape = (config.row_dim, sum(config.sizes)) if shape is None else shape
    if shape:
        data = random_tensor(element, shape, spread=1.0, rng=np.random.default_rng(2))
        writer.add_raw(TABLE, data, shape=shape, element=element)
    with GgufFile.open(writer.write(folder / "m.gguf")[0]) as file:
        yield ConfigReader(file, "qwen4exp")


LINEAR = (True, True, True, False)


def refusal(folder: Path, kind: type[ModelFileError], config: NgramConfig, **changes: object) -> str:
    """The message of a refused file, after its name."""
    with reader(folder, config, **changes) as r, pytest.raises(kind) as raised:
        read_ngram_config(r, LINEAR, 1000)
    assert raised.type is kind
    return str(raised.value).removeprefix(f"{folder / 'm.gguf'}: ")


@pytest.mark.parametrize("most", [2**45 - 1, 2**54 - 1, 2**64 - 1])
def test_constants_are_read_at_full_width(tmp_path: Path, most: int) -> None:
    wide = config(multipliers=(most, most - 2, most - 4))
    with reader(tmp_path, wide) as r:
        assert r.file.value_types["qwen4exp.ple.layer_multipliers"] == "array of 3 u64"
        assert read_ngram_config(r, LINEAR, 1000) == wide


def test_the_real_constants_may_be_signed_or_unsigned(tmp_path: Path) -> None:
    for kind in (np.uint64, np.int64):
        path = tmp_path / f"{kind.__name__}.gguf"
        writer = GgufWriter()
        for key, value in keys(REAL).items():
            writer.set(f"qwen4exp.{key}", value.astype(kind) if isinstance(value, np.ndarray) else value)
        with GgufFile.open(writer.write(path)[0]) as file:
            assert tuple(file.get_ints("qwen4exp.ple.layer_multipliers")) == REAL.multipliers
            assert tuple(file.get_ints("qwen4exp.ple.head_vocab_sizes")) == REAL.sizes
            assert tuple(file.get_ints("qwen4exp.ple.head_offsets")) == REAL.offsets


def test_a_file_without_layers_and_table_has_no_ngram_embedding(tmp_path: Path) -> None:
    for layers in (None, np.zeros(0, np.uint32)):
        with reader(tmp_path, config(), ple__layers=layers, shape=()) as r:
            assert read_ngram_config(r, LINEAR, 1000) is None
        message = refusal(tmp_path, DamagedFileError, config(), ple__layers=layers)
        assert message == f"tensor '{TABLE}' is of no use without qwen4exp.ple.layers"


def test_longer_arrays_are_taken_to_their_needed_length(tmp_path: Path) -> None:
    small = config()
    longer = {
        "ple__layer_multipliers": np.array([*small.multipliers, 0], np.uint64),
        "ple__head_vocab_sizes": np.array([*small.sizes, 0], np.uint64),
        "ple__head_offsets": np.array([*small.offsets, 2**63], np.uint64),
    }
    with reader(tmp_path, small, **longer) as r:
        assert read_ngram_config(r, LINEAR, 1000) == small


@pytest.mark.parametrize(
    ("key", "n"), [("ple.layer_multipliers", 3), ("ple.head_vocab_sizes", 4), ("ple.head_offsets", 4)]
)
def test_an_array_that_is_too_short_is_named_with_both_lengths(tmp_path: Path, key: str, n: int) -> None:
    changes = {key.replace(".", "__"): np.ones(n - 1, np.uint64)}
    message = refusal(tmp_path, DamagedFileError, config(), **changes)
    assert message == f"qwen4exp.{key} has {n - 1} numbers; the n-gram embedding needs {n}"


def test_constants_that_went_through_floating_point_are_refused(tmp_path: Path) -> None:
    message = refusal(tmp_path, DamagedFileError, config(), ple__layer_multipliers=[3.0, 5.0, 7.0])
    assert message == (
        "the metadata key 'qwen4exp.ple.layer_multipliers' is array of 3 f32; an array of integers is needed"
    )


def test_constants_that_went_through_32_bits_are_refused(tmp_path: Path) -> None:
    narrowed = np.array(REAL.multipliers, np.uint64).astype(np.int32)
    assert narrowed.min() < 0
    message = refusal(tmp_path, DamagedFileError, config(), ple__layer_multipliers=narrowed)
    assert "qwen4exp.ple.layer_multipliers has -" in message


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("ple.ngram_size", 1, "2 to 8"),
        ("ple.ngram_size", 9, "2 to 8"),
        ("ple.heads_per_ngram", 0, "1 to 64"),
        ("ple.heads_per_ngram", 65, "1 to 64"),
        ("ple.conv_kernel", 1, "2 to 64"),
        ("ple.eos_token_id", 1000, "0 to 999"),
        ("embedding_length_per_layer_input", 0, "1 to 65536"),
    ],
)
def test_a_number_out_of_range_is_named_with_its_range(
    tmp_path: Path, key: str, value: int, expected: str
) -> None:
    message = refusal(tmp_path, DamagedFileError, config(), **{key.replace(".", "__"): value})
    assert message == f"qwen4exp.{key} is {value}; expected {expected}"


def test_too_many_heads_are_counted(tmp_path: Path) -> None:
    message = refusal(tmp_path, DamagedFileError, config(), ple__heads_per_ngram=33)
    assert message == (
        "qwen4exp.ple.ngram_size and qwen4exp.ple.heads_per_ngram make 66 heads; at most 64 are possible"
    )


def test_two_ple_layers_are_refused_with_the_reason(tmp_path: Path) -> None:
    message = refusal(tmp_path, UnsupportedModelError, config(), ple__layers=[1, 2])
    assert message == (
        "qwen4exp.ple.layers is [1, 2]; the file has one set of hash constants, so only one layer is possible"
    )


def test_a_ple_layer_must_be_a_delta_net_of_the_trunk(tmp_path: Path) -> None:
    message = refusal(tmp_path, UnsupportedModelError, config(), ple__layers=[3])
    assert message == "qwen4exp.ple.layers is [3], an attention layer; delta nets are layers 0, 1, 2"
    message = refusal(tmp_path, DamagedFileError, config(), ple__layers=[4])
    assert message == "qwen4exp.ple.layers is [4]; expected 0 to 3, counted from 0"


def test_a_head_that_reads_behind_the_table_is_refused(tmp_path: Path) -> None:
    message = refusal(tmp_path, DamagedFileError, config(), shape=(32, 419))
    assert message == f"head 3 of the n-gram embedding reads rows 311 to 419; tensor '{TABLE}' has 419"


def test_a_head_that_reads_beyond_32_bits_is_refused(tmp_path: Path) -> None:
    offsets = np.array([0, 101, 204, 2**31 - 108], np.uint64)
    message = refusal(tmp_path, UnsupportedModelError, config(), ple__head_offsets=offsets)
    assert message == (
        "head 3 of the n-gram embedding reads up to row 2147483648; at most 2147483647 is possible"
    )


def test_an_empty_head_is_refused(tmp_path: Path) -> None:
    sizes = np.array([101, 0, 107, 109], np.uint64)
    message = refusal(tmp_path, DamagedFileError, config(), ple__head_vocab_sizes=sizes)
    assert message == "qwen4exp.ple.head_vocab_sizes is 0 for head 1"


def test_a_table_that_is_missing_or_misshapen_is_named(tmp_path: Path) -> None:
    message = refusal(tmp_path, DamagedFileError, config(), shape=())
    assert message == f"tensor '{TABLE}' is missing, which qwen4exp.ple.layers asks for"
    message = refusal(tmp_path, DamagedFileError, config(), shape=(64, 420))
    assert message == f"tensor '{TABLE}' has shape [64, 420]; expected rows of 32"
    message = refusal(tmp_path, DamagedFileError, config(), shape=(32 * 420,))
    assert message == f"tensor '{TABLE}' has shape [13440]; expected rows of 32"


def test_a_table_of_integers_is_refused(tmp_path: Path) -> None:
    message = refusal(tmp_path, UnsupportedModelError, config(), element=ElementType.I32)
    assert message == f"tensor '{TABLE}' has type i32; expected a type of weights"


# the rows


@contextmanager
def opened_reader(folder: Path, config: NgramConfig, element: ElementType) -> Iterator[NgramReader]:
    with reader(folder, config, element=element) as r:
        found = NgramReader(config, r.file)
        try:
            yield found
        finally:
            found.close()


def read(reader: NgramReader, tokens: list[int], before: list[int], width: int) -> list[list[float]]:
    out = np.full(len(tokens) * width, np.nan, np.float32)
    reader.read(tokens, before, out)
    rows: list[list[float]] = out.reshape(len(tokens), width).tolist()
    return rows


@pytest.mark.parametrize("element", [ElementType.F32, ElementType.BF16, ElementType.IQ4_NL])
def test_a_token_reads_the_rows_of_its_heads_side_by_side(tmp_path: Path, element: ElementType) -> None:
    small = config()
    tokens = some_tokens(50, n_vocab=900, eos=small.eos_id)
    with opened_reader(tmp_path, small, element) as rows, GgufFile.open(tmp_path / "m.gguf") as file:
        info = file.tensors[TABLE]
        table = numbers(element, info.shape, file.data(info))
        expected = table[NgramHash(small).rows(tokens, ())].reshape(50, small.width)
        assert read(rows, tokens, [], small.width) == expected.tolist()
        assert read(rows, tokens[3:5], tokens[1:3], small.width) == expected[3:5].tolist()


def test_rows_read_ahead_are_those_read_on_demand_whatever_comes(tmp_path: Path) -> None:
    small = config()
    tokens = some_tokens(40, n_vocab=900, eos=small.eos_id)
    with opened_reader(tmp_path, small, ElementType.Q8_0) as rows:
        whole = read(rows, tokens, [], small.width)
        rows.expect(tokens[10:20], tokens[:10])
        assert read(rows, tokens[10:20], tokens[8:10], small.width) == whole[10:20]
        rows.expect(tokens[20:30], tokens[:20])  # expected, but something else comes
        assert read(rows, tokens[20:25], tokens[:20], small.width) == whole[20:25]
        rows.expect(tokens[20:30], tokens[:20])
        rows.expect(tokens[30:40], tokens[:30])
        assert read(rows, tokens[30:40], tokens[:30], small.width) == whole[30:40]
        rows.expect(tokens[:10], [])
        other = [6, 7]
        assert read(rows, tokens[:10], other, small.width) != whole[:10]  # the same tokens behind others
        rows.expect(tokens, [])
    rows.close()


AFTER_MAIN = """
import sys, threading
import numpy as np
from pyggml_dflash.arch.qwen4exp.ngram import NgramReader, read_ngram_config
from pyggml_dflash.ggml.gguf import GgufFile
from pyggml_dflash.model.config import ConfigReader

def work():
    threading.main_thread().join()
    with GgufFile.open(sys.argv[1]) as file:
        config = read_ngram_config(ConfigReader(file, "qwen4exp"), (True, True), 1000)
        reader, out = NgramReader(config, file), np.zeros(3 * config.width, np.float32)
        reader.expect([1, 2, 3], [])
        reader.read([1, 2, 3], [], out)
        reader.close()
        print(out.any())

threading.Thread(target=work).start()
"""


def test_rows_are_read_ahead_after_the_main_thread_has_ended(tmp_path: Path) -> None:
    with reader(tmp_path, config()):
        done = program(AFTER_MAIN, tmp_path / "m.gguf")
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_a_reader_that_nobody_closed_ends_its_thread(tmp_path: Path) -> None:
    def threads() -> list[threading.Thread]:
        return [t for t in threading.enumerate() if t.name == "ngram-rows"]

    with reader(tmp_path, config()) as r:
        forgotten = NgramReader(config(), r.file)
        forgotten.expect([1], [])
        (thread,) = threads()
        del forgotten
        thread.join(60)
        assert not threads()


def test_an_error_of_the_thread_reaches_the_reader(tmp_path: Path) -> None:
    small = config()
    behind = dataclasses.replace(small, offsets=(10_000,) * 4)  # no file could say so, see above
    with reader(tmp_path, small) as r:
        rows = NgramReader(behind, r.file)
        rows.expect([1], [])
        with pytest.raises((IndexError, ValueError)):
            read(rows, [1], [], small.width)
        rows.close()
        rows.close()
