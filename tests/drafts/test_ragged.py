"""Sequences that draft beside each other, in one forward over the rows of all: each gets its own text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from pyggml_dflash.engine.assembly import DEFAULT_MODEL
from pyggml_dflash.engine.batching import Batching
from pyggml_dflash.engine.drafting import Proposal
from pyggml_dflash.engine.graphs import Forwards
from pyggml_dflash.engine.loaded import Loaded
from pyggml_dflash.engine.ragged import Ragged
from pyggml_dflash.engine.record_space import RecordSpace
from pyggml_dflash.engine.serving import Serving
from pyggml_dflash.errors import BackendError
from pyggml_dflash.ggml.padding import Padding, Paddings
from pyggml_dflash.requests import GenerationRequest, GenerationResult, SpeculationStats
from tests.drafts.drafted import draft_file
from tests.drafts.generated import loaded_model
from tests.drafts.speculated import Tell, Told
from tests.engine.arrivals import ARRIVALS, Arrival, seen, serve, short_and_long
from tests.engine.served import Reader, answered
from tests.engine.workers import workers
from tests.reference.stored import model_file

N_SLOTS: Final = 4
WIDTH: Final = 4
# A target, and its draft: its own MTP block, or a DFlash draft's file.
CASES: Final = (
    ("qwen35-tiny", "mtp"),
    ("qwen35moe-tiny", "mtp"),
    ("qwen4exp-tiny", "mtp"),
    ("qwen35-tiny", "dflash-tiny"),
    ("qwen35-tiny", "dflash2-tiny"),
    ("pico", "pico-dflash"),
)
RIGHT: Final = (3, 0, 1, 2, 3)  # drafts of a proposal that are right, by where it is made

Texts = Mapping[tuple[int, ...], Sequence[int]]  # by prompt: prompt and answer


def options_of(case: tuple[str, str], folder: Path) -> tuple[Path, dict[str, Any]]:
    """The target's file, and what chooses its draft."""
    name, draft = case
    if name == "pico":
        return DEFAULT_MODEL, {"draft": DEFAULT_MODEL.with_name("pico-dflash-q8_0.gguf")}
    chosen = {"spec": "mtp"} if draft == "mtp" else {"draft": draft_file(draft, folder)}
    return model_file(name, "F32", folder), chosen


def params() -> list[Any]:
    """One always, the others among the slow tests."""
    marks: dict[tuple[str, str], Any] = {CASES[0]: ()}
    return [pytest.param(c, id="-".join(c), marks=marks.get(c, pytest.mark.slow)) for c in CASES]


@pytest.fixture(scope="module", params=params())
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    model, chosen = options_of(request.param, tmp_path_factory.mktemp("ragged"))
    with loaded_model(
        model, slots=N_SLOTS, spec_width=WIDTH, chunk=64, prefix_cache_max_mib=0, **chosen
    ) as found:
        batching = found.core._forwards.batching  # however many rows there was time to look at
        found.core._forwards.use(replace(batching, ragged_rows=N_SLOTS * WIDTH))
        yield found


def requests(n: int = N_SLOTS, n_tokens: int = 24) -> list[GenerationRequest]:
    """Greedy, with a seed, and with penalties."""
    return short_and_long(n_tokens)[:n]


def plainly(request: GenerationRequest) -> GenerationRequest:
    return replace(request, spec="off")


@contextmanager
def told(loaded: Loaded, texts: Texts) -> Iterator[None]:
    """While this lasts every drafter proposes some of what its sequence will say, and then nonsense."""

    def tell_of(slot: int) -> Tell:
        def tell(n_past: int, n_drafts: int, own: Proposal) -> list[int]:
            text = texts[loaded.core.seat(slot).admission.tokens]
            drafts = [*text[n_past + 1 : n_past + 1 + n_drafts], *[0] * n_drafts][:n_drafts]
            n_right = RIGHT[(n_past + slot) % len(RIGHT)]
            return [*drafts[:n_right], *((token + 1) % 700 for token in drafts[n_right:])]

        return tell

    own = loaded.core._drafters
    told = tuple(Told(drafter, tell_of(i)) for i, drafter in enumerate(own))
    loaded.core._drafters = told  # type: ignore[assignment]
    try:
        yield
    finally:
        loaded.core._drafters = own


