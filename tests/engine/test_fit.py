"""The context that a search finds is the best there is, can be filled, and takes what was planned."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, fields, replace
from itertools import combinations, product
from pathlib import Path
from typing import Literal

import click
import pytest
from dflash_cli.engine_flags import engine_options

from pyggml_dflash import ContextFitError, Engine, UsageError, fit_report
from pyggml_dflash.arch import ARCHITECTURES
from pyggml_dflash.engine import assembly
from pyggml_dflash.engine.assembly import draw, open_model
from pyggml_dflash.engine.core import EngineCore
from pyggml_dflash.engine.fit import Planner
from pyggml_dflash.engine.loader import Built, build
from pyggml_dflash.engine.sampling import Sampler
from pyggml_dflash.errors import cap_text
from pyggml_dflash.ggml.ledger import Ledger
from pyggml_dflash.options import EngineOptions, KVType, SamplingOptions, Spec
from pyggml_dflash.plan.context import step_for
from tests.drafts.drafted import draft_file
from tests.engine.apart import program
from tests.engine.tiny import LLAMA, QWEN3, QWEN35, opened, prompt
from tests.reference.stored import model_file
from tests.tiny import Tiny, tokens, write_tiny

N_TRAIN = 1280
STEP = step_for(N_TRAIN)
MODELS = {
    "llama": Tiny(architecture="llama", n_ctx_train=N_TRAIN),
    "qwen35": Tiny(architecture="qwen35", n_ctx_train=N_TRAIN, n_mtp=1),
    "qwen35moe": Tiny(architecture="qwen35moe", n_ctx_train=N_TRAIN, n_mtp=1),
    "qwen4exp": Tiny(architecture="qwen4exp", n_ctx_train=N_TRAIN, n_mtp=1),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fit")
    for tiny in MODELS.values():
        write_tiny(path, tiny)
    return path


@dataclass(frozen=True)
class Case:
    """A model on a device with room for one step of context, and a part of what the whole one needs more."""

    model: str
    part: float
    slots: int
    spec: Spec
    kv: KVType

    def __str__(self) -> str:
        return f"{self.model}-{self.part}-{self.slots}-{self.spec}-{self.kv}"

    def options(self, folder: Path, cap: int | None) -> EngineOptions:
        return EngineOptions(
            model=folder / f"{self.model}.gguf",
            max_ctx="auto",
            slots=self.slots,
            spec=self.spec,
            cache_type_k=self.kv,
            cache_type_v=self.kv,
            device="CPU",
            threads=1,
            device_cap={} if cap is None else {"CPU": cap},
            prefix_cache_max_mib=0,
        )


KINDS: tuple[KVType, KVType] = ("f16", "q8_0")
CASES = [
    *(Case("llama", *rest) for rest in product((0.5,), (1, 2), ("off",), KINDS)),
    *(Case("qwen35", *rest) for rest in product((0.2, 1.2), (1, 3), ("off", "mtp"), KINDS)),
    *(Case("qwen35moe", *rest) for rest in product((0.6,), (2,), ("off", "mtp"), KINDS)),
    *(Case("qwen4exp", *rest) for rest in product((0.3, 0.8), (1, 2), ("off", "mtp"), KINDS)),
]


@contextmanager
def planner(options: EngineOptions, ledger: Ledger | None = None) -> Iterator[Planner]:
    """A planner over a model's file, with its devices."""
    ledger = Ledger(caps=options.device_cap) if ledger is None else ledger
    with ExitStack() as stack:
        blueprint = draw(options, open_model(options, stack), stack, ledger)
        yield stack.enter_context(closing(Planner(blueprint, ledger)))


def cap_of(case: Case, folder: Path) -> int:
    """What one step takes, and the case's part of what the trained context takes beyond it."""
    with planner(case.options(folder, None)) as plans:
        least, most = (1.1 * sum(plans.plan_at(n).shares[0].terms.values()) for n in (STEP, N_TRAIN))
    return int(least + case.part * (most - least))


