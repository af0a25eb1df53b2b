"""What stored states are to a caller: less work, the same answers, bounded memory, reports of all of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pyggml_dflash import Engine, GenerationResult, Progress, UsageError, fit_report
from pyggml_dflash.options import EngineOptions
from tests.engine.apart import program
from tests.engine.tiny import LLAMA, QWEN3, QWEN35, opened, prompt
from tests.reference.stored import model_file
from tests.tiny import Tiny, tokens, write_tiny

CHUNK = 64
START, END, LINE = 755, 756, 10  # of the tiny Qwen3.5
SHORT: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True}


def turn(role: int, n: int, seed: int) -> list[int]:
    return [START, role, LINE, *prompt(n, seed=seed), END, LINE]


def question(*turns: list[int]) -> list[int]:
    """Turns, and the beginning of the answer."""
    return [*(token for turn in turns for token in turn), START, 3, LINE]


def qwen(**options: Any) -> Engine:
    return opened(QWEN35, **{"max_ctx": 1024, "chunk": CHUNK, **options})


@pytest.fixture(scope="module")
def plain() -> Iterator[Engine]:
    with qwen(prefix_cache_max_mib=0) as engine:
        yield engine


def same(found: GenerationResult, cold: GenerationResult) -> bool:
    return (found.tokens, found.text) == (cold.tokens, cold.text)


# what callers are told


def test_a_result_says_what_was_reused_and_why_it_was_not_more() -> None:
    head, others = turn(1, 100, 1), [question(turn(1, 100, 1), turn(2, 30, seed)) for seed in (2, 3)]
    with qwen() as engine:
        results = [engine.generate(text, **SHORT) for text in (*others, others[0])]
        found = [result.reuse for result in results]
        assert all(reuse is not None for reuse in found)
        assert [(r.stop, r.tier) for r in found if r] == [
            ("nothing stored", None),
            ("end of what is stored", "memory"),
            ("end of what is stored", "memory"),
        ]
        assert [r.n_reused for r in found if r] == [0, len(head) + 1, len(head) + 1]
        assert [r.usage.cached_tokens for r in results] == [r.n_reused for r in found if r]
        stats = engine.stats().snapshots
        assert stats is not None
        assert stats.misses == {"nothing stored": 1}
        assert stats.hits == {"memory": 2}
        assert stats.prompt_tokens == sum(len(text) for text in (*others, others[0]))
        assert stats.reused_tokens == 2 * (len(head) + 1)
        assert stats.captured == 1
        assert (stats.restored, stats.capture_failures) == (2, {})
        (stored,) = engine.snapshots.list()
        assert stored.tokens == tuple(others[0][: len(head) + 1])
        assert (stored.n_past, stored.n_bytes) == (len(head) + 1, stats.n_bytes)
        assert engine.memory()["CPU"]["snapshots"] <= stored.n_bytes
        engine.snapshots.clear()
        assert engine.snapshots.list() == ()
        assert "snapshots" not in engine.memory()["CPU"]


def test_progress_begins_where_the_stored_state_ends() -> None:
    text = question(turn(1, 200, 1), turn(2, 100, 2))
    with qwen() as engine:
        engine.generate(text, **SHORT)
        seen: list[Progress] = []
        result = engine.generate(text, progress=seen.append, **SHORT)
        assert seen[0].done == result.usage.cached_tokens > 0
        assert seen[-1].done == seen[-1].total == len(text)


def test_without_cache_prompt_nothing_is_looked_up_and_nothing_stored(plain: Engine) -> None:
    text = question(turn(1, 100, 1), turn(2, 30, 2))
    with qwen() as engine:
        assert engine.generate(text, cache_prompt=False, **SHORT).reuse is None
        assert engine.snapshots.list() == ()
        engine.generate(text, **SHORT)
        before = engine.stats().snapshots
        result = engine.generate(text, cache_prompt=False, **SHORT)
        assert engine.stats().snapshots == before
        assert (result.usage.cached_tokens, result.reuse) == (0, None)
        assert same(result, plain.generate(text, **SHORT))


def test_the_state_of_a_head_that_many_share_is_kept_longer() -> None:
    text = question(turn(1, 100, 1), turn(2, 30, 2), turn(3, 30, 2), turn(2, 30, 3))

    async def ask(engine: Engine, *, keep_head: bool) -> None:
        async for _ in await engine.submit(text, keep_head=keep_head, **SHORT):
            pass

    with qwen() as engine:
        for keep_head, expected in ((True, [106, 176]), (False, [176])):
            asyncio.run(ask(engine, keep_head=keep_head))
            stored = engine.snapshots.list()
            assert [s.n_past for s in stored] == expected
            assert [s.protected for s in stored] == [keep_head, False][: len(stored)]
            engine.snapshots.clear()


def test_an_engine_without_states_says_so(plain: Engine) -> None:
    plain.generate(prompt(200), **SHORT)
    assert plain.snapshots.list() == ()
    plain.snapshots.clear()
    assert plain.stats().snapshots is None
    with pytest.raises(UsageError, match="kv_cache_dir is None"):
        plain.snapshots.flush()


# the same answers


def test_a_prompt_that_goes_on_does_not_change_what_follows() -> None:
    """Two unrelated calls, the second one beginning like the first (B47)."""
    texts = ["Hello", "Hello, again! " * 30, "Hello, again! " * 30 + "And again.", "Hello"]
    with qwen() as engine:
        for text in texts:
            found = engine.generate(text, **SHORT)
            with qwen() as fresh:
                assert same(found, fresh.generate(text, **SHORT))


def test_the_computed_part_of_a_cancelled_prompt_is_continued(plain: Engine) -> None:
    """B42: and the slot is free for others at once."""
    text = prompt(600)
    with qwen() as engine:
        stream = engine.stream(text, progress=lambda p: stream.cancel() if p.done >= 4 * CHUNK else None)
        assert stream.result.finish_reason == "cancelled"
        found = engine.generate(text, **SHORT)
        assert found.usage.cached_tokens >= 4 * CHUNK
        assert same(found, plain.generate(text, **SHORT))


@pytest.mark.parametrize("n_shared", [100, 480])
def test_a_beginning_that_raw_prompts_share_is_found_by_the_second_and_continued_by_the_third(
    plain: Engine, n_shared: int
) -> None:
    """B22: a state exists where one was stored, so the second is told how much was common and stores one."""
    texts = [[*prompt(n_shared), *prompt(200, seed=seed)] for seed in (2, 3, 4)]
    with qwen() as engine:
        found = [engine.generate(text, **SHORT) for text in texts]
        reuse = [result.reuse for result in found if result.reuse is not None]
        assert [(r.stop, r.n_common) for r in reuse] == [
            ("nothing stored", 0),
            ("no snapshot between", n_shared),
            ("no snapshot between", n_shared),
        ]
        assert [r.n_reused for r in reuse[:2]] == [0, 0]
        assert n_shared - CHUNK < reuse[2].n_reused <= n_shared
        for text, result in zip(texts, found, strict=True):
            assert same(result, plain.generate(text, **SHORT))


@pytest.mark.parametrize("n_shared", [100, 480])
@pytest.mark.parametrize("model", [LLAMA, QWEN3], ids=["llama", "qwen3"])
def test_attention_alone_continues_a_beginning_that_raw_prompts_share_at_once(
    model: Path, n_shared: int
) -> None:
    """B22: a state has the rows of every end of a forward before its own."""
    texts = [[*prompt(n_shared), *prompt(200, seed=seed)] for seed in (2, 3)]
    with opened(model, max_ctx=1024, chunk=CHUNK) as engine:
        for text, n_cached in zip(texts, (0, n_shared - n_shared % CHUNK), strict=True):
            found = engine.generate(text, **SHORT)
            assert found.usage.cached_tokens == n_cached
            assert same(found, engine.generate(text, cache_prompt=False, **SHORT))
        assert found.reuse is not None
        assert (found.reuse.n_common, found.reuse.stop) == (n_shared, "differs")


@pytest.mark.parametrize("n", [100, 480])
def test_a_raw_prompt_that_goes_on_is_continued_at_once(plain: Engine, n: int) -> None:
    """B22, too: all but its last forward."""
    longer = [*prompt(n), *prompt(30, seed=2)]
    with qwen() as engine:
        engine.generate(prompt(n), **SHORT)
        found = engine.generate(longer, **SHORT)
        assert found.usage.cached_tokens >= n - CHUNK
        assert same(found, plain.generate(longer, **SHORT))


@pytest.mark.parametrize("n_new", [1, 40])
def test_drafts_are_as_good_behind_a_stored_state_as_behind_a_cold_one(n_new: int) -> None:
    """B10: what the drafter knows is stored, too."""
    first = question(turn(1, 150, 1), turn(2, 90, 2))
    text = [*first, *prompt(n_new, seed=3)]
    drafting: dict[str, Any] = {"spec": "mtp", "spec_width": 3}
    with qwen(**drafting) as engine:
        engine.generate(first, **SHORT)
        found = engine.generate(text, max_tokens=60, ignore_eos=True)
        cold = engine.generate(text, max_tokens=60, ignore_eos=True, cache_prompt=False)
        assert found.usage.cached_tokens > 150
        assert same(found, cold)
        assert found.speculation is not None
        assert cold.speculation is not None
        assert found.speculation.verify_steps == cold.speculation.verify_steps
        assert found.speculation.accepted == cold.speculation.accepted
        stats = engine.stats().snapshots
        assert stats is not None
        assert stats.without_drafter == 0


def test_a_state_that_lacks_the_drafters_part_is_continued_plainly_and_the_result_says_why() -> None:
    first = question(turn(1, 150, 1), turn(2, 90, 2))
    with qwen(spec="mtp", spec_width=3) as engine:
        engine.generate(first, spec="off", **SHORT)
        found = engine.generate(first, **SHORT)
        assert found.usage.cached_tokens > 150
        assert (found.speculation, found.plain_reason) == (
            None,
            "the state that was continued has nothing of the drafter's",
        )
        assert same(found, engine.generate(first, cache_prompt=False, **SHORT))
        again = engine.generate(prompt(50, seed=9), **SHORT)  # the drafter is free
        assert again.speculation is not None


def test_little_room_skips_captures_and_changes_no_answer(plain: Engine) -> None:
    """B21: four slots, room for a state and a half; captured in one slot, restored into others."""
    texts = [question(turn(1, 40 + 30 * (i % 3), 1), turn(2, 30, i)) for i in range(9)]
    with qwen(slots=4) as engine:
        size = engine.generate(texts[2], **SHORT) and engine.snapshots.list()[0].n_bytes
        engine.snapshots.clear()

        def shrink(core: Any, _: object) -> None:
            core.reuse.limit(3 * size // 2)

        engine._thread.call(shrink)
        for _ in range(2):
            streams = [engine.stream(text, **SHORT) for text in texts]
            for text, stream in zip(texts, streams, strict=True):
                assert same(stream.result, plain.generate(text, **SHORT))
        stats = engine.stats().snapshots
        assert stats is not None
        assert stats.n_bytes <= stats.limit_bytes == 3 * size // 2
        assert stats.evicted + stats.superseded + sum(stats.capture_skips.values()) > 0
        assert stats.restored > 0
        assert stats.capture_failures == {}


def test_captures_that_fail_are_counted_and_harmless(plain: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyggml_dflash.errors import DeviceMemoryError
    from pyggml_dflash.ggml.arena import TensorArena

    allocate = TensorArena.allocate

    def failing(self: TensorArena, *, zero: bool = False) -> None:
        if self.label == "snapshots":
            raise DeviceMemoryError(what="snapshots", wanted=1, free=0, device="CPU")
        allocate(self, zero=zero)

    text = question(turn(1, 100, 1), turn(2, 30, 2))
    with qwen() as engine:
        monkeypatch.setattr(TensorArena, "allocate", failing)
        for _ in range(2):
            assert same(engine.generate(text, **SHORT), plain.generate(text, **SHORT))
        stats = engine.stats().snapshots
        assert stats is not None
        assert (stats.n_states, stats.capture_failures) == (0, {"allocation failed": 2})


# memory


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stored")
    for architecture in ("llama", "qwen35"):
        write_tiny(
            path, Tiny(architecture=architecture, n_ctx_train=1280, n_mtp=int(architecture == "qwen35"))
        )
    return path


@pytest.mark.parametrize(("name", "spec"), [("llama", "off"), ("qwen35", "off"), ("qwen35", "mtp")])
@pytest.mark.parametrize("slots", [1, 3])
def test_a_context_that_is_found_leaves_room_for_a_state_per_slot(
    folder: Path, name: str, spec: Any, slots: int
) -> None:
    model = folder / f"{name}.gguf"
    chosen: dict[str, Any] = {"max_ctx": "auto", "chunk": 64, "slots": slots, "spec": spec, "fit_margin": "0"}
    options = EngineOptions(model=model, device="CPU", threads=1, **chosen)
    terms = dict(fit_report(options).devices[0].terms)
    state_bytes = terms.pop("snapshots") // (2 * slots + 1)
    cap = {"CPU": sum(terms.values()) + slots * state_bytes // 2}
    assert fit_report(replace(options, device_cap=cap, prefix_cache_max_mib=0)).n_ctx == 1280
    with opened(model, device_cap=cap, **chosen) as engine:
        report = engine.fit_report()
        assert report.n_ctx < 1280
        streams = [
            engine.stream(tokens(report.n_ctx - 7, seed=i % (slots + 1)), max_tokens=8, ignore_eos=True)
            for i in range(3 * slots)
        ]
        for stream in streams:
            assert len(stream.result.tokens) == 8
        stats = engine.stats()
        assert stats.snapshots is not None
        assert stats.snapshots.n_bytes <= stats.snapshots.limit_bytes == report.devices[0].terms["snapshots"]
        assert stats.snapshots.captured >= slots
        assert stats.snapshots.capture_failures == {}
        assert stats.peak_bytes["CPU"] <= cap["CPU"]


def test_a_context_that_is_given_comes_before_states(folder: Path) -> None:
    model = folder / "llama.gguf"
    options = EngineOptions(
        model=model, max_ctx=1024, device="CPU", threads=1, fit_margin="0", prefix_cache_max_mib=0
    )
    cap = {"CPU": sum(fit_report(options).devices[0].terms.values()) + 1000}
    with opened(model, max_ctx=1024, device_cap=cap, fit_margin="0") as engine:
        assert engine.info.n_ctx == 1024
        for _ in range(2):
            engine.generate(tokens(700, seed=1), **SHORT)
        stats = engine.stats().snapshots
        assert stats is not None
        assert stats.limit_bytes <= 1000
        assert (stats.n_states, stats.capture_skips) == (0, {"no room within the limits": 2})


# a folder

SAVING = """
import os, signal, sys
from pathlib import Path
from tests.engine.tiny import QWEN35, opened
ids = [int(t) for t in sys.argv[2].split()]
engine = opened(QWEN35, max_ctx=1024, chunk=64, kv_cache_dir=sys.argv[1], kv_cache_min_tokens=1)
engine.generate(ids, max_tokens=4)
print(engine.snapshots.flush(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_was_saved_is_continued_by_another_process(plain: Engine, tmp_path: Path) -> None:
    """B17, B23: saved, killed, and continued in a new process: by the folder once, then by memory."""
    text = question(turn(1, 200, 1), turn(2, 100, 2))
    done = program(SAVING, tmp_path / "states", " ".join(map(str, text)))
    assert (done.returncode, done.stdout.strip()) == (-9, "2")
    longer = [*text, *prompt(5, seed=7)]
    with qwen(kv_cache_dir=tmp_path / "states", kv_cache_min_tokens=1) as engine:
        found = [engine.generate(longer, **SHORT) for _ in range(2)]
        assert [result.reuse.tier for result in found if result.reuse] == ["disk", "memory"]
        for result in found:
            assert len(longer) - result.usage.cached_tokens <= 5 + 3 + CHUNK
            assert same(result, plain.generate(longer, **SHORT))
        stats = engine.stats().snapshots
        assert stats is not None
        assert stats.folder is not None
        assert stats.hits == {"disk": 1, "memory": 1}
        assert (stats.folder.loaded, stats.folder.failed) == (1, {})


def test_closing_saves_what_the_folder_lacks(tmp_path: Path) -> None:
    text = prompt(900)
    for n_cached in (0, 896):
        with qwen(kv_cache_dir=tmp_path) as engine:
            assert engine.generate(text, **SHORT).usage.cached_tokens == n_cached


def test_a_state_comes_back_from_the_folder_where_memory_is_full(plain: Engine, tmp_path: Path) -> None:
    texts = [prompt(300, seed=seed) for seed in range(6)]
    with qwen(kv_cache_dir=tmp_path, kv_cache_min_tokens=1, prefix_cache_max_mib=1) as engine:
        for text in texts:
            engine.generate(text, **SHORT)
        stats = engine.stats().snapshots
        assert stats is not None
        assert stats.evicted > 0
        for text in texts * 2:
            result = engine.generate(text, **SHORT)
            assert result.reuse is not None
            assert result.reuse.tier is not None, result.reuse
            assert same(result, plain.generate(text, **SHORT))
        stats = engine.stats().snapshots
        assert stats is not None
        assert stats.unusable == {}
        assert stats.hits["disk"] >= 6
        assert engine.memory()["CPU"]["snapshots"] <= stats.n_bytes <= stats.limit_bytes == 2**20


@pytest.mark.parametrize("element", ["F32", "Q8_0"])
def test_states_are_continued_by_engines_that_round_alike(element: str, tmp_path: Path) -> None:
    """Lone rows of F32 weights are padded where there are several slots, and come out otherwise."""
    path = model_file("qwen35-tiny", element, tmp_path)
    text = prompt(40)
    options: dict[str, Any] = {"max_ctx": 256, "chunk": 1}
    found = []
    for slots in (1, 4):
        with opened(
            path, slots=slots, kv_cache_dir=tmp_path / "states", kv_cache_min_tokens=1, **options
        ) as engine:
            result = engine.generate(text, **SHORT)
            found.append((engine.info.decode_mode, result.usage.cached_tokens))
        with opened(path, slots=slots, **options, prefix_cache_max_mib=0) as cold:
            assert same(result, cold.generate(text, **SHORT))
    rounds_alike = found[1][0] == "batched"
    assert found == [("single", 0), (found[1][0], 39 if rounds_alike else 0)]


def test_a_folder_of_another_model_or_chunk_is_a_miss(tmp_path: Path) -> None:
    text = prompt(900)
    for options in ({}, {"chunk": 32}, {"cache_type_k": "f32"}, {"flash_attn": "off"}):
        with qwen(kv_cache_dir=tmp_path, **options) as engine:
            result = engine.generate(text, **SHORT)
            assert result.usage.cached_tokens == 0
    with opened(LLAMA, max_ctx=1024, chunk=CHUNK, kv_cache_dir=tmp_path) as engine:
        assert engine.generate(text, **SHORT).usage.cached_tokens == 0


def test_a_folder_that_cannot_be_used_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")

    def fail(_: object) -> None:
        raise AssertionError("it began to load")

    for bad in (tmp_path / "file" / "states", tmp_path / "file"):
        with pytest.raises(UsageError, match="the folder for stored states"):
            opened(QWEN3, kv_cache_dir=bad, progress=fail)