def texts_of(alone: Sequence[GenerationResult], asked: Sequence[GenerationRequest]) -> Texts:
    found = {}
    for request, result in zip(asked, alone, strict=True):
        assert request.tokens is not None
        found[tuple(request.tokens)] = [*request.tokens, *result.tokens]
    return found


def stats_of(results: Sequence[GenerationResult]) -> list[SpeculationStats]:
    found = []
    for result in results:
        assert result.speculation is not None
        found.append(result.speculation)
    return found


@pytest.mark.parametrize(
    ("n", "turns"),
    [
        (4, ARRIVALS[1]),
        *(pytest.param(n, turns, marks=pytest.mark.slow) for n in (2, 4) for turns in ARRIVALS),
    ],
)
def test_who_drafts_beside_others_gets_what_it_gets_without(
    loaded: Loaded, n: int, turns: tuple[int, ...]
) -> None:
    """Whatever was drafted, with its drafter's own drafts and with some that hold for different lengths."""
    asked = requests(n)
    alone = [answered(loaded, plainly(request)) for request in asked]
    for drafts in (told(loaded, texts_of(alone, asked)), ExitStack()):
        with drafts:
            readers = [Reader(request) for request in asked]
            serve(loaded, [Arrival(turn, reader) for turn, reader in zip(turns, readers, strict=False)])
        results = [reader.result() for reader in readers]
        assert [seen(result) for result in results] == [seen(result) for result in alone]
        assert sum(stats.shared_steps for stats in stats_of(results)) > 0


def test_one_forward_keeps_another_number_of_rows_of_each_sequence(loaded: Loaded) -> None:
    asked, kept = requests(), set[tuple[int, ...]]()
    alone = [answered(loaded, plainly(request)) for request in asked]
    step = loaded.core.step

    def noted(plan: Any) -> Any:
        report = step(plan)
        kept.add(tuple(len(run) for run in report.decoded.values()))
        return report

    with told(loaded, texts_of(alone, asked)):
        loaded.core.step = noted  # type: ignore[method-assign]
        readers = [Reader(request) for request in asked]
        serve(loaded, [Arrival(0, reader) for reader in readers])
    del loaded.core.step
    assert any(len(runs) == N_SLOTS and len(set(runs)) >= 3 for runs in kept), kept
    for result, stats in zip(alone, stats_of([reader.result() for reader in readers]), strict=True):
        assert 1 + stats.verify_steps + stats.accepted + stats.plain_steps == len(result.tokens)
        assert stats.drafted >= stats.accepted > 0
        assert 0 < stats.shared_steps <= stats.verify_steps == sum(stats.steps_by_width.values())


@pytest.mark.parametrize("after", [1, 6])
def test_who_leaves_in_the_middle_of_a_run_does_not_show(loaded: Loaded, after: int) -> None:
    asked = requests()
    alone = [answered(loaded, plainly(request)) for request in asked]
    with told(loaded, texts_of(alone, asked)):
        readers = [Reader(request) for request in asked]
        readers[1].is_enough = lambda: sum(len(piece.tokens) for piece in readers[1].pieces) >= after
        serve(loaded, [Arrival(0, reader) for reader in readers])
        again = answered(loaded, asked[1])
    results = [reader.result() for reader in readers]
    assert results[1].finish_reason == "cancelled"
    assert results[1].tokens == alone[1].tokens[: len(results[1].tokens)]
    for i in (0, 2, 3):
        assert seen(results[i]) == seen(alone[i])
    assert seen(again) == seen(alone[1])