@contextmanager
def built(options: EngineOptions) -> Iterator[tuple[Built, EngineCore, Ledger]]:
    """An engine of any number of slots, built as the loader does."""
    ledger = Ledger(caps=options.device_cap)
    with ExitStack() as stack:
        blueprint = draw(options, open_model(options, stack), stack, ledger)
        made = build(blueprint, ledger, stack, lambda _: None)
        parts = made.parts
        core = EngineCore(
            parts.forwards,
            parts.slots,
            ledger,
            made.fit.n_ctx,
            stack.pop_all(),
            parts.drafters,
            trims=made.trims,
        )
    try:
        yield made, core, ledger
    finally:
        core.close()


def fill(core: EngineCore, ids: list[int], slot_id: int) -> None:
    """Run a prompt in one slot."""
    slot = core.slots[slot_id]
    slot.reset()
    for start in range(0, len(ids), core.chunk):
        part = ids[start : start + core.chunk]
        core.prefill(slot, part, last=start + core.chunk >= len(ids), drafting=bool(core._drafters))
    assert slot.n_past == len(ids)


def speculate(core: EngineCore, slot_id: int, width: int) -> None:
    """Decode to the end of the context with drafts."""
    speculation = core.speculation(Sampler(SamplingOptions(), (), n_vocab=264, forbidden=None), width)
    assert speculation is not None
    for _ in speculation.runs(core.slots[slot_id], 5, core.n_ctx):
        pass


@pytest.mark.parametrize("case", CASES, ids=str)
def test_auto_finds_the_best_context_and_it_can_be_filled(case: Case, folder: Path) -> None:
    """B03: in every slot, with what was planned; a step more is refused before anything loads."""
    cap = cap_of(case, folder)
    options = case.options(folder, cap)
    grid = [*range(STEP, N_TRAIN + 1, STEP)]
    with planner(options) as plans:
        best = max((n for n in grid if plans.plan_at(n).fits), default=0)
    report = fit_report(options)
    assert report.n_ctx == best > 0
    assert len(report.trace) <= 11
    with built(options) as (made, core, ledger):
        assert core.n_ctx == made.fit.n_ctx == best
        for slot in core.slots:
            fill(core, tokens(best, seed=slot.id), slot.id)
        fill(core, tokens(best - 30, seed=9), 0)
        if case.spec == "mtp":
            speculate(core, 0, width=4)
        else:
            for _ in range(30):
                core.decode(core.slots[0], 7)
        assert core.slots[0].n_past >= best - 1
        assert ledger.peak("CPU") <= cap
        planned = {name: n for name, n in made.fit.devices[0].terms.items() if n}
        held = ledger.by_label("CPU")
        assert {name: n for name, n in held.items() if n > planned.get(name, 0)} == {}
    if best < N_TRAIN:
        with pytest.raises(ContextFitError), built(replace(options, max_ctx=best + STEP)):
            pass


def test_there_are_forty_cases_of_every_family() -> None:
    assert len(CASES) == len(set(CASES)) == 40
    assert {case.model for case in CASES} == set(MODELS)


def test_a_search_leaves_one_state_allocated(folder: Path) -> None:
    case = Case("qwen35", 0.6, 1, "off", "f16")
    with built(case.options(folder, cap_of(case, folder))) as (made, _, ledger):
        assert len(made.fit.trace) > 1
        assert ledger.by_label("CPU")["state"] == made.parts.slots.layout.slot_bytes


# what was asked for


def mib(n: float) -> dict[str, int]:
    return {"CPU": int(n * 2**20)}


def test_auto_never_goes_beyond_the_number_behind_it() -> None:
    with opened(QWEN35, max_ctx="auto:1000") as engine:
        assert engine.info.n_ctx == 1000
        assert engine.fit_report().requested == "auto:1000"
    with opened(QWEN35, max_ctx="auto:9999") as engine:
        assert engine.info.n_ctx == 4096


