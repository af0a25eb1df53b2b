"""Prompts of several slots in one forward: each comes out as alone, whatever runs beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pyggml_dflash import fit_report
from pyggml_dflash.arch.base import GraphKey, OutputKind
from pyggml_dflash.engine.batching import UNMEASURED
from pyggml_dflash.engine.core import EngineCore
from pyggml_dflash.engine.invariance import measure_batching
from pyggml_dflash.engine.joined_invariance import measure_joined
from pyggml_dflash.engine.joined_prompts import PromptRows
from pyggml_dflash.engine.loaded import Loaded
from pyggml_dflash.engine.loader import load
from pyggml_dflash.engine.sampling import Sampler
from pyggml_dflash.engine.serving import Serving
from pyggml_dflash.engine.step import Admission, StepPlan
from pyggml_dflash.ggml.arena import read
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.ffi import c_string, ffi, lib
from pyggml_dflash.ggml.ledger import Ledger
from pyggml_dflash.ggml.ops import GraphBuilder
from pyggml_dflash.ggml.pins import address
from pyggml_dflash.options import EngineOptions, SamplingOptions
from pyggml_dflash.plan.measure import MemoryProbe
from pyggml_dflash.requests import GenerationRequest
from tests.engine.served import Reader, answered
from tests.engine.test_invariance import TYPES, wide
from tests.engine.tiny import LLAMA, QWEN3, QWEN35, opened, prompt
from tests.engine.workers import workers
from tests.reference.opened import OnOff, Parts, assembled, on_the_cpu
from tests.reference.stored import model_file
from tests.tiny import Tiny, tokens, write_tiny

LENGTHS = (9, 23, 12, 17)  # of prompts that share a forward

Share = tuple[int, int, OutputKind]  # slot, rows, output


@contextmanager
def measured(model: Path, **options: Any) -> Iterator[Parts]:
    """Parts whose four slots decode, and share forwards of prompts, as was found for the model."""
    with assembled(on_the_cpu(model, max_ctx=1024, chunk=64, **options), n_slots=4) as parts:
        found = measure_batching(parts.forwards, parts.slots.slots, parts.backend, parts.ledger)
        parts.forwards.use(found)
        yield parts


def left(
    parts: Parts, rounds: Sequence[Sequence[Share]], *, joined: bool
) -> tuple[list[bytes], dict[str, bytes]]:
    """Logits of the prompts that end, and the whole state, after rounds of forwards."""
    for slot in parts.slots.slots:
        slot.reset()
    logits = []
    for shares in rounds:
        wanted = [
            PromptRows(parts.slots.slots[i], tokens(n, seed=10 * i + n), output, False)
            for i, n, output in shares
        ]
        if joined:
            rows = parts.forwards.prefill_together(wanted)
            logits += [] if rows is None else [row.tobytes() for row in rows]
        else:
            alone = [parts.forwards.prefill(each.slot, each.tokens, each.output) for each in wanted]
            logits += [row[0].tobytes() for row in alone if row is not None]
        for each in wanted:
            each.slot.commit(len(each.tokens))
    return logits, {name: read(tensor).tobytes() for name, tensor in parts.state.items()}


ROUNDS: tuple[tuple[Share, ...], ...] = (
    ((0, 9, "last"), (1, 23, "none"), (2, 12, "last"), (3, 17, "none")),
    ((3, 8, "none"), (1, 30, "none")),
    ((1, 11, "last"), (3, 40, "last")),
)


def reads_of_fused_attention(builder: GraphBuilder) -> list[tuple[int, int]]:
    """Of each fused attention in a graph: its place, and that of the last operation that reads its result."""
    last, places = dict[int, int](), dict[int, int]()
    for i in range(builder.n_nodes):
        node = lib.ggml_graph_node(builder.graph, i)
        if c_string(lib.ggml_op_name(node.op)) == "FLASH_ATTN_EXT":
            places[address(node)] = i
        for source in node.src:
            if source != ffi.NULL:
                root = source if source.view_src == ffi.NULL else source.view_src
                last[address(root)] = i
    return [(i, last[root]) for root, i in places.items()]


def test_prompts_have_the_memory_of_fused_attention_one_after_the_other(tmp_path: Path) -> None:
    """GPUs need as much of it as a whole context of keys and values takes in half precision."""
    path = write_tiny(tmp_path, Tiny(architecture="qwen35"))
    with measured(path, flash_attn="on", cache_type_k="q8_0", cache_type_v="q8_0") as parts:
        slots, forwards = parts.slots.slots, parts.forwards
        wanted = [PromptRows(slots[i], tokens(n, seed=i), "last", False) for i, n in enumerate(LENGTHS)]
        builder = forwards.builder(GraphKey.prompts(tuple(forwards._chunk_key(each) for each in wanted)))
        try:
            found = reads_of_fused_attention(builder)
        finally:
            builder.close()
        assert len(found) >= len(LENGTHS)
        assert all(read_at < begins for (_, read_at), (begins, _) in pairwise(found))


@pytest.mark.parametrize("element", TYPES)
@pytest.mark.parametrize("architecture", ["llama", "qwen35moe"])
def test_logits_and_states_are_those_of_prompts_alone(
    tmp_path: Path, architecture: str, element: str
) -> None:
    """With every type of weights with which prompts may share a forward, as deep as they come."""
    with measured(wide(architecture, element, tmp_path)) as parts:
        found = parts.forwards.batching
        if architecture == "qwen35moe" and element in ("Q6_K", "IQ4_XS"):
            assert not found.joined_rows, "a row of an expert rounds by how many others chose it"
            assert "round otherwise" in found.joined_reason
            return
        assert found.joined_rows.start <= 8, found.joined_reason
        assert found.joined_rows.stop > 61
        assert left(parts, ROUNDS, joined=True) == left(parts, ROUNDS, joined=False)


def test_weights_that_are_like_the_head_are_looked_at(tmp_path: Path) -> None:
    """A vocabulary may be as wide as a feed-forward part, which prompts run over all their rows."""
    f16, q6_k = ElementType.F16, ElementType.Q6_K
    quantised = dict.fromkeys(("ffn_up.weight", "ffn_gate.weight", "output.weight"), q6_k)
    elements = {"": f16, "attn_output.weight": f16, **quantised}
    found = []
    for n_vocab in (512, 768):
        tiny = Tiny(architecture="llama", elements=elements, n_embd=256, n_ff=512, n_vocab=n_vocab, n_layer=2)
        with measured(write_tiny(tmp_path, tiny), repack="off") as parts:
            found.append(parts.forwards.batching.joined_rows)
    assert found[0] == found[1]


@pytest.mark.parametrize("flash_attn", ["on", "off"])
@pytest.mark.parametrize("cache", ["f16", "f32"])
@pytest.mark.parametrize("architecture", ["qwen3", "qwen35"])
def test_attention_is_that_of_each_prompt_alone(
    tmp_path: Path, architecture: str, cache: Any, flash_attn: OnOff
) -> None:
    path = write_tiny(tmp_path, Tiny(architecture=architecture, elements={"": ElementType.F16}))
    with measured(path, flash_attn=flash_attn, cache_type_k=cache, cache_type_v=cache) as parts:
        assert left(parts, ROUNDS, joined=True) == left(parts, ROUNDS, joined=False)


@pytest.mark.parametrize("flash_attn", ["on", "off"])
def test_a_shared_forward_takes_no_more_memory_than_was_planned(tmp_path: Path, flash_attn: OnOff) -> None:
    path = write_tiny(tmp_path, Tiny(architecture="qwen35"))
    options = on_the_cpu(path, max_ctx=1024, chunk=64, flash_attn=flash_attn)
    for sizes in ((15, 15, 15, 16), (31, 32), (61, 2)):
        with assembled(options, n_slots=4) as parts:
            planned = parts.forwards.needs(MemoryProbe(parts.backend))
            parts.forwards.use(replace(parts.forwards.batching, joined_rows=range(1, 129)))
            slots = parts.slots.slots[: len(sizes)]
            for slot, n in zip(slots, sizes, strict=True):
                slot.n_past = 1024 // (len(sizes) if flash_attn == "on" else 1) - n
            wanted = [(slot, n, slot.n_past) for slot, n in zip(slots, sizes, strict=True)]
            assert parts.forwards.prompt_limits.groups(wanted) == [list(slots)]
            rows = zip(slots, sizes, strict=True)
            parts.forwards.prefill_together(
                [PromptRows(s, tokens(n, seed=n), "last", False) for s, n in rows]
            )
            assert 0 < parts.ledger.by_label("CPU")["graphs"] <= planned


@pytest.mark.parametrize(
    ("architecture", "flash_attn", "cache", "chunk", "sizes"),
    [
        ("qwen3", "on", "f16", 48, (40, 1)),
        ("llama", "off", "f32", 24, (3, 20)),
        ("llama", "off", "f16", 33, (2, 30)),
        ("llama", "off", "f32", 65, (1, 58, 3)),
        ("qwen35moe", "on", "f16", 24, (21, 1)),
    ],
)
def test_so_does_one_of_a_long_prompt_and_short_ones(
    tmp_path: Path, architecture: str, flash_attn: OnOff, cache: Any, chunk: int, sizes: Sequence[int]
) -> None:
    """In engines with short chunks, where no other forward takes more."""
    path = write_tiny(tmp_path, Tiny(architecture=architecture))
    kv: dict[str, Any] = {"cache_type_k": cache, "cache_type_v": cache}
    options = on_the_cpu(path, max_ctx=256, chunk=chunk, flash_attn=flash_attn, **kv)
    with assembled(options, n_slots=6) as parts:
        forwards, probe = parts.forwards, MemoryProbe(parts.backend)
        planned = forwards.needs(probe)
        forwards.use(replace(forwards.batching, joined_rows=range(1, chunk + 1)))
        slots = parts.slots.slots
        for slot, n in zip(slots, sizes, strict=False):
            slot.n_past = 256 - n
        each = [(slot, n, slot.n_past) for slot, n in zip(slots, sizes, strict=False)]
        assert forwards.prompt_limits.groups(each) == [list(slots[: len(sizes)])]
        prompts = [PromptRows(slot, tokens(n, seed=n), "last", False) for slot, n, _ in each]
        forwards.prefill_together(prompts)
        assert 0 < parts.ledger.by_label("CPU")["graphs"] <= planned


def test_looking_at_products_takes_no_more_memory_than_there_is() -> None:
    """Whatever the chunk, a model opens with the memory that the plan names, and prompts share forwards."""
    for chunk in (16, 33):
        options = EngineOptions(
            model=LLAMA, max_ctx=256, chunk=chunk, slots=8, device="CPU", threads=1, prefix_cache_max_mib=0
        )
        cap = sum(fit_report(options).devices[0].terms.values())
        loaded = load(replace(options, device_cap={"CPU": cap}, fit_margin="0"), lambda _: None)
        try:
            assert loaded.info.joined_rows == chunk
            assert loaded.core.stats().peak_bytes["CPU"] <= cap
        finally:
            loaded.core.close()


def test_with_less_memory_to_look_at_products_fewer_rows_are_joined(tmp_path: Path) -> None:
    path = write_tiny(tmp_path, Tiny(architecture="llama"))
    with assembled(on_the_cpu(path, max_ctx=256, chunk=64), n_slots=2) as parts:
        forwards, slots, whole = parts.forwards, parts.slots.slots, Ledger(caps={})
        found = measure_joined(forwards, slots, parts.backend, whole, UNMEASURED)
        assert found.joined_rows.stop == 65
        less = Ledger(caps={"CPU": whole.peak("CPU") - 1})
        found = measure_joined(forwards, slots, parts.backend, less, UNMEASURED)
        assert found.joined_rows.stop == 49
        found = measure_joined(forwards, slots, parts.backend, Ledger(caps={"CPU": 1000}), UNMEASURED)
        assert not found.joined_rows
        assert "memory" in found.joined_reason


def test_chunks_that_are_too_short_are_given_as_the_reason() -> None:
    with loaded_with(LLAMA, chunk=15) as loaded:
        assert loaded.info.joined_rows == 0
        assert loaded.info.joined_reason == "chunks of 15 rows are shorter than 16"


# which share one


def test_those_that_fit_share_a_forward_in_their_order(tmp_path: Path) -> None:
    path = write_tiny(tmp_path, Tiny(architecture="llama"))
    with assembled(on_the_cpu(path, max_ctx=1024, chunk=64), n_slots=4) as parts:
        base = replace(parts.forwards.batching, rows=3, joined_rows=range(8, 65))
        parts.forwards.use(base)
        limits = parts.forwards.prompt_limits
        assert [limits.takes(n) for n in (7, 8, 63, 64)] == [False, True, True, False]
        wanted = [("a", 30, 0), ("b", 33, 0), ("c", 31, 0), ("d", 8, 0), ("e", 8, 0), ("f", 8, 0)]
        # the third row is one too many with the rows between them that drafters use; then the fourth prompt
        assert limits.groups(wanted) == [["a", "b"], ["c", "d", "e"], ["f"]]
        assert limits.groups([("a", 30, 0), ("b", 34, 0)]) == [["a"], ["b"]]
        # masks of few rows are kept as large as tiles: those of one context are planned for
        assert limits.groups([("a", 9, 500), ("b", 9, 200)]) == [["a", "b"]]
        assert limits.groups([("a", 9, 760), ("b", 9, 300)]) == [["a"], ["b"]]
        parts.forwards.use(replace(base, joined_rows=range(0)))
        assert not any(parts.forwards.prompt_limits.takes(n) for n in range(100))


def test_what_the_host_prepares_is_for_one_prompt_at_a_time(tmp_path: Path) -> None:
    path = write_tiny(tmp_path, Tiny(architecture="qwen4exp"))
    for allow in (False, True):
        with assembled(on_the_cpu(path, max_ctx=256), n_slots=2) as parts:
            found = measure_batching(
                parts.forwards, parts.slots.slots, parts.backend, parts.ledger, allow_variance=allow
            )
            assert not found.joined_rows
            assert "qwen4exp" in found.joined_reason


def test_variance_may_be_allowed() -> None:
    with loaded_with(QWEN3, allow_batch_variance=True, slots=3) as loaded:
        assert (loaded.info.joined_rows, loaded.info.joined_reason) == (64, loaded.info.decode_reason)
        readers = served(loaded, requests((3, 4, 5)))
        assert all(len(reader.result().tokens) == 10 for reader in readers)
        assert loaded.core.stats().joined_prompts == 1


# requests


@contextmanager
def loaded_with(model: Path | None, **options: Any) -> Iterator[Loaded]:
    common = {"max_ctx": 1024, "chunk": 64, "slots": 4, "device": "CPU", "threads": 1, "spec": "off"}
    loaded = load(EngineOptions(model=model, **{**common, **options}), lambda _: None)
    try:
        yield loaded
    finally:
        loaded.core.close()


def requests(lengths: Sequence[int] = LENGTHS, **more: Any) -> list[GenerationRequest]:
    common = {"max_tokens": 10, "ignore_eos": True, **more}
    return [GenerationRequest(tokens=tuple(prompt(n, seed=n)), **common) for n in lengths]


def served(loaded: Loaded, asked: Sequence[GenerationRequest], turns: int = 0) -> list[Reader]:
    """Answer them; the first one begins so many turns before the others."""
    readers, serving = [Reader(request) for request in asked], Serving(loaded, lambda: True)
    for i, reader in enumerate(readers):
        for _ in range(turns if i == 1 else 0):
            serving.turn()
        serving.add(reader)
    while not serving.is_idle:
        serving.turn()
    return readers


@pytest.fixture(
    scope="module", params=["llama", "qwen3", "qwen35", "qwen35 mtp", "qwen35moe", "qwen35moe mtp"]
)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    name, _, spec = request.param.partition(" ")
    files = {"llama": LLAMA, "qwen3": QWEN3, "qwen35": QWEN35}
    path = files.get(name) or model_file("qwen35moe-tiny", "F16", tmp_path_factory.mktemp("joined"))
    with loaded_with(path, spec=spec or "off") as found:
        yield found


@pytest.mark.parametrize("turns", [0, 3])
@pytest.mark.parametrize("reuses", [False, True])
def test_answers_are_the_same_and_prompts_share_forwards(loaded: Loaded, reuses: bool, turns: int) -> None:
    """Arriving at once, and while one decodes; the second prompt has a chunk and more than one tail."""
    asked = requests((9, 75, 12, 17), cache_prompt=reuses, logprobs=1)
    asked[2] = replace(asked[2], sampling=SamplingOptions(temperature=0.8, seed=3))
    alone = [answered(loaded, request) for request in asked]
    for _ in range(2):
        before = loaded.core.stats().joined_prompts
        found = [reader.result() for reader in served(loaded, asked, turns)]
        assert [(r.tokens, r.logprobs) for r in found] == [(r.tokens, r.logprobs) for r in alone]
        assert loaded.core.stats().joined_prompts == before + 1
    assert loaded.core.stats().step_failures == 0


def test_while_one_decodes_a_step_has_one_forward_of_prompts(loaded: Loaded) -> None:
    """Of those that share it, or of the one whose turn it is."""
    core = loaded.core
    asked = requests((9, 12, 75, 40))
    for request in asked:
        sampler = Sampler(SamplingOptions(), (), n_vocab=core._forwards.model.config.n_vocab)
        core.admit(Admission(tokens=request.tokens, sampler=sampler, limit=10))
    core.step(StepPlan(prefill=(0,)))
    assert [core.beside(id) for id in (1, 2, 3)] == [(3,), (), (1,)]
    report = core.step(StepPlan(decode=(0,), prefill=(1, 3)))
    assert set(report.completed) == {1, 3}
    assert core.beside(2) == ()
    for id in range(4):
        core.retire(id)


def test_one_that_leaves_in_between_leaves_the_others_alone(loaded: Loaded) -> None:
    asked = requests((70, 75, 80, 90), cache_prompt=False)
    alone = [answered(loaded, request).tokens for request in asked]
    readers, serving = [Reader(request) for request in asked], Serving(loaded, lambda: True)
    for reader in readers:
        serving.add(reader)
    serving.turn()
    assert loaded.core.phases == ("prefill",) * 4
    readers[1].cancel()
    before = loaded.core.stats().joined_prompts
    while not serving.is_idle:
        serving.turn()
    assert loaded.core.stats().joined_prompts == before + 1
    assert readers[1].result().finish_reason == "cancelled"
    assert [readers[i].result().tokens for i in (0, 2, 3)] == [alone[0], *alone[2:]]


def follow(core: EngineCore, texts: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Tokens behind texts whose turns begin at their 20th token, and states stored there."""
    for text in texts:
        sampler = Sampler(SamplingOptions(), (), n_vocab=core._forwards.model.config.n_vocab)
        core.admit(Admission(tokens=tuple(text), sampler=sampler, limit=8, boundaries=(20,), reuses=True))
    found: dict[int, list[int]] = {id: [] for id in range(len(texts))}
    while any(len(run) < 8 for run in found.values()):
        at = {
            phase: tuple(i for i, p in enumerate(core.phases) if p == phase)
            for phase in ("decode", "prefill")
        }
        report = core.step(StepPlan(**at))
        assert not report.failed
        for id, granule in report.completed.items():
            assert granule.first is not None
            found[id].append(granule.first.token)
        for id, run in report.decoded.items():
            found[id] += [chosen.token for chosen in run]
    for id in found:
        core.retire(id)
    return [tuple(run[:8]) for run in found.values()]


