"""A long chunk whose two forwards take turns on several devices gives what two chunks on one device give."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from pyggml_dflash import Engine, EngineOptions, UsageError, fit_report
from pyggml_dflash.arch.base import GraphKey
from pyggml_dflash.engine.core import EngineCore
from pyggml_dflash.engine.prompt_streams import MIN_ROWS, ONE_STREAM, TILE, PromptStreams, choose_streams
from pyggml_dflash.ggml.cut import cut_of
from pyggml_dflash.ggml.device import DeviceKind
from pyggml_dflash.plan.split import SplitKind, SplitPlan
from tests.engine.tiny import LLAMA, opened
from tests.engine.workers import Worker, workers
from tests.reference.opened import Floats, on_the_cpu, open_core
from tests.tiny import Tiny, tokens, write_tiny

CHUNK: Final = 1200
IDS: Final = tokens(1500, seed=3)  # a chunk in two streams, and a short one
EXPERTS: Final = ("qwen35moe", "qwen4exp")
TWO: Final = PromptStreams(2)


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Worker, ...]]:
    with workers(2) as started:
        yield started


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        name: write_tiny(folder, Tiny(architecture=name, n_ctx_train=2048, n_mtp=int(name in EXPERTS)))
        for name in ("llama", *EXPERTS)
    }


def apart(placement: str, pair: tuple[Worker, ...]) -> dict[str, Any]:
    """Devices of a placement."""
    near, far = pair[0].name, pair[1].name
    return {
        "experts": {"device": "CPU", "expert_device": near},
        "experts here": {"device": near, "expert_device": "CPU"},
        "two devices": {"device": None, "devices": ("CPU", near)},
        "three devices": {"device": None, "devices": ("CPU", near, far)},
    }[placement]


@pytest.mark.parametrize("n_tokens", [1, MIN_ROWS - 1, MIN_ROWS, 1025, 1200, 1535, 1536, 4096, 5000])
def test_a_long_chunk_is_divided_into_whole_tiles_and_the_rest(n_tokens: int) -> None:
    rows = TWO.rows(n_tokens)
    assert (sum(rows), ONE_STREAM.rows(n_tokens)) == (n_tokens, (n_tokens,))
    assert len(rows) == (1 if n_tokens < MIN_ROWS else 2)
    if len(rows) == 2:
        assert rows[0] % TILE == 0
        assert 0 <= rows[0] - rows[1] < 2 * TILE


@pytest.mark.parametrize("copied_from", [0, 16, 1024, 1025, 1400, 2048, 5000])
@pytest.mark.parametrize("chunk", [600, 1023, 1024, 1300, 1535, 2048, 3000])
def test_there_is_room_for_the_forwards_of_every_shorter_chunk(chunk: int, copied_from: int) -> None:
    streams = PromptStreams(2, copied_from=copied_from)
    most = streams.most_rows(chunk)
    for n in range(1, chunk + 1):
        rows = streams.rows(n)
        assert len(rows) == (2 if n >= MIN_ROWS and (n < copied_from or not copied_from) else 1)
        assert len(rows) <= len(most)
        assert all(some <= room for some, room in zip(rows, most, strict=False))


@pytest.mark.parametrize(
    ("kinds", "split", "n"),
    [
        (("gpu", "gpu"), "layers", 2),
        (("gpu", "gpu", "gpu"), "layers", 2),
        (("gpu", "cpu"), "layers", 1),
        (("cpu", "rpc"), "layers", 1),
        (("gpu", "gpu"), "experts", 1),
        (("gpu", "cpu"), "experts", 1),
        (("gpu",), "none", 1),
    ],
)
def test_auto_divides_large_chunks_where_gpus_share_the_layers(
    kinds: tuple[DeviceKind, ...], split: SplitKind, n: int
) -> None:
    plan = SplitPlan(kind=split, devices=tuple(f"{kind}{i}" for i, kind in enumerate(kinds)), layers=(0,) * 4)
    streams = choose_streams(EngineOptions(model=LLAMA), plan, kinds, 0)
    assert [len(streams.rows(rows)) for rows in (1024, 2047, 2048, 4096)] == [1, 1, n, n]
    assert len(streams.most_rows(2047)) == 1
    assert len(streams.most_rows(2048)) == n


def in_two(core: EngineCore) -> Floats:
    """Logits behind a prompt whose first chunk is computed as two."""
    slot = core.slots[0]
    slot.reset()
    starts = [0, *np.cumsum(TWO.rows(CHUNK))]
    for start, end in zip(starts, [*starts[1:], len(IDS)], strict=True):
        logits = core.prefill(slot, IDS[start:end], last=end == len(IDS))
    assert logits is not None
    return logits.copy()


def in_chunks(core: EngineCore) -> Floats:
    slot = core.slots[0]
    slot.reset()
    core.prefill(slot, IDS[:CHUNK], last=False)
    logits = core.prefill(slot, IDS[CHUNK:], last=True)
    assert logits is not None
    return logits.copy()


@pytest.mark.parametrize(
    ("model", "placement"),
    [
        ("llama", "three devices"),
        ("qwen35moe", "experts"),
        ("qwen4exp", "experts here"),
        pytest.param("qwen35moe", "experts here", marks=pytest.mark.slow),
        pytest.param("qwen35moe", "two devices", marks=pytest.mark.slow),
        pytest.param("qwen4exp", "experts", marks=pytest.mark.slow),
        pytest.param("qwen4exp", "two devices", marks=pytest.mark.slow),
    ],
)
def test_two_streams_over_several_devices_are_two_chunks_on_one(
    models: dict[str, Path], pair: tuple[Worker, ...], model: str, placement: str
) -> None:
    options = on_the_cpu(models[model], chunk=CHUNK)
    first = pair[0].name if placement == "experts here" else "CPU"
    with open_core(replace(options, device=first)) as core:
        expected = in_two(core)
    with open_core(replace(options, prompt_streams=2, **apart(placement, pair))) as core:
        np.testing.assert_array_equal(in_chunks(core), expected)
        whole = core.logits(IDS[:CHUNK])
        assert whole.shape[0] == CHUNK
    with open_core(replace(options, prompt_streams=1, **apart(placement, pair))) as core:
        np.testing.assert_allclose(whole, core.logits(IDS[:CHUNK]), atol=1e-5)


def test_in_every_beat_but_the_outer_ones_two_devices_work(
    models: dict[str, Path], pair: tuple[Worker, ...]
) -> None:
    options = on_the_cpu(models["qwen35moe"], chunk=CHUNK)
    with open_core(replace(options, prompt_streams=2, **apart("experts", pair))) as core:
        builder = core._forwards.builder(GraphKey(n_tokens=CHUNK, n_kv=1280, slot=0, output="last"))
        try:
            cut = cut_of(builder)
            assert cut is not None
            beats: dict[int, list[int]] = {}
            for part in cut.parts:
                beats.setdefault(part.beat, []).append(part.backend)
        finally:
            builder.close()
    n_layer = core._forwards.model.config.n_layer
    together = [[1, 0], [0, 1]] * n_layer  # the first forward ends with the mixer of the last layer
    assert [beats[beat] for beat in sorted(beats)] == [[0], *together[: 2 * n_layer - 2], [0], [1], [0]]


@pytest.mark.parametrize("model", ["qwen35moe", pytest.param("qwen4exp", marks=pytest.mark.slow)])
def test_drafts_and_text_do_not_depend_on_streams(
    models: dict[str, Path], pair: tuple[Worker, ...], model: str
) -> None:
    def answer(**options: Any) -> tuple[tuple[int, ...], int]:
        with opened(models[model], chunk=CHUNK, repack="off", **options) as engine:
            result = engine.generate(IDS, max_tokens=24, ignore_eos=True)
        return result.tokens, 0 if result.speculation is None else result.speculation.drafted

    plain, _ = answer()
    for streams in (1, 2):
        text, n_drafted = answer(**apart("experts", pair), prompt_streams=streams, spec="mtp", spec_width=4)
        assert (text, n_drafted > 0) == (plain, True)


def test_several_slots_in_two_streams_answer_as_one(
    models: dict[str, Path], pair: tuple[Worker, ...]
) -> None:
    prompts = [IDS, tokens(20, seed=1), tokens(1100, seed=2)]
    options: dict[str, Any] = {**apart("experts", pair), "prompt_streams": 2, "chunk": CHUNK}
    found = []
    for slots in (1, 3):
        with opened(models["qwen35moe"], slots=slots, **options) as engine:
            streams = [engine.stream(prompt, max_tokens=12, ignore_eos=True) for prompt in prompts]
            found.append([stream.result.tokens for stream in streams])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("model", "placement"),
    [
        ("qwen35moe", "two devices"),
        ("qwen4exp", "experts"),
        pytest.param("qwen35moe", "experts", marks=pytest.mark.slow),
        pytest.param("qwen4exp", "two devices", marks=pytest.mark.slow),
    ],
)
def test_what_two_streams_take_is_planned(
    models: dict[str, Path], pair: tuple[Worker, ...], model: str, placement: str
) -> None:
    plain: dict[str, Any] = {"repack": "off", "fit_margin": "0%", "prefix_cache_max_mib": 0}
    options = replace(
        on_the_cpu(models[model], chunk=CHUNK),
        prompt_streams=2,
        max_ctx=1280,
        spec="off",
        **plain,
        **apart(placement, pair),
    )
    planned = {share.device: sum(share.terms.values()) for share in fit_report(options).devices}
    with Engine(replace(options, device_cap=planned)) as engine:
        for n in (MIN_ROWS - 1, MIN_ROWS, CHUNK):
            engine.generate(tokens(n, seed=n), max_tokens=2, ignore_eos=True)
        peaks = engine.stats().peak_bytes
    for device, n_bytes in planned.items():
        assert 0.9 * n_bytes <= peaks[device] <= n_bytes


def test_one_device_has_nobody_to_take_turns_with_nor_to_send_rows_to() -> None:
    with pytest.raises(UsageError, match="prompt_streams is 2, but CPU has the whole model"):
        opened(LLAMA, prompt_streams=2)
    with pytest.raises(UsageError, match="link_type is 'f16', but CPU has the whole model"):
        opened(LLAMA, link_type="f16")


def test_chunks_that_are_never_divided_are_told(
    models: dict[str, Path], pair: tuple[Worker, ...], caplog: pytest.LogCaptureFixture
) -> None:
    told = "prompts are read 512 rows at a time"
    for streams, chunk in ((2, 512), (2, 1024), (1, 512)):
        with opened(models["llama"], prompt_streams=streams, chunk=chunk, **apart("two devices", pair)):
            assert (told in caplog.text) == (streams == 2 and chunk == 512)
        caplog.clear()