def test_what_auto_finds_is_what_the_flags_open_again() -> None:
    report = fit_report(EngineOptions(model=QWEN35, max_ctx="auto", device_cap=mib(6), threads=1))
    assert report.fits
    n_ctx, chunk = (int(report.flags[report.flags.index(f) + 1]) for f in ("--max-ctx", "--chunk"))
    with opened(QWEN35, max_ctx=n_ctx, chunk=chunk, device_cap=mib(6)) as engine:
        assert (engine.info.n_ctx, engine.info.chunk) == (report.n_ctx, report.chunk)


def test_the_flags_of_a_report_name_every_option_that_is_no_default(tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}")
    options = EngineOptions(
        model=QWEN35,
        max_ctx="auto:700",
        min_ctx=200,
        slots=2,
        queue_limit=7,
        prefill_share=0.5,
        admission_coalesce_ms=20,
        device="CPU",
        device_cap={"CPU": 64 * 2**20 + 1},
        device_reserve_mib=1,
        fit_margin="3%",
        threads=1,
        cache_type_k="f32",
        cache_type_v="bf16",
        flash_attn="off",
        repack="off",
        draft=draft_file("dflash-tiny", tmp_path),
        draft_causal="all",
        spec="dflash",
        spec_width=3,
        mtp_convention="per-stream",
        trim_interval=64,
        prefix_cache_max_mib=3,
        prefix_cache_entries=5,
        snapshot_memory="pinned",
        kv_cache_dir=tmp_path / "states",
        kv_cache_budget=7,
        kv_cache_min_tokens=9,
        chat_template=template,
        nfc=False,
        allow_batch_variance=True,
    )
    found: list[EngineOptions] = []

    @click.command()
    @engine_options
    def opens(engine: EngineOptions) -> None:
        found.append(engine)

    report = fit_report(options)
    opens.main([str(QWEN35), *report.flags], standalone_mode=False)
    default = EngineOptions()
    at_default = {f.name for f in fields(options) if getattr(options, f.name) == getattr(default, f.name)}
    several = {
        "devices",
        "split",
        "tensor_split",
        "expert_device",
        "link_type",
        "prompt_streams",
        "kv_overflow_device",
        "expert_placement",
        "expert_budget_mib",
        "stream_experts",
        "expert_memory",
        "worker_timeout_s",
    }  # in test_workers and test_streaming
    assert at_default == {"chunk"} | several  # an option that is new belongs above
    expected = replace(options, max_ctx=report.n_ctx, min_ctx=None, chunk=report.chunk, queue_limit=None)
    assert found == [expected]  # a queue takes no memory, and `dflash serve` has one of its own


def test_a_number_that_does_not_fit_is_refused_with_what_would() -> None:
    with pytest.raises(ContextFitError) as raised:
        opened(QWEN35, max_ctx=4096, device_cap=mib(5))
    error = raised.value
    assert (error.asked, error.device, error.exit_code) == (4096, "CPU", 4)
    assert 0 < error.fits < error.smaller_types["q8_0"] <= error.smaller_types["q4_0"] <= 4096
    assert f"--max-ctx {error.fits} would fit; with a smaller type" in str(error)
    with opened(QWEN35, max_ctx=error.fits, device_cap=mib(5)) as engine:
        assert len(engine.generate(prompt(error.fits), max_tokens=1).tokens) <= 1
    small = {"cache_type_k": "q8_0", "cache_type_v": "q8_0"}
    with opened(QWEN35, max_ctx=error.smaller_types["q8_0"], device_cap=mib(5), **small):
        pass


