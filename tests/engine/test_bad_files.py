"""A file is refused with a reason or it runs; nothing in it can end the process or raise what is not ours."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyggml_dflash import (
    BackendError,
    DamagedFileError,
    DflashError,
    ModelFileError,
    UnsupportedModelError,
    UsageError,
)
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.gguf import GgufFile, TensorInfo
from pyggml_dflash.model.weights import TensorSpec
from tests.engine.apart import Apart, Outcome
from tests.engine.hostile import Array, Keys, NewTensor, edited, random_weights, written
from tests.engine.tiny import LLAMA, QWEN35, opened
from tests.ggml.mutations import Mutant, fields, mutants

MIB = 2**20
KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0")


@pytest.fixture(scope="module")
def apart() -> Iterator[Apart]:
    with Apart() as process:
        yield process


def put(path: Path, data: bytes) -> Path:
    """Under a new inode, so that nobody who maps the last file sees a change."""
    path.unlink(missing_ok=True)
    path.write_bytes(data)
    return path


# what is wrong is said


def cuts() -> dict[str, int]:
    """Lengths at which a file breaks off, by where that is."""
    data = QWEN35.read_bytes()
    header = fields(data)
    table = next(f for f in header if f.label.startswith("tensor 0"))
    end = header[-1].offset + header[-1].n_bytes
    return {
        "nothing": 0,
        "in the magic": 3,
        "in the header": 20,
        "in the metadata": table.offset // 2,
        "before the table": table.offset,
        "in the table": (table.offset + end) // 2,
        "after the table": end,
        "amid the tensors": (end + len(data)) // 2,
        "one byte short": len(data) - 1,
    }


@pytest.mark.parametrize("where", cuts())
def test_a_file_that_is_cut_short_is_refused_at_open(where: str, tmp_path: Path) -> None:
    path = put(tmp_path / "cut.gguf", QWEN35.read_bytes()[: cuts()[where]])
    with pytest.raises(DamagedFileError, match="truncated") as raised:
        opened(path)
    assert raised.value.exit_code == 3
    assert str(path) in str(raised.value)


def test_a_cut_names_the_first_tensor_that_is_not_whole_and_both_sizes(tmp_path: Path) -> None:
    data = QWEN35.read_bytes()
    with GgufFile.open(QWEN35) as file:
        last = max(file.tensors.values(), key=lambda t: t.offset)
    path = put(tmp_path / "cut.gguf", data[: last.offset + last.n_bytes - 1])
    with pytest.raises(DamagedFileError) as raised:
        opened(path)
    message = str(raised.value)
    for part in (last.name, str(last.offset + last.n_bytes), str(path.stat().st_size)):
        assert part in message


def test_a_tensor_that_begins_beyond_the_end_is_refused_by_name(tmp_path: Path) -> None:
    data = bytearray(LLAMA.read_bytes())
    offset = fields(bytes(data))[-1]
    assert offset.label.endswith("offset")
    data[offset.offset : offset.offset + 8] = (2**40).to_bytes(8, "little")
    with GgufFile.open(LLAMA) as file:
        name = list(file.tensors)[-1]
    with pytest.raises(DamagedFileError, match=f"{name}.*{2**40 // 10**9}"):
        opened(put(tmp_path / "beyond.gguf", bytes(data)))


def missing_part(folder: Path) -> Path:
    first = edited(LLAMA, folder / "set.gguf", n_parts=3)
    folder.joinpath("set-00002-of-00003.gguf").unlink()
    return first


def without_tensor(folder: Path) -> Path:
    def keep(info: TensorInfo, data: Array) -> NewTensor | None:
        return None if info.name == "blk.2.ffn_up.weight" else (info.type, info.shape, data)

    return edited(LLAMA, folder / "lacks.gguf", tensors=keep)


def reshaped(folder: Path) -> Path:
    def change(info: TensorInfo, data: Array) -> NewTensor:
        shape = (96, 320, 2) if info.name == "token_embd.weight" else info.shape
        return info.type, shape, data

    return edited(LLAMA, folder / "shape.gguf", tensors=change)


PROBLEMS: dict[str, tuple[Callable[[Path], Path], type[ModelFileError], str]] = {
    "no file": (lambda folder: folder / "absent.gguf", ModelFileError, "absent.gguf does not exist"),
    "a folder": (lambda folder: folder, ModelFileError, "is a directory"),
    "another format": (
        lambda folder: put(folder / "m.gguf", b"PK\3\4" + bytes(100)),
        DamagedFileError,
        "zip archive",
    ),
    "another architecture": (
        lambda folder: edited(LLAMA, folder / "m.gguf", keys={"general.architecture": "mamba9"}),
        UnsupportedModelError,
        r"architecture 'mamba9' is not supported; supported: llama, qwen3, qwen35, qwen35moe",
    ),
    "a missing tensor": (
        without_tensor,
        DamagedFileError,
        r"tensor 'blk\.2\.ffn_up\.weight' is missing; expected \[96, 256\]",
    ),
    "a missing part": (missing_part, ModelFileError, r"1 of 3 parts missing: set-00002-of-00003\.gguf"),
    "three dimensions": (reshaped, DamagedFileError, r"token_embd\.weight.*\[96, 320, 2\].*two dimensions"),
    "a missing key": (
        lambda folder: edited(LLAMA, folder / "m.gguf", without=("llama.block_count",)),
        UnsupportedModelError,
        r"'llama\.block_count' \(an integer\) is missing",
    ),
    "more layers than there are": (
        lambda folder: edited(LLAMA, folder / "m.gguf", keys={"llama.block_count": 5}),
        DamagedFileError,
        r"tensor 'blk\.4\.attn_norm\.weight' is missing",
    ),
    "more tokens than rows": (
        lambda folder: written(folder / "m.gguf", "llama", n_rows=8),
        DamagedFileError,
        "64 tokens, but 'token_embd.weight' has 8 rows",
    ),
    "a vocabulary of another kind": (
        lambda folder: edited(LLAMA, folder / "m.gguf", keys={"tokenizer.ggml.model": "t5"}),
        UnsupportedModelError,
        "tokenizer.ggml.model is 't5'",
    ),
    "an end token out of range": (
        lambda folder: edited(LLAMA, folder / "m.gguf", keys={"tokenizer.ggml.eos_token_id": 640}),
        DamagedFileError,
        "eos_token_id is '640'; a token id from 0 to 639",
    ),
    "too few token types": (
        lambda folder: edited(
            LLAMA, folder / "m.gguf", keys={"tokenizer.ggml.token_type": np.ones(9, np.int32)}
        ),
        DamagedFileError,
        r"token_type is 'int32 \[9\]'; an array of 640",
    ),
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_each_problem_has_its_own_class_and_words(problem: str, tmp_path: Path) -> None:
    make, kind, words = PROBLEMS[problem]
    with pytest.raises(kind, match=words) as raised:
        opened(make(tmp_path))
    assert type(raised.value) is kind
    assert raised.value.exit_code == 3


def test_problems_are_told_apart(tmp_path: Path) -> None:
    messages = set()
    for i, (make, kind, _) in enumerate(PROBLEMS.values()):
        folder = tmp_path / str(i)
        folder.mkdir()
        with pytest.raises(kind) as raised:
            opened(make(folder))
        messages.add(str(raised.value).replace(str(folder), ""))
    assert len(messages) == len(PROBLEMS)


def test_a_split_model_runs_as_the_whole_one(tmp_path: Path) -> None:
    def answer(path: Path) -> tuple[int, ...]:
        with opened(path, max_ctx=64) as engine:
            return engine.generate([1, 2, 3], max_tokens=8, ignore_eos=True).tokens

    first = edited(QWEN35, tmp_path / "set.gguf", n_parts=3)
    assert answer(first) == answer(QWEN35)
    assert answer(tmp_path / "set-00002-of-00003.gguf") == answer(QWEN35)


# damaged headers


@dataclass(slots=True)
class Tally:
    """Outcomes of many mutants; `unsound` are those that neither ran nor were refused."""

    n_ran: int = 0
    n_refused: int = 0
    unsound: list[str] = field(default_factory=list)

    def add(self, mutant: Mutant, outcome: Outcome) -> None:
        self.n_ran += outcome.kind == "ran"
        self.n_refused += outcome.kind == "refused"
        if not outcome.is_sound:
            self.unsound.append(f"{mutant.name}: {outcome.kind} {outcome.error} {outcome.message}")


@pytest.mark.parametrize("n", [200, pytest.param(1500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", [LLAMA, QWEN35])
def test_a_damaged_header_is_refused_or_runs_within_twice_the_memory_of_the_file(
    model: Path, n: int, tmp_path: Path
) -> None:
    """Cut at every field's border, and damaged in `n` other ways."""
    good, tally = model.read_bytes(), Tally()
    with Apart() as process:
        for _ in range(3):
            start = process.open(model).peak_bytes
        outcome = None
        for mutant in mutants(good, seed=21, n=n):
            outcome = process.open(put(tmp_path / model.name, mutant.data))
            tally.add(mutant, outcome)
    assert tally.unsound == []
    assert tally.n_ran + tally.n_refused >= 500 + n
    assert tally.n_ran > n // 150
    assert outcome is not None
    # The most that any of them held; heaps of a process that opened so many files are not compact.
    assert outcome.peak_bytes - start < 2 * len(good) + 16 * MIB


