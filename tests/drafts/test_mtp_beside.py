"""An MTP block in a file of its own drafts as one inside its target; one for another is refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyggml_dflash import Engine, EngineOptions
from pyggml_dflash.engine.drafter_loader import make_drafter, plan_speculation
from pyggml_dflash.engine.mtp_drafter import MtpDrafter
from pyggml_dflash.errors import ModelFileError, UnsupportedModelError, UsageError
from pyggml_dflash.ggml.gguf import GgufFile, TensorInfo
from pyggml_dflash.ggml.gguf_writer import GgufWriter
from tests.drafts.drafted import MAX_WIDTH, Drafted, arrays, draft_file, open_target
from tests.engine.hostile import Array, NewTensor, edited
from tests.reference.stored import model_file
from tests.tiny import Tiny, write_tiny

EXACT = 3e-3  # of logits with a standard deviation of 4; 2e-4 was measured
MODELS = ("qwen35-tiny", "qwen35moe-tiny", "qwen4exp-tiny")


def part(
    source: Path,
    path: Path,
    *,
    block: bool,
    copies: tuple[str, ...] = (),
    names: Mapping[str, str] | None = None,
    keys: Mapping[str, Any] | None = None,
) -> Path:
    """A model's trunk, or its MTP block with copies of tensors of the trunk, as a file.

    `names`: what tensors are called instead.
    """
    writer = GgufWriter()
    with GgufFile.open(source) as file:
        name = file.get_str("general.architecture")
        n_all, n_trunk = file.get_int(f"{name}.block_count"), file.get_int(f"{name}.block_count") - 1
        changed: dict[str, Any] = {f"{name}.{key}": value for key, value in (keys or {}).items()}
        if not block:
            changed |= {f"{name}.block_count": n_trunk, f"{name}.nextn_predict_layers": None}
            listed = f"{name}.attention.recurrent_layers"
            if listed in file.metadata:
                changed[listed] = file.get_bools(listed, n=n_all)[:n_trunk]
            listed = f"{name}.attention.compress_ratios"
            if listed in file.metadata:
                changed[listed] = file.get_ints(listed, n=n_all)[:n_trunk]
        writer.copy_metadata(file, without=set(changed))
        for key, value in changed.items():
            if value is not None:
                writer.set(key, value)
        for t in file.tensors.values():
            inside = t.name.startswith(f"blk.{n_trunk}.")
            if inside == block or (block and t.name in copies):
                writer.add_raw(
                    (names or {}).get(t.name, t.name), file.data(t).copy(), shape=t.shape, element=t.type
                )
        writer.write(path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def parts(name: str, folder: Path) -> tuple[Path, Path]:
    """Trunk and block of a stored model."""
    source = model_file(name, "F32", folder)
    trunk, block = folder / f"{name}-trunk.gguf", folder / f"{name}-block.gguf"
    if not block.exists():
        part(source, trunk, block=False)
        part(source, block, block=True)
    return trunk, block


@contextmanager
def with_block(trunk: Path, block: Path) -> Iterator[Drafted]:
    """The trunk, drafted for by the block of another file."""
    options = EngineOptions(
        model=trunk,
        draft=block,
        spec_width=MAX_WIDTH,
        cache_type_k="f32",
        cache_type_v="f32",
        repack="off",
        device="CPU",
        mtp_convention="per-stream",  # the stored numbers of qwen4exp are such
    )
    with ExitStack() as stack:
        target = stack.enter_context(open_target(trunk))
        file = stack.enter_context(GgufFile.open(trunk))
        plan = plan_speculation(options, file, target.config, stack)
        assert plan is not None
        forwards = stack.enter_context(target.recording(plan.capture, "replay"))
        drafter = make_drafter(plan, options, target.backend, target.ledger, forwards, stack)
        assert isinstance(drafter, MtpDrafter)
        yield Drafted(target, forwards, drafter)


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_chains_are_the_stored_ones(folder: Path, name: str) -> None:
    z = arrays(name)
    tokens, following = z["m_tokens"].tolist(), int(z["m_next_token"][0])
    with with_block(*parts(name, folder)) as drafted:
        drafter = drafted.drafter
        assert isinstance(drafter, MtpDrafter)
        for k, logits in zip(z["m_pos"].tolist(), z["m_logits"], strict=True):
            drafted.begin()
            drafted.feed(tokens[: k + 1])
            token = tokens[k + 1] if k + 1 < len(tokens) else following
            found = drafter._step(token, drafted.target.slot.n_past, own=False)
            np.testing.assert_allclose(found, logits, rtol=0, atol=EXACT)
        drafted.begin()
        drafted.feed(tokens)
        expected = z["m_chain_tokens"].tolist()
        assert list(drafted.propose(following, len(expected)).tokens) == expected
        for i, token in enumerate([following, *expected[:-1]]):
            logits = drafter._step(token, len(tokens) + i, own=i > 0)
            np.testing.assert_allclose(logits, z["m_chain_logits"][i], rtol=0, atol=EXACT)


COPIES = ("token_embd.weight", "output_norm.weight", "output_hc_norm.weight", "output.weight")
EARLY_NAMES = {
    "blk.8.nextn.hc_head_norm.weight": "blk.8.nextn.shared_head_norm.weight",
    "blk.8.nextn.hc_head_down.weight": "output_hc_down.weight",
    "blk.8.nextn.hc_head_up.weight": "output_hc_up.weight",
}
FORMS = [
    *(("qwen35-tiny", form) for form in ("block", "block-and-copies", "whole-model")),
    *(("qwen4exp-tiny", form) for form in ("block", "block-and-copies", "whole-model", "early-names")),
]


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_tokens_and_acceptance_are_those_of_the_block_inside(
    folder: Path, tmp_path: Path, name: str, form: str
) -> None:
    source = model_file(name, "F32", folder)
    trunk, block = parts(name, folder)
    if form == "block-and-copies":
        block = part(source, tmp_path / "block.gguf", block=True, copies=COPIES)
    elif form == "early-names":
        block = part(source, tmp_path / "block.gguf", block=True, copies=COPIES, names=EARLY_NAMES)
    elif form == "whole-model":
        block = source
    results = [
        generated(name, model=source, spec="off"),
        generated(name, model=source, spec="mtp", spec_width=4),
        generated(name, model=trunk, draft=block, spec_width=4),
        generated(name, model=trunk, draft=block, spec="mtp", spec_width=4),
    ]
    assert len({tokens for tokens, _ in results}) == 1
    assert results[0][1] == "off"
    assert len({stats for _, stats in results[1:]}) == 1


def generated(name: str, **options: Any) -> tuple[tuple[int, ...], Any]:
    """Tokens of a greedy answer, and what drafting did."""
    prompt = arrays(name)["p5_tokens"].tolist()
    with Engine(EngineOptions(device="CPU", threads=1, max_ctx=512, **options)) as engine:
        result = engine.generate(prompt, max_tokens=40, ignore_eos=True)
        assert engine.info.spec == ("off" if options.get("spec") == "off" else "mtp")
        assert (engine.info.draft is None) == ("draft" not in options)
        stats = result.speculation
        return result.tokens, "off" if stats is None else (stats.drafted, stats.accepted, stats.verify_steps)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trunk, and in folders beside it models with a block, all alike but for one number."""
    return tmp_path_factory.mktemp("tiny")