@pytest.mark.parametrize("margin", ["10%", "80%", "1MiB"])
@pytest.mark.parametrize(("max_ctx", "cap"), [(4096, 5), (4096, 0), ("auto", 1.5)])
def test_a_refusal_under_a_cap_names_it_and_one_that_would_do(
    max_ctx: int | str, cap: float, margin: str
) -> None:
    def at(cap: dict[str, int]) -> Engine:
        return opened(QWEN35, max_ctx=max_ctx, device_cap=cap, fit_margin=margin)

    with pytest.raises(
        ContextFitError, match=f" more than --device-cap {cap_text('CPU', mib(cap)['CPU'])} leaves"
    ):
        at(mib(cap))
    with pytest.raises(ContextFitError) as raised:
        at(mib(cap))
    error = raised.value
    assert (error.cap, error.larger_cap is not None) == (mib(cap)["CPU"], True)
    would_do = error.larger_cap or 0
    assert str(error).endswith(f"; context {error.asked} needs --device-cap CPU={would_do // 2**20}")
    with at({"CPU": would_do}) as engine:
        assert engine.info.n_ctx >= error.asked
    with pytest.raises(ContextFitError):
        at({"CPU": would_do - 2**20})


def test_where_the_device_itself_has_no_more_no_cap_is_named() -> None:
    cap, options = 2**50, EngineOptions(model=QWEN35, max_ctx=4096, device="CPU", threads=1)
    with planner(options, Ledger(caps={"CPU": cap})) as plans:
        plans._free["CPU"] = 2**20
        error = plans.refuse(plans.choose())
    assert (error.cap, error.larger_cap) == (None, None)
    assert " more than CPU has free" in str(error)
    with planner(options, Ledger(caps={"CPU": 2**20})) as plans:
        plans._free["CPU"] = 3 * 2**20
        error = plans.refuse(plans.choose())
    assert (error.cap, error.larger_cap) == (2**20, None)


@pytest.mark.parametrize("max_ctx", [4096, "auto"])
def test_when_nothing_fits_the_shortfall_is_told(max_ctx: int | str) -> None:
    with pytest.raises(ContextFitError, match="no context would fit beside the weights") as raised:
        opened(QWEN35, max_ctx=max_ctx, device_cap=mib(1.5))
    assert raised.value.fits == 0
    assert raised.value.missing > 0


def test_what_fits_only_as_a_number_beside_mapped_weights_is_told() -> None:
    options = EngineOptions(max_ctx="auto", threads=1, repack="off")
    with planner(options) as plan:
        plan._free["CPU"] = 20 * 2**20  # the mapped weights take most of it
        refused = plan.refuse(plan.choose())
    assert refused.fits == 8192
    assert "--max-ctx 8192 would fit" in str(refused)


def test_a_fit_that_fails_loads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    with pytest.raises(ContextFitError):
        Engine.open(
            QWEN3,
            max_ctx=2048,
            device="CPU",
            threads=1,
            device_cap=mib(2),
            progress=lambda event: events.append(event.phase),
        )
    assert events == []


def test_the_smallest_context_bounds_what_auto_may_choose() -> None:
    with opened(QWEN35, max_ctx="auto", device_cap=mib(5)) as engine:
        found = engine.info.n_ctx
    assert found < 4096
    with pytest.raises(ContextFitError):
        opened(QWEN35, max_ctx="auto", min_ctx=found + 1, device_cap=mib(5))
    with pytest.raises(UsageError, match="min_ctx is 5000; the largest context to try is 4096"):
        opened(QWEN35, max_ctx="auto", min_ctx=5000)


@pytest.mark.parametrize("max_ctx", [512, None])
def test_a_context_below_the_smallest_one_asked_for_is_refused(max_ctx: int | None) -> None:
    with pytest.raises(UsageError, match=f"min_ctx is 4097; the largest context to try is {max_ctx or 4096}"):
        fit_report(EngineOptions(model=QWEN35, max_ctx=max_ctx, min_ctx=4097, threads=1))


@pytest.mark.parametrize("options", ["x", {}, QWEN35, 0])
def test_a_report_is_made_of_options_only(options: object) -> None:
    with pytest.raises(UsageError, match=r"options is .*; they must be EngineOptions or None"):
        fit_report(options)  # type: ignore[arg-type]