def wrong_values(value: object) -> list[Any]:
    """Values of every type in place of `value`, and arrays of its length."""
    found: list[Any] = [0, 1, -1, 3, 64, 2**31 - 1, 2**31, 2**63 - 1, -(2**63), 0.5, -1.0, float("nan")]
    found += [
        float("inf"),
        np.float64(1e300),
        np.float64(5e-324),
        True,
        "",
        "none",
        "yarn",
        "gpt-2",
        [1],
        ["a"],
    ]
    if not isinstance(value, (int, float, str)):
        n = len(value)  # type: ignore[arg-type]
        found += [np.full(n, x, kind) for x, kind in ((1, "f4"), (1, "u8"), (6, "i4"), (2.5, "f8"), (0, "?"))]
        found += [["a"] * n, [f"a {i}" for i in range(n)], np.ones(n + 1, np.int32), np.array([], np.int8)]
    return found


def keys_of(model: Path) -> dict[str, Any]:
    """The keys of a file, and some that it could have."""
    with GgufFile.open(model) as file:
        known: dict[str, Any] = dict(file.metadata)
    name = known["general.architecture"]
    could = ("rope.scaling.type", "rope.scaling.factor", "attention.scale", "expert_count")
    return {**known, **{f"{name}.{key}": 0 for key in could}}


