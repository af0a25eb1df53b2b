"""Which drafter an engine gets, what it costs in memory, and what becomes of one that does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from pyggml_dflash import (
    ContextFitError,
    DamagedFileError,
    DeviceMemoryError,
    UnsupportedModelError,
    UsageError,
)
from pyggml_dflash.engine.fit_report import fit_report
from pyggml_dflash.engine.spec_choice import DEFAULT_DRAFT, DEFAULT_MODEL
from pyggml_dflash.ggml.arena import TensorArena
from pyggml_dflash.ggml.gguf import TensorInfo
from pyggml_dflash.options import EngineOptions
from tests.engine.hostile import Array, NewTensor, edited
from tests.engine.tiny import LLAMA, QWEN35, opened
from tests.tiny import Tiny, write_tiny

HEADS = "blk.8.nextn.eh_proj.weight"  # of the MTP block in QWEN35


def without_heads(path: Path) -> Path:
    """A file that promises an MTP block and lacks a part of it, as some converters leave it."""

    def keep(info: TensorInfo, data: Array) -> NewTensor | None:
        return None if info.name == HEADS else (info.type, info.shape, data)

    return edited(QWEN35, path, tensors=keep)


# what is found


def test_the_shipped_model_uses_the_shipped_draft() -> None:
    for model in (None, DEFAULT_MODEL):
        with opened(model, max_ctx=64, spec="auto") as engine:
            info = engine.info
            assert info.draft is not None
            assert (info.spec, info.draft.path, info.spec_reason) == ("dflash", DEFAULT_DRAFT, None)
            assert engine.info.max_width == 8


def test_a_file_with_an_mtp_block_uses_it() -> None:
    with opened(QWEN35, max_ctx=64, spec="auto") as engine:
        assert (engine.info.spec, engine.info.draft, engine.info.spec_reason) == ("mtp", None, None)


def test_a_file_without_one_decodes_plainly_and_says_why() -> None:
    with opened(LLAMA, max_ctx=64, spec="auto") as engine:
        assert (engine.info.spec, engine.info.max_width) == ("off", 1)
        assert engine.info.spec_reason == "no draft was given and the file has no MTP block"


def test_off_is_off() -> None:
    for options in ({}, {"draft": DEFAULT_DRAFT}):
        with opened(None, max_ctx=64, spec="off", **options) as engine:
            assert (engine.info.spec, engine.info.draft) == ("off", None)
            assert engine.info.spec_reason == "speculation is switched off"


def test_a_drafter_that_is_named_wins_over_the_one_found() -> None:
    with opened(None, max_ctx=64, spec="mtp") as engine:
        assert engine.info.spec == "mtp"
    with opened(None, max_ctx=64, spec="dflash") as engine:
        assert engine.info.spec == "dflash"
    with pytest.raises(UsageError, match="spec is 'dflash'; it needs a draft"):
        opened(QWEN35, spec="dflash")


def test_an_incomplete_mtp_block_is_left_out_unless_it_is_named(tmp_path: Path) -> None:
    path = without_heads(tmp_path / "bare.gguf")
    with opened(path, max_ctx=64, spec="auto") as engine:
        assert engine.info.spec == "off"
        assert HEADS in str(engine.info.spec_reason)
    with pytest.raises(DamagedFileError, match=HEADS):
        opened(path, spec="mtp")


def test_more_mtp_blocks_than_one_are_left_out_unless_they_are_named(tmp_path: Path) -> None:
    path = edited(
        QWEN35,
        tmp_path / "two.gguf",
        keys={"qwen35.block_count": 10, "qwen35.nextn_predict_layers": 2},
        without=("qwen35.attention.recurrent_layers",),
    )
    with opened(path, max_ctx=64, spec="auto") as engine:
        assert "2 MTP blocks; one is supported" in str(engine.info.spec_reason)
    with pytest.raises(UnsupportedModelError, match="2 MTP blocks"):
        opened(path, spec="mtp")


def test_a_width_beyond_the_drafts_block_is_refused() -> None:
    with pytest.raises(UsageError, match="spec_width is 9; this draft was trained for blocks of 8"):
        opened(None, spec_width=9, spec="auto")


# whether there is room for it

# A model, and what 'auto' finds for it.
FOUND = pytest.mark.parametrize(("model", "spec"), [(None, "dflash"), (QWEN35, "mtp")])


FIXED: dict[str, Any] = {"max_ctx": 1024, "chunk": 64, "fit_margin": "0", "prefix_cache_max_mib": 0}


def required(model: Path | None, spec: Any) -> int:
    """Bytes that an engine is planned to take, without headroom."""
    options = EngineOptions(model=model, device="CPU", threads=1, spec=spec, **FIXED)
    return sum(fit_report(options).devices[0].terms.values())


def between(model: Path | None, spec: Any) -> dict[str, int]:
    """A cap that has room for the model, but not for what drafts."""
    without, with_it = required(model, "off"), required(model, spec)
    assert without < with_it
    return {"CPU": (without + with_it) // 2}


@FOUND
def test_a_drafter_that_does_not_fit_is_left_out_and_the_reason_told(
    model: Path | None, spec: str, caplog: pytest.LogCaptureFixture
) -> None:
    cap = between(model, spec)
    with opened(model, spec="auto", device_cap=cap, **FIXED) as engine:
        assert (engine.info.spec, engine.info.draft, engine.info.rollback) == ("off", None, None)
        reason = str(engine.info.spec_reason)
        assert reason.startswith("drafting would take ")
        assert reason.endswith(f" more than --device-cap CPU={cap['CPU']}B leaves")
        result = engine.generate([1, 2, 3], max_tokens=4, ignore_eos=True)
        assert not {"draft cache", "draft weights", "speculation record"} & set(engine.memory()["CPU"])
    assert (result.speculation, result.plain_reason) == (None, reason)
    assert reason in caplog.text
    options = EngineOptions(model=model, device="CPU", threads=1, device_cap=cap, **FIXED)
    assert (fit_report(options).spec, fit_report(options).fits) == ("off", True)


@pytest.mark.parametrize(("model", "spec"), [(None, "dflash"), (None, "mtp"), (QWEN35, "mtp")])
def test_a_drafter_that_is_named_and_does_not_fit_is_refused(
    model: Path | None, spec: Literal["dflash", "mtp"]
) -> None:
    cap = between(model, spec)
    draft = {"draft": DEFAULT_DRAFT} if spec == "dflash" else {"spec": "mtp"}
    for named in ({"spec": spec}, draft) if model is None else ({"spec": spec},):
        with pytest.raises(ContextFitError) as raised:
            opened(model, device_cap=cap, **FIXED, **named)
        assert raised.value.exit_code == 4
        assert str(raised.value).startswith("context 1024 with drafting needs ")
        assert "; --spec off needs less; context 1024 needs --device-cap CPU=" in str(raised.value)
    with opened(model, spec="off", device_cap=cap, **FIXED) as engine:
        assert engine.info.spec == "off"


@FOUND
def test_a_model_that_does_not_fit_alone_is_refused_without_a_word_of_drafts(
    model: Path | None, spec: str
) -> None:
    cap = {"CPU": required(model, "off") // 2}
    with pytest.raises(ContextFitError) as raised:
        opened(model, spec="auto", device_cap=cap, **FIXED)
    assert "drafting" not in str(raised.value)


@FOUND
@pytest.mark.parametrize("label", ["draft cache", "speculation record"])
def test_an_allocation_that_fails_leaves_out_a_drafter_that_nobody_named(
    model: Path | None, spec: Any, label: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate = TensorArena.allocate

    def failing(self: TensorArena, *, zero: bool = False) -> None:
        if self.label == label and not self._ledger.dry:
            raise DeviceMemoryError(what=label, wanted=1, free=0, device="CPU")
        allocate(self, zero=zero)

    monkeypatch.setattr(TensorArena, "allocate", failing)
    with opened(model, max_ctx=256, spec="auto") as engine:
        assert engine.info.spec == "off"
        assert engine.info.spec_reason == f"CPU: no room for {label} (1 B wanted, 0 B free)"
        assert label not in engine.memory()["CPU"]
        answer = engine.generate([1, 2, 3], max_tokens=4, ignore_eos=True).tokens
    with pytest.raises(DeviceMemoryError, match=label):
        opened(model, max_ctx=256, spec=spec)
    monkeypatch.undo()
    with opened(model, max_ctx=256) as engine:
        assert engine.generate([1, 2, 3], max_tokens=4, ignore_eos=True).tokens == answer


# options that nothing reads


@pytest.mark.parametrize(
    ("model", "options", "told"),
    [
        (LLAMA, {"spec_width": 4}, "spec_width is 4, but nothing drafts"),
        (QWEN35, {"spec_width": 4, "spec": "off"}, "spec_width is 4, but nothing drafts"),
        (QWEN35, {"spec_width": 4}, None),
        (LLAMA, {"spec_width": "auto"}, None),
        (
            QWEN35,
            {"mtp_convention": "per-stream"},
            "mtp_convention is 'per-stream', but there is no MTP block",
        ),
        (None, {"mtp_convention": "per-stream"}, None),
        (None, {"mtp_convention": "llama.cpp", "spec": "off"}, "mtp_convention is 'llama.cpp', but"),
        (
            LLAMA,
            {"draft": Path("no/draft.gguf"), "spec": "off"},
            "draft is 'no/draft.gguf', but spec is 'off'",
        ),
        (LLAMA, {"draft_causal": "all", "spec": "off"}, "draft_causal is 'all', but spec is 'off'"),
        (
            LLAMA,
            {"expert_budget_mib": 9},
            "expert_budget_mib is 9, but no experts are copied: pass expert_pl",
        ),
        (LLAMA, {"kv_cache_budget": 9}, "kv_cache_budget is 9, but no state gets a file: pass kv_cache_dir"),
        (LLAMA, {"kv_cache_min_tokens": 9}, "kv_cache_min_tokens is 9, but no state gets a file"),
    ],
)
def test_options_that_nothing_reads_are_told(
    model: Path | None,
    options: dict[str, Any],
    told: str | None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = model or write_tiny(tmp_path, Tiny(architecture="qwen4exp", n_mtp=1))
    with opened(model, max_ctx=64, **{"spec": "auto", **options}) as engine:
        assert engine.generate([5, 6, 7], max_tokens=2, ignore_eos=True).tokens
    found = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(found) == (told is not None), found
    assert told is None or found[0].startswith(told)