def test_a_chunk_that_was_asked_for_is_part_of_the_fit() -> None:
    contexts = []
    for chunk in (32, 256, 512):
        with opened(QWEN35, max_ctx="auto", chunk=chunk, device_cap=mib(6)) as engine:
            assert engine.info.chunk == chunk
            contexts.append(engine.info.n_ctx)
    assert contexts == sorted(contexts, reverse=True)
    assert contexts[0] > contexts[-1]


def test_more_slots_and_drafts_leave_less_context() -> None:
    """B04: and with drafts the context that was found answers, see below."""

    def fitted(slots: int, spec: Spec) -> int:
        options = EngineOptions(
            model=QWEN35, max_ctx="auto", slots=slots, spec=spec, device_cap=mib(6), threads=1
        )
        return fit_report(options).n_ctx

    alone = fitted(1, "off")
    assert alone > fitted(2, "off") > fitted(4, "off") > 0
    assert alone > fitted(1, "mtp") > 0


def test_a_context_fitted_with_drafts_answers() -> None:
    with opened(QWEN35, max_ctx="auto", spec="mtp", device_cap=mib(6)) as engine:
        result = engine.generate(prompt(engine.info.n_ctx - 50), max_tokens=40, ignore_eos=True)
        assert len(result.tokens) == 40
        assert engine.stats().peak_bytes["CPU"] <= mib(6)["CPU"]


def test_every_slot_is_planned_and_made() -> None:
    report = fit_report(EngineOptions(model=LLAMA, slots=3, threads=1))
    with opened(LLAMA, slots=3) as engine:
        assert report.slots == engine.info.slots == engine.fit_report().slots == 3
        with opened(LLAMA) as single:
            assert engine.info.state_bytes == 3 * single.info.state_bytes


def test_the_margin_is_left_free() -> None:
    def fitted(margin: str) -> int:
        options = EngineOptions(
            model=LLAMA, max_ctx="auto", device_cap=mib(3.5), fit_margin=margin, threads=1
        )
        report = fit_report(options)
        (share,) = report.devices
        assert share.required <= share.available
        return report.n_ctx

    assert fitted("0%") > fitted("1") >= 256
    assert fitted("0%") >= fitted("10%") >= fitted("50%")


def test_memory_that_is_reserved_is_held_and_not_used() -> None:
    with opened(LLAMA, max_ctx="auto", device_cap=mib(6)) as engine:
        free = engine.info.n_ctx
    with opened(LLAMA, max_ctx="auto", device_cap=mib(6), device_reserve_mib=3) as engine:
        assert engine.memory()["CPU"]["reserve"] == 3 * 2**20
        assert engine.info.n_ctx < free
        assert len(engine.generate(prompt(100), max_tokens=3, ignore_eos=True).tokens) == 3


def test_a_cap_of_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(UsageError, match="device_cap names 'CUDA7'; this build has"):
        opened(LLAMA, device_cap={"CUDA7": 2**30})


def test_an_architecture_without_a_plan_refuses_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    llama = replace(ARCHITECTURES["llama"], supports_auto_ctx=False)  # type: ignore[type-var]
    monkeypatch.setattr(assembly, "architecture_of", lambda file: ("llama", llama))
    with pytest.raises(
        UsageError, match=r"max_ctx is 'auto'; architecture 'llama' has no plan: pass a number"
    ):
        opened(LLAMA, max_ctx="auto")
    with opened(LLAMA, max_ctx=512) as engine:
        assert engine.info.n_ctx == 512