@pytest.mark.parametrize("share", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", [LLAMA, QWEN35])
def test_a_wrong_value_of_any_key_is_refused_or_runs(
    model: Path, share: int, tmp_path: Path, apart: Apart
) -> None:
    """One value of `share` for each key, other ones for the next key."""
    tally, tried = Tally(), keys_of(LLAMA) if model is QWEN35 else {}
    for i, (key, value) in enumerate(keys_of(model).items()):
        if key in tried or key == "general.name":  # the other model has it; the next test is about it
            continue
        for wrong in wrong_values(value)[i % share :: share]:
            path = tmp_path / "m.gguf"
            path.unlink(missing_ok=True)
            edited(model, path, keys={key: wrong})
            tally.add(Mutant(f"{key} = {str(wrong)[:60]}", b""), apart.open(path))
    assert tally.unsound == []
    assert tally.n_ran > 50 // share
    assert tally.n_refused > 200 // share


def test_a_wrong_name_is_refused_without_a_leak(tmp_path: Path, apart: Apart) -> None:
    outcome = apart.open(edited(LLAMA, tmp_path / "m.gguf", keys={"general.name": 5}))
    assert (outcome.kind, outcome.error) == ("refused", "DamagedFileError")


# models that make no sense


def odd_models() -> dict[str, tuple[str, Keys]]:
    """Sizes that pass every check and that kernels were not made for."""
    odd: dict[str, tuple[str, Keys]] = {}
    for n in (1, 2, 3, 7, 20, 33, 100, 576):
        heads = {"attention.key_length": n, "attention.value_length": n, "rope.dimension_count": 2}
        for name in ("llama", "qwen35"):
            odd[f"{name} heads of {n}"] = name, heads
    for n in (1, 3, 31):
        for name in ("llama", "qwen3", "qwen35", "qwen35moe"):
            odd[f"{name} width {n}"] = name, {"embedding_length": n}
            odd[f"{name} feed-forward {n}"] = (
                name,
                {"feed_forward_length": n, "expert_feed_forward_length": n},
            )
    for n in (2, 3, 64):
        odd[f"{n} taps"] = "qwen35", {"ssm.conv_kernel": n}
    for n in (1, 7, 100, 256):
        sizes = {"ssm.state_size": n, "ssm.group_count": 1, "ssm.time_step_rank": 3, "ssm.inner_size": 3 * n}
        odd[f"delta net heads of {n}"] = "qwen35", sizes
    for n, used in ((1, 1), (3, 3), (17, 16), (200, 100)):
        odd[f"{used} of {n} experts"] = "qwen35moe", {"expert_count": n, "expert_used_count": used}
    few = {"attention.key_length": 2, "attention.value_length": 2, "rope.dimension_count": 2}
    odd["512 heads"] = "llama", {**few, "attention.head_count": 512, "attention.head_count_kv": 2}
    odd["no attention"] = "qwen35", {"full_attention_interval": 1024}
    odd["only attention"] = "qwen35", {"full_attention_interval": 1}
    odd["no shared expert"] = "qwen35moe", {"expert_shared_feed_forward_length": 0}
    odd["slow rotation"] = "llama", {"rope.freq_base": 3e38}
    odd["yarn without a base"] = (
        "llama",
        {"rope.freq_base": 1.0, "rope.scaling.type": "yarn", "rope.scaling.factor": 1e6},
    )
    odd["infinite scale"] = "llama", {"attention.scale": np.float64(1e300)}
    odd["no epsilon"] = "qwen35", {"attention.layer_norm_rms_epsilon": 0.0}
    return odd


@pytest.mark.parametrize("name", odd_models())
def test_an_odd_model_runs_or_is_refused(name: str, tmp_path: Path, apart: Apart) -> None:
    architecture, keys = odd_models()[name]
    try:
        path = written(tmp_path / "m.gguf", architecture, keys)
    except DflashError:
        return  # its numbers are refused before it has tensors
    for flash_attn in ("on", "off"):
        outcome = apart.open(path, prompt=range(20), flash_attn=flash_attn, chunk=7)
        assert outcome.is_sound, outcome.message


@pytest.mark.parametrize("n_layer", [90, pytest.param(300, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen35", "qwen35moe"])
def test_a_deep_model_with_every_optional_tensor_fits_its_graphs(
    name: str, n_layer: int, tmp_path: Path, apart: Apart
) -> None:
    path = written(tmp_path / "m.gguf", name, {"block_count": n_layer}, optional=True)
    for flash_attn in ("on", "off"):
        outcome = apart.open(path, prompt=range(9), flash_attn=flash_attn)
        assert outcome.kind == "ran", outcome.message


@pytest.mark.parametrize("n_vocab", [1, 2, 3])
def test_a_vocabulary_of_few_tokens_runs(n_vocab: int, tmp_path: Path, apart: Apart) -> None:
    for name in ("llama", "qwen35moe"):
        path = written(tmp_path / f"{name}.gguf", name, texts=tuple(f"t{i}" for i in range(n_vocab)))
        outcome = apart.open(path, prompt=[0], max_tokens=3)
        assert outcome.kind == "ran", outcome.message
        assert set(outcome.tokens) <= set(range(n_vocab))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"rope.dimension_count": 18}, "rope.dimension_count is 18; expected 1 to 16"),
        ({"rope.dimension_count": 5}, "rope.dimension_count is 5; expected an even number"),
        ({"attention.head_count": 3, "attention.head_count_kv": 2}, "3 heads cannot share 2"),
        ({"attention.value_length": 8}, "key heads of 16 and value heads of 8 differ"),
        ({"expert_used_count": 9}, "expert_used_count is 9; expected 1 to 8"),
        ({"expert_used_count": 0}, "expert_used_count is 0; expected 1 to 8"),
        ({"ssm.conv_kernel": 65}, "conv_kernel is 65; expected 2 to 64"),
        ({"ssm.conv_kernel": 1}, "conv_kernel is 1; expected 2 to 64"),
        ({"ssm.group_count": 3}, "4 value heads cannot share 3"),
        ({"ssm.inner_size": 65}, "inner_size is 65; heads and sizes make 64"),
        ({"rope.freq_base": float("inf")}, "freq_base is inf"),
        ({"rope.freq_base": float("nan")}, "freq_base is nan"),
        ({"rope.freq_base": 0.0}, "freq_base is 0.0"),
        ({"rope.scaling.type": "longrope"}, "'longrope'; known: none, linear, yarn"),
        ({"attention.layer_norm_rms_epsilon": -1e-5}, "rms_epsilon is -"),
        ({"context_length": 0}, "context_length is 0; expected 1 to"),
        ({"block_count": 0}, "block_count is 0; expected 1 to"),
        ({"block_count": 2**31}, "block_count is 2147483648; expected 1 to"),
        ({"embedding_length": 2**32}, "embedding_length is 4294967296; expected 1 to"),
        ({"nextn_predict_layers": 2}, "2 MTP layers of 2 layers leave no trunk"),
    ],
)
def test_a_number_that_kernels_cannot_take_is_refused_with_its_range(
    keys: Keys, words: str, tmp_path: Path
) -> None:
    good = written(tmp_path / "good.gguf", "qwen35moe")
    wrong = {f"qwen35moe.{key}": value for key, value in keys.items()}
    with pytest.raises(ModelFileError) as raised:
        opened(edited(good, tmp_path / "wrong.gguf", keys=wrong))
    assert words in str(raised.value)