def alike(folder: Path, name: str, **other: Any) -> Path:
    path = folder / name
    path.mkdir(exist_ok=True)
    return write_tiny(path, Tiny(architecture=other.pop("architecture", "qwen35"), **other))


OTHERS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("layers", {"n_layer": 6}, "its number of layers before it is 6, the target's 4"),
    ("width", {"n_embd": 128}, "its width is 128, the target's 64"),
    ("heads", {"n_head": 8}, "its heads, KV heads and head size is (8, 2, 32), the target's (4, 2, 32)"),
    ("feed-forward", {"n_ff": 128}, "its feed-forward width is 128, the target's 96"),
    ("vocabulary", {"n_vocab": 300}, "its embedding table is [64, 300], the target's [64, 264]"),
    ("family", {"architecture": "qwen35moe"}, "its architecture is qwen35moe, the target's qwen35"),
    ("positions", {"rope_dims": 16}, "its rotary positions is"),
    ("epsilon", {"metadata": {"attention.layer_norm_rms_epsilon": 1e-5}}, "its norm epsilon is"),
)


@pytest.mark.parametrize(("other", "reason"), [o[1:] for o in OTHERS], ids=[o[0] for o in OTHERS])
def test_a_block_for_another_target_is_refused_with_the_reason(
    tiny: Path, other: dict[str, Any], reason: str
) -> None:
    trunk = alike(tiny, "trunk")
    block = alike(tiny, "-".join(other), n_mtp=1, **other)
    with pytest.raises(UnsupportedModelError, match="this MTP block is for another target") as caught:
        Engine(EngineOptions(model=trunk, draft=block, device="CPU"))
    assert reason in str(caught.value)
    assert str(block) in str(caught.value)


def test_a_block_with_other_experts_is_refused(tiny: Path) -> None:
    trunk = alike(tiny, "experts", architecture="qwen35moe")
    block = alike(tiny, "fewer", architecture="qwen35moe", n_mtp=1, n_expert=2)
    with pytest.raises(UnsupportedModelError, match="its set of experts is"):
        Engine(EngineOptions(model=trunk, draft=block, device="CPU"))