@pytest.mark.parametrize("spec", ["off", "mtp"])
def test_a_state_is_stored_at_a_cut_inside_and_continued(spec: str) -> None:
    texts = [prompt(n, seed=n) for n in (29, 33, 38, 31)]
    with loaded_with(QWEN35, spec=spec) as loaded:
        alone = [follow(loaded.core, [text])[0] for text in texts]
        assert loaded.core.reuse is not None
        loaded.core.reuse.clear()
        assert follow(loaded.core, texts) == alone
        stats = loaded.core.stats()
        assert stats.joined_prompts == 2  # up to the cut 3 of 20 rows fit, behind it all
        assert stats.snapshots is not None
        assert stats.snapshots.captured == 8
        assert follow(loaded.core, texts) == alone  # from there
        stats = loaded.core.stats()
        assert stats.snapshots is not None
        assert (stats.snapshots.restored, stats.joined_prompts) == (4, 3)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(("model", "spec"), [(None, "dflash"), (QWEN35, "mtp")])
def test_a_drafter_sees_its_prompt_of_a_shared_forward(model: Path | None, spec: str, first: int) -> None:
    """Prompts too long for rooms of their own are recorded one behind the other; one answer then goes on."""
    asked = requests((40, 36), max_tokens=24, spec_width=3)
    asked[first] = replace(asked[first], max_tokens=1)
    with loaded_with(model, spec=spec, chunk=128, prefix_cache_max_mib=0) as loaded:
        forwards = loaded.core._forwards
        forwards.use(replace(forwards.batching, joined_rows=range(1, 129)))
        alone = [answered(loaded, request) for request in asked]
        found = [reader.result() for reader in served(loaded, asked)]
        assert loaded.core.stats().joined_prompts == 1
        assert [r.tokens for r in found] == [r.tokens for r in alone]
        ours, expected = found[1 - first].speculation, alone[1 - first].speculation
        assert ours is not None
        assert expected is not None
        assert (ours.drafted, ours.accepted) == (expected.drafted, expected.accepted)
        assert ours.drafted > 0


def test_a_worker_may_run_them(tmp_path: Path) -> None:
    asked = [prompt(n, seed=n) for n in LENGTHS]
    with (
        workers(1) as (worker,),
        opened(QWEN35, device=worker.name, slots=4, max_ctx=512, chunk=64) as engine,
    ):
        alone = [engine.generate(text, max_tokens=6, ignore_eos=True).tokens for text in asked]
        streams = [engine.stream(text, max_tokens=6, ignore_eos=True) for text in asked]
        assert [stream.result.tokens for stream in streams] == alone
        assert engine.info.joined_rows == 64
        assert engine.stats().joined_prompts >= 1