def poisoned(value: float, where: str) -> Callable[[TensorSpec], Array]:
    def weights(spec: TensorSpec) -> Array:
        good = random_weights(spec)
        return np.full_like(good, value) if where in spec.name else good

    return weights


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
@pytest.mark.parametrize("where", ["", "norm", "ffn_gate_inp", "ssm_a", "token_embd", "output.weight"])
def test_weights_that_are_no_numbers_are_reported_or_harmless(
    value: float, where: str, tmp_path: Path, apart: Apart
) -> None:
    path = written(tmp_path / "m.gguf", "qwen35moe", {"expert_count": 64}, weights=poisoned(value, where))
    for flash_attn in ("on", "off"):
        outcome = apart.open(path, prompt=range(40), flash_attn=flash_attn)
        assert outcome.is_sound, outcome.message
        if outcome.kind == "refused":
            assert outcome.error == "BackendError"
            assert "NaN" in outcome.message


@pytest.mark.parametrize("flash_attn", ["on", "off"])
def test_a_model_that_computes_nan_leaves_the_engine_usable(tmp_path: Path, flash_attn: str) -> None:
    def weights(spec: TensorSpec) -> Array:
        good = random_weights(spec)
        if spec.name == "token_embd.weight":
            good[7] = np.nan
        return good

    path = written(tmp_path / "m.gguf", "llama", weights=weights)
    with opened(path, max_ctx=64, flash_attn=flash_attn) as engine:
        alone = engine.generate([1, 2], max_tokens=4).tokens
        for n in (0, 40):  # what follows is longer and shorter than what failed
            with pytest.raises(BackendError, match="NaN"):
                engine.generate([1, 7, *[3] * n], max_tokens=4)
            assert engine.generate([1, 2], max_tokens=4).tokens == alone
            assert np.isnan(engine.logits([1, 7, *[3] * n])).any()
            assert engine.generate([1, 2], max_tokens=4).tokens == alone