STREAMS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"n_head": 8}, "its qwen4exp.attention.head_count is 8, the target's 4"),
    ({"n_stream": 2}, "its qwen4exp.hyper_connection.count is 2, the target's 4"),
    ({"low_rank": 8}, "its qwen4exp.hyper_connection.low_rank is 8, the target's 12"),
    ({"index_heads": 2}, "its qwen4exp.attention.indexer.head_count is 2, the target's 3"),
    ({"budget": 64}, "its qwen4exp.attention.indexer.top_k is 64, the target's 32"),
    ({"ratio": 8}, "its compress ratio is 8, the target's 4"),
    ({"n_expert": 8}, "its set of experts is"),
    ({"n_layer": 6}, "its number of layers before it is 6, the target's 4"),
    ({"architecture": "qwen35"}, "its architecture is qwen35, the target's qwen4exp"),
)


@pytest.mark.parametrize(("other", "reason"), STREAMS, ids=[next(iter(o[0])) for o in STREAMS])
def test_a_block_over_streams_for_another_target_is_refused(
    tiny: Path, other: dict[str, Any], reason: str
) -> None:
    trunk = alike(tiny, "streams", architecture="qwen4exp")
    block = alike(tiny, "streams-" + "-".join(other), **{"architecture": "qwen4exp", "n_mtp": 1, **other})
    with pytest.raises(UnsupportedModelError, match="this MTP block is for another target") as caught:
        Engine(EngineOptions(model=trunk, draft=block, device="CPU"))
    assert reason in str(caught.value)


def test_early_names_are_used_in_messages(folder: Path, tmp_path: Path) -> None:
    source = model_file("qwen4exp-tiny", "F32", folder)
    names = dict(EARLY_NAMES)
    block = part(source, tmp_path / "block.gguf", block=True, names=names)
    edited(block, tmp_path / "bad.gguf", tensors=cut_early_mixer)
    with pytest.raises(ModelFileError, match=r"tensor 'output_hc_up\.weight' has shape"):
        Engine(
            EngineOptions(model=parts("qwen4exp-tiny", folder)[0], draft=tmp_path / "bad.gguf", device="CPU")
        )


def cut_early_mixer(t: TensorInfo, data: Array) -> NewTensor:
    """One row of the last mixer is missing."""
    if t.name != "output_hc_up.weight":
        return t.type, t.shape, data
    n, rows = t.shape[0], t.shape[1] - 1
    return t.type, (n, rows), data[: t.type.row_bytes(n) * rows]


def test_two_blocks_are_refused(tiny: Path) -> None:
    block = alike(tiny, "two", n_mtp=2)
    with pytest.raises(UnsupportedModelError, match="2 MTP blocks; one is supported"):
        Engine(EngineOptions(model=alike(tiny, "trunk"), draft=block, device="CPU"))


def test_a_block_that_lacks_a_tensor_is_refused_before_the_model_is_loaded(tiny: Path) -> None:
    block = alike(tiny, "lacking", n_mtp=1, shapes={"blk.4.nextn.eh_proj.weight": None})
    with pytest.raises(ModelFileError, match=r"'blk\.4\.nextn\.eh_proj\.weight' is missing"):
        Engine(EngineOptions(model=alike(tiny, "trunk"), draft=block, device="CPU"))


def test_a_model_without_a_block_is_no_draft(tiny: Path) -> None:
    trunk = alike(tiny, "trunk")
    with pytest.raises(UnsupportedModelError, match="architecture 'qwen35' has no MTP block; known drafts"):
        Engine(EngineOptions(model=trunk, draft=trunk, device="CPU"))


def test_a_kind_of_draft_that_was_not_asked_for_is_refused(folder: Path) -> None:
    trunk, block = parts("qwen35-tiny", folder)
    dflash = draft_file("dflash-tiny", folder)
    for draft, spec, text in (
        (block, "dflash", "block.gguf is an MTP block; use 'mtp' or 'auto'"),
        (dflash, "mtp", "dflash-tiny-F32.gguf is a DFlash draft; use 'dflash' or 'auto'"),
    ):
        with pytest.raises(UsageError) as caught:
            Engine(EngineOptions(model=trunk, draft=draft, spec=spec, device="CPU"))  # type: ignore[arg-type]
        assert text in str(caught.value)


@pytest.mark.parametrize("name", ["qwen35-tiny", "qwen4exp-tiny"])
def test_a_block_cannot_run_as_a_model(folder: Path, name: str) -> None:
    _, block = parts(name, folder)
    with pytest.raises(UnsupportedModelError, match="it goes beside its target, as a draft"):
        Engine(EngineOptions(model=block, device="CPU"))