LIMITED = """
import resource, sys
from pathlib import Path
from tests.engine.tiny import opened
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, -1))
with opened(Path(sys.argv[1]), max_ctx="auto:2097152", fit_margin="0%") as engine:
    print(engine.info.n_ctx)
    print(len(engine.generate([1, 2], max_tokens=3, ignore_eos=True).tokens))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the address space")
def test_memory_that_the_system_refuses_after_all_shrinks_the_context(tmp_path: Path) -> None:
    path = write_tiny(tmp_path, Tiny(architecture="llama", n_ctx_train=2**31 - 1))
    done = program(LIMITED, path)
    assert done.returncode == 0, done.stderr
    n_ctx, n_tokens = map(int, done.stdout.split())
    assert (n_ctx % 4096, n_tokens) == (0, 3)
    assert 4096 <= n_ctx < 2**21


# what the engine holds


Flash = Literal["on", "off"]


@pytest.mark.parametrize("flash_attn", ["on", "off"])
def test_a_prompt_takes_the_same_memory_in_any_context(flash_attn: Flash) -> None:
    """Attention reads the rows that are filled, not the context."""
    graphs = []
    for n_ctx in (512, 4096):
        with opened(QWEN35, max_ctx=n_ctx, chunk=128, flash_attn=flash_attn) as engine:
            engine.generate(prompt(400), max_tokens=4, ignore_eos=True)
            graphs.append({k: n for k, n in engine.memory()["CPU"].items() if "graph" in k})
    assert graphs[0] == graphs[1]


def test_slots_share_the_memory_of_prompt_chunks(folder: Path) -> None:
    held = []
    for slots in (1, 4):
        case = Case("qwen35", 1.0, slots, "off", "f16")
        with built(replace(case.options(folder, None), chunk=64)) as (made, core, ledger):
            for slot in core.slots:
                fill(core, tokens(1000, seed=slot.id), slot.id)
            held.append(ledger.by_label("CPU"))
            planned = sum(made.fit.devices[0].terms.values())
            assert ledger.peak("CPU") <= planned
            n_ctx = core.n_ctx
    assert held[0]["graphs"] == held[1]["graphs"]
    assert held[1]["inputs"] - held[0]["inputs"] < 4 * (2 * n_ctx + 1024)  # a row's mask for each


@pytest.mark.parametrize("spec", ["off", "mtp"])
def test_batches_take_what_was_planned(folder: Path, spec: Spec) -> None:
    """All slots at the end of the context, then each set of them, as often as sets change."""
    case = Case("qwen35", 1.0, 4, spec, "f16")
    with built(replace(case.options(folder, None), chunk=64, flash_attn="off")) as (made, core, ledger):
        terms, forwards = made.fit.devices[0].terms, core._forwards
        for slot in core.slots:
            fill(core, tokens(core.n_ctx - 40, seed=slot.id), slot.id)
        for n in (4, 3, 2, 4):
            for some in combinations(core.slots, n):
                forwards.decode_batch(some, tokens(n, seed=n), capture=[0, n - 1] if spec == "mtp" else ())
                for slot in some:
                    slot.commit(1)
                held = ledger.by_label("CPU")
                assert held["graphs"] <= terms["graphs"]
        n_built = forwards.built.n
        forwards.decode_batch(core.slots, tokens(4, seed=4), capture=[0, 3] if spec == "mtp" else ())
        assert forwards.built.n == n_built
        if forwards.recording is not None:
            width = forwards.recording.max_width
            forwards.use(replace(forwards.batching, verify_rows=width))
            forwards.verify(core.slots[1], tokens(width, seed=5))
            held = ledger.by_label("CPU")
        assert {label: n for label, n in held.items() if n > terms.get(label, 0)} == {}
        assert ledger.peak("CPU") <= sum(terms.values())


def test_graphs_that_are_kept_stay_within_their_memory(folder: Path) -> None:
    case = Case("qwen35", 1.0, 1, "mtp", "f16")
    with built(case.options(folder, None)) as (made, core, ledger):
        terms = made.fit.devices[0].terms
        fill(core, tokens(900, seed=3), 0)
        for width in (2, 3, 4, 2):
            slot = core.slots[0]
            speculation = core.speculation(Sampler(SamplingOptions(), (), n_vocab=264, forbidden=None), width)
            assert speculation is not None
            runs = speculation.runs(slot, 5, core.n_ctx)
            for _ in range(30):
                next(runs)
            held = ledger.by_label("CPU")
            assert held["graphs"] <= terms["graphs"]
            assert held["draft graphs"] <= terms["draft graphs"]


def test_a_report_accounts_for_what_is_held(folder: Path) -> None:
    with opened(QWEN35, max_ctx="auto", spec="mtp") as engine:
        engine.generate(prompt(3000), max_tokens=20, ignore_eos=True)
        report, held = engine.fit_report(), engine.memory()["CPU"]
    (share,) = report.devices
    assert share.required == sum(share.terms.values()) + share.headroom <= share.available
    assert 0 < held.pop("snapshots") <= share.terms["snapshots"]
    fixed = {name: n for name, n in held.items() if "graph" not in name}
    assert {"snapshots": share.terms["snapshots"], **fixed} == {
        name: n for name, n in share.terms.items() if "graph" not in name
    }
    assert report.trace[-1].fits
    assert report.n_ctx == engine.info.n_ctx


def test_alternatives_are_what_a_fit_with_them_finds() -> None:
    options = EngineOptions(model=QWEN35, max_ctx="auto", device_cap=mib(6), threads=1)
    for found in fit_report(options).alternatives:
        other = replace(
            options, slots=found.slots, cache_type_k=found.cache_type, cache_type_v=found.cache_type
        )
        assert fit_report(other).n_ctx == found.n_ctx


def test_a_report_of_what_does_not_fit_says_so() -> None:
    report = fit_report(EngineOptions(model=QWEN35, max_ctx=4096, device_cap=mib(5), threads=1))
    assert not report.fits
    assert (report.n_ctx, report.flags) == (0, ())
    (probe,) = report.trace
    assert not probe.fits
    assert probe.balance < 0
    (share,) = report.devices
    assert share.balance == probe.balance


# memory that changes, and drafts from a file


@contextmanager
def shrinking(options: EngineOptions, cap: int, later: int) -> Iterator[tuple[Built, Ledger]]:
    """An engine on a device whose cap falls to `later` while weights load."""
    caps = {"CPU": cap}
    ledger = Ledger(caps=caps)
    with ExitStack() as stack:
        blueprint = draw(options, open_model(options, stack), stack, ledger)
        yield build(blueprint, ledger, stack, lambda _: caps.update(CPU=later)), ledger


def test_memory_lost_while_weights_load_shrinks_the_context() -> None:
    options = EngineOptions(model=QWEN3, max_ctx="auto", device="CPU", threads=1)
    with shrinking(options, 64 * 2**20, 5 * 2**20) as (made, ledger):
        assert 256 <= made.fit.n_ctx < 2048
        assert ledger.peak("CPU") <= 5 * 2**20
    with (
        pytest.raises(ContextFitError),
        shrinking(replace(options, max_ctx=2048), 64 * 2**20, 5 * 2**20),
    ):
        pass


@pytest.mark.parametrize("draft", ["dflash-tiny", "dflash2-tiny", "dflash-swa-tiny"])
def test_a_draft_and_its_cache_are_planned(draft: str, tmp_path: Path) -> None:
    target = model_file("qwen35-tiny", "F32", tmp_path)
    options = EngineOptions(
        model=target,
        draft=draft_file(draft, tmp_path),
        max_ctx="auto",
        device="CPU",
        threads=1,
        device_cap=mib(10),
    )
    with_draft, without = fit_report(options), fit_report(replace(options, draft=None, spec="off"))
    assert 0 < with_draft.n_ctx < without.n_ctx
    with built(options) as (made, core, ledger):
        terms = made.fit.devices[0].terms
        assert terms["draft cache"] > 0
        assert any(label.startswith("draft weights") for label in terms)
        fill(core, prompt(core.n_ctx - 40), 0)
        speculation = core.speculation(Sampler(SamplingOptions(), (), n_vocab=768, forbidden=None), None)
        assert speculation is not None
        for _ in speculation.runs(core.slots[0], 5, core.n_ctx):
            pass
        held = ledger.by_label("CPU")
        assert {label for label, n in held.items() if n > terms.get(label, 0)} == set()
        assert ledger.peak("CPU") <= mib(10)["CPU"]