@pytest.mark.parametrize("element", ElementType)
def test_weights_of_any_type_run_or_are_refused(element: ElementType, tmp_path: Path, apart: Apart) -> None:
    rng = np.random.default_rng(5)
    for use in ("token_embd", "attn_qkv", "attn_q.", "ffn_down", "output.weight", "attn_norm", "ssm_a"):

        def change(info: TensorInfo, data: Array, use: str = use) -> NewTensor:
            if use not in info.name:
                return info.type, info.shape, data
            width = -(-info.shape[0] // element.block) * element.block
            shape = (width, *info.shape[1:])
            return (
                element,
                shape,
                rng.integers(0, 256, element.row_bytes(width) * prod(shape[1:]), dtype=np.uint8),
            )

        path = edited(QWEN35, tmp_path / f"{use}.gguf", tensors=change)
        is_multiplied = use in ("attn_qkv", "attn_q.", "ffn_down", "output.weight")
        for repack in ("on", "off") if is_multiplied else ("on",):
            outcome = apart.open(path, prompt=range(9), repack=repack)
            assert outcome.is_sound, (use, outcome.message)


@pytest.mark.parametrize("name", ["I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K"])
def test_types_that_no_kernel_multiplies_with_are_refused_by_name(name: str, tmp_path: Path) -> None:
    element = ElementType[name]
    sizes = {"embedding_length": 256}
    good = written(tmp_path / "good.gguf", "llama", sizes)

    def change(info: TensorInfo, data: Array) -> NewTensor:
        if info.name != "blk.1.ffn_up.weight":
            return info.type, info.shape, data
        n_bytes = element.row_bytes(info.shape[0]) * info.shape[1]
        return element, info.shape, np.zeros(n_bytes, np.uint8)

    with pytest.raises(UnsupportedModelError, match=rf"blk\.1\.ffn_up\.weight' has type {name.lower()}"):
        opened(edited(good, tmp_path / "m.gguf", tensors=change))


@pytest.mark.parametrize("n", [20, 32, 64, 128])
def test_every_pair_of_cache_types_runs_or_is_refused(n: int, tmp_path: Path, apart: Apart) -> None:
    sizes = {"attention.key_length": n, "attention.value_length": n, "rope.dimension_count": 2}
    path = written(tmp_path / "m.gguf", "llama", sizes)
    answers = set()
    for k in KV_TYPES:
        for v in KV_TYPES:
            for flash_attn in ("on", "off"):
                outcome = apart.open(
                    path,
                    prompt=[i % 60 for i in range(300)],
                    max_ctx=512,
                    chunk=100,
                    cache_type_k=k,
                    cache_type_v=v,
                    flash_attn=flash_attn,
                )
                assert outcome.is_sound, (k, v, flash_attn, outcome.message)
                blocks = (n % 32 != 0 and "q" in k + v) or (flash_attn == "off" and v.startswith("q"))
                assert outcome.kind == ("refused" if blocks else "ran"), (k, v, flash_attn, outcome.message)
                answers.add(outcome.tokens)
    assert len(answers) > 1


# templates


@pytest.mark.parametrize(
    ("template", "error"),
    [
        ("{{ raise_exception('no') }}", UsageError),
        ("{{ 1 / 0 }}", UsageError),
        ("{{ messages[99].content.x }}", UsageError),
        ("{{ ''.__class__.__mro__ }}", UsageError),
        ("{% for i in range(99999999) %}x{% endfor %}", UsageError),
        ("{{ 'x' * 999999999 }}", UsageError),
        ("{{ 9 ** 999999 }}", UsageError),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", UsageError),
        ("{% if %}", UnsupportedModelError),
        ("{{ messages | unknown }}", UnsupportedModelError),
        ("{% include 'x' %}", UsageError),
        ("{{ " + "(" * 5000 + ")" * 5000 + " }}", UnsupportedModelError),
    ],
)
def test_a_bad_chat_template_fails_the_chat_and_nothing_else(
    template: str, error: type[DflashError], tmp_path: Path
) -> None:
    path = edited(LLAMA, tmp_path / "m.gguf", keys={"tokenizer.chat_template": template})
    with opened(path, max_ctx=64) as engine:
        with pytest.raises(error):
            engine.chat([{"role": "user", "content": "a"}], max_tokens=1)
        assert engine.generate([1, 2], max_tokens=1, ignore_eos=True).finish_reason == "length"


def test_a_file_may_be_replaced_while_it_is_open(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    shutil.copy(LLAMA, path)
    with opened(path, max_ctx=64) as engine:
        alone = engine.generate([1, 2], max_tokens=5, ignore_eos=True).tokens
        put(path, b"gone")
        assert engine.generate([1, 2], max_tokens=5, ignore_eos=True).tokens == alone