def test_who_does_not_draft_runs_in_the_same_forwards(loaded: Loaded) -> None:
    asked = requests()
    asked[2] = plainly(asked[2])
    alone = [answered(loaded, plainly(request)) for request in asked]
    with told(loaded, texts_of(alone, asked)):
        readers = [Reader(request) for request in asked]
        serve(loaded, [Arrival(0, reader) for reader in readers])
    results = [reader.result() for reader in readers]
    assert [seen(result) for result in results] == [seen(result) for result in alone]
    assert [result.speculation is None for result in results] == [False, False, True, False]


# what fails


class Broken:
    """Forwards or a drafter, one method of which fails at one call."""

    def __init__(self, own: Any, method: str, nth: int) -> None:
        self._own, self._method, self._nth = own, method, nth
        self.n_calls = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._own, name)
        return self._failing(found) if name == self._method else found

    def _failing(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            self.n_calls += 1
            if self.n_calls == self._nth:
                raise BackendError("on purpose")
            return method(*arguments, **more)

        return call


def served(loaded: Loaded, asked: Sequence[GenerationRequest]) -> tuple[list[Reader], Serving]:
    readers = [Reader(request) for request in asked]
    return readers, serve(loaded, [Arrival(0, reader) for reader in readers])


@pytest.mark.parametrize("nth", [1, 3])
def test_a_forward_of_all_that_fails_changes_no_text(loaded: Loaded, nth: int) -> None:
    asked = requests()
    alone = [answered(loaded, plainly(request)) for request in asked]
    ragged, before = loaded.core._ragged, loaded.core.stats().step_failures
    assert ragged is not None
    own: Forwards = ragged._forwards
    broken: Any = Broken(own, "verify_ragged", nth)
    ragged._forwards = broken
    try:
        readers, _ = served(loaded, asked)
    finally:
        ragged._forwards = own
    results = [reader.result() for reader in readers]
    assert [seen(result) for result in results] == [seen(result) for result in alone]
    assert loaded.core.stats().step_failures == before + 1
    assert sum("on purpose" in str(result.plain_reason) for result in results) >= 3


@pytest.mark.parametrize("method", ["propose", "observe"])
def test_a_drafter_that_fails_is_put_aside_for_its_own_sequence(loaded: Loaded, method: str) -> None:
    asked = requests()
    alone = [answered(loaded, plainly(request)) for request in asked]
    core = loaded.core
    own, backlog = core._drafters, core._backlogs[1]
    broken: Any = Broken(own[1], method, 2)
    core._drafters, backlog._drafter = (own[0], broken, *own[2:]), broken
    try:
        readers, _ = served(loaded, asked)
    finally:
        core._drafters, backlog._drafter = own, own[1]
    results = [reader.result() for reader in readers]
    assert [seen(result) for result in results] == [seen(result) for result in alone]
    assert broken.n_calls >= 2
    assert "on purpose" in str(results[1].plain_reason)
    assert not any("on purpose" in str(results[i].plain_reason) for i in (0, 2, 3))
    assert answered(loaded, asked[1]).plain_reason is None


def test_a_rollback_that_fails_fails_its_own_request(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = requests()
    alone = [answered(loaded, plainly(request)) for request in asked]
    n = 0

    def commit(slot: Any, **more: Any) -> None:
        nonlocal n
        n += slot.id == 2
        if slot.id == 2 and n == 2:
            raise BackendError("on purpose")
        own(slot, **more)

    own = loaded.core._forwards.commit
    monkeypatch.setattr(loaded.core._forwards, "commit", commit)
    readers, serving = served(loaded, asked)
    with pytest.raises(BackendError, match="on purpose"):
        readers[2].result()
    for i in (0, 1, 3):
        assert seen(readers[i].result()) == seen(alone[i])
    assert serving.stats().requests.failed == 1
    monkeypatch.undo()
    assert seen(answered(loaded, asked[2])) == seen(alone[2])


# memory


def test_sequences_that_draft_together_take_what_was_planned(loaded: Loaded) -> None:
    served(loaded, requests())
    planned, held = loaded.fit.devices[0].terms, loaded.core.memory()["CPU"]
    assert {label: n for label, n in held.items() if n > planned.get(label, 0)} == {}
    assert held["draft cache"] > 0


@pytest.mark.parametrize("case", [CASES[0], CASES[3]], ids="-".join)
def test_a_stored_state_brings_its_drafters_into_any_slot(case: tuple[str, str], tmp_path: Path) -> None:
    """What was stored of the first slot is continued in the third, and drafted as before."""
    model, chosen = options_of(case, tmp_path)
    with loaded_model(model, slots=N_SLOTS, spec_width=WIDTH, chunk=64, **chosen) as loaded:
        first, *others = requests(3, n_tokens=40)
        first = replace(first, tokens=tuple(range(3, 200)))
        cold = answered(loaded, first)
        readers = [Reader(request) for request in (*others, first)]
        serve(loaded, [Arrival(0, reader) for reader in readers])
        warm = readers[-1].result()
        assert seen(warm) == seen(cold)
        assert warm.usage.cached_tokens > 100
        (before, after) = stats_of([cold, warm])
        assert after.shared_steps > 0
        assert (after.drafted, after.accept_rates) == (before.drafted, before.accept_rates)


def test_rooms_of_the_record_do_not_meet() -> None:
    for n_slots, most, width in ((1, 64, 4), (2, 64, 4), (4, 512, 16), (3, 8, 4), (3, 40, 40)):
        space = RecordSpace(n_slots, most, width)
        rooms = [space.own(slot) for slot in range(n_slots)]
        rooms = [space.shared, *rooms] if n_slots > 1 else rooms
        taken = [row for room in rooms for row in range(room.first, room.first + room.n_rows)]
        assert len(set(taken)) == len(taken) <= space.n_rows == max(taken) + 1
        # the row in front of a room keeps what the room before it does not write
        assert all(room.first == 0 or room.first - 1 not in taken for room in rooms)
        assert all(width <= room.n_rows <= space.shared.n_rows for room in rooms)
        assert space.has(0, space.own(0).first, width)
        assert not space.has(0, space.own(0).first + space.own(0).n_rows, 1)


# on a device that has no host memory


@pytest.mark.parametrize(("case", "slots", "width", "chunk"), [(CASES[0], 3, WIDTH, 8), (CASES[3], 1, 2, 2)])
def test_a_device_gets_embeddings_of_more_drafted_rows_than_its_chunks_have(
    case: tuple[str, str], slots: int, width: int, chunk: int, tmp_path: Path
) -> None:
    """Of as many as wait for a drafter, or as its block has; states are put back from snapshots there."""
    model, chosen = options_of(case, tmp_path)
    chosen |= {"slots": slots, "spec_width": width, "chunk": chunk, "prefix_cache_max_mib": 0}
    with workers(1) as (worker,), loaded_model(model, device=worker.name, **chosen) as loaded:
        core, forwards, asked = loaded.core, loaded.core._forwards, requests(slots)
        assert forwards.gather is not None
        assert forwards.recording is not None
        assert forwards.recording.update == "snapshots"
        if slots > 1:
            forwards.use(together(slots, width))
            core._ragged = Ragged(forwards, core._drafters, core._backlogs, core._failures)
        alone = [answered(loaded, plainly(request)) for request in asked]
        with told(loaded, texts_of(alone, asked)):
            readers = [Reader(request) for request in asked]
            serve(loaded, [Arrival(0, reader) for reader in readers])
        results = [reader.result() for reader in readers]
        assert [result.tokens for result in results] == [result.tokens for result in alone]
        assert all(stats.accepted > 0 for stats in stats_of(results))
        assert (sum(stats.shared_steps for stats in stats_of(results)) > 0) == (slots > 1)


def together(n_slots: int, width: int) -> Batching:
    """What is found of weights in single precision, however long a worker takes for it."""
    return Batching(
        mode="padded",
        rows=n_slots,
        exact=True,
        reason="two rows and more agree",
        verify_rows=width,
        ragged_rows=n_slots * width,
        paddings=Paddings(others=Padding(least=2)),
    )
