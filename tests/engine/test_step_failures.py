"""What fails, fails for one request: its step, its memory, its callback. The others never notice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from pyggml_dflash import BackendError, DeviceMemoryError, Progress, UsageError
from pyggml_dflash.arch.base import OutputKind
from pyggml_dflash.engine.graphs import Forwards, Logits
from pyggml_dflash.engine.joined_prompts import PromptRows
from pyggml_dflash.engine.loaded import Loaded
from pyggml_dflash.engine.loader import load
from pyggml_dflash.engine.serving import Serving
from pyggml_dflash.options import EngineOptions, SamplingOptions
from pyggml_dflash.requests import GenerationRequest, RequestCounts
from pyggml_dflash.state.slot import Slot
from tests.engine.served import Reader, answered
from tests.engine.tiny import QWEN35, prompt

T = TypeVar("T")
CHUNK = 16
LENGTHS = (5, 40, 20)


class Failing:
    """Forwards of which some fail, before they change anything or, if told so, behind that."""

    def __init__(self, forwards: Forwards, *, tears: bool = False) -> None:
        self._forwards, self._tears = forwards, tears
        self.fails: Callable[[str, Slot], bool] = lambda kind, slot: False
        self.n_failures = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._forwards, name)

    def _run(self, kind: str, slots: Sequence[Slot], forward: Callable[[], T]) -> T:
        failing = [slot for slot in slots if self.fails(kind, slot)]
        if failing:
            self.n_failures += 1
            if self._tears:
                forward()
                assert all(slot.torn for slot in slots) or kind in ("verify", "ragged")
            raise BackendError(f"a {kind} fails on purpose")
        return forward()

    def decode(self, slot: Slot, token: int, **more: Any) -> Logits:
        return self._run("decode", [slot], lambda: self._forwards.decode(slot, token, **more))

    def decode_batch(self, slots: Sequence[Slot], tokens: Sequence[int], **more: Any) -> Logits:
        return self._run("decode", slots, lambda: self._forwards.decode_batch(slots, tokens, **more))

    def prefill(self, slot: Slot, tokens: Sequence[int], output: OutputKind, **more: Any) -> Logits | None:
        return self._run("prefill", [slot], lambda: self._forwards.prefill(slot, tokens, output, **more))

    def prefill_together(self, prompts: Sequence[PromptRows]) -> Logits | None:
        slots = [prompt.slot for prompt in prompts]
        return self._run("joined", slots, lambda: self._forwards.prefill_together(prompts))

    def verify(self, slot: Slot, tokens: Sequence[int]) -> Logits:
        return self._run("verify", [slot], lambda: self._forwards.verify(slot, tokens))

    def verify_ragged(self, slots: Sequence[Slot], tokens: Sequence[Sequence[int]]) -> Logits:
        return self._run("ragged", slots, lambda: self._forwards.verify_ragged(slots, tokens))


@contextmanager
def opened(**more: Any) -> Iterator[Loaded]:
    """A model on the CPU."""
    options = EngineOptions(model=QWEN35, max_ctx=512, chunk=CHUNK, slots=3, device="CPU", threads=1)
    found = load(replace(options, **more), lambda _: None)
    try:
        yield found
    finally:
        found.core.close()


@pytest.fixture(params=["off", "mtp"])
def loaded(request: pytest.FixtureRequest) -> Iterator[Loaded]:
    width = "auto" if request.param == "off" else 3
    with opened(spec=request.param, spec_width=width, prefix_cache_max_mib=0) as found:
        yield found


def requests() -> list[GenerationRequest]:
    return [
        GenerationRequest(tokens=tuple(prompt(n, seed=n)), max_tokens=12, ignore_eos=True) for n in LENGTHS
    ]


def served(loaded: Loaded, readers: Sequence[Reader]) -> Serving:
    """Answer them together."""
    serving = Serving(loaded, lambda: True)
    for reader in readers:
        serving.add(reader)
    while not serving.is_idle:
        serving.turn()
    return serving


def plainly(loaded: Loaded) -> Loaded:
    """Have slots that decode together do it without drafts, in forwards that change their states."""
    forwards = loaded.core._forwards
    forwards.use(replace(forwards.batching, ragged_rows=1))
    return loaded


def failing(loaded: Loaded, **options: Any) -> Failing:
    """Put failing forwards below the core."""
    forwards = Failing(loaded.core._forwards, **options)
    loaded.core._forwards = forwards  # type: ignore[assignment]
    loaded.core._prompts._forwards = forwards  # type: ignore[assignment]
    for backlog in loaded.core._backlogs:
        backlog._forwards = forwards  # type: ignore[assignment]
    if loaded.core._ragged is not None:
        loaded.core._ragged._forwards = forwards  # type: ignore[assignment]
    return forwards


@pytest.mark.parametrize("kind", ["decode", "prefill", "verify", "ragged"])
@pytest.mark.parametrize("nth", [1, 2, 4])
def test_a_step_that_fails_once_is_tried_again_and_changes_no_answer(
    loaded: Loaded, kind: str, nth: int
) -> None:
    alone = [answered(loaded, request).tokens for request in requests()]
    forwards, n = failing(loaded), 0

    def fails(what: str, slot: Slot) -> bool:
        nonlocal n
        n += what == kind
        return what == kind and n == nth

    forwards.fails = fails
    readers = [Reader(request) for request in requests()]
    serving = served(loaded, readers)
    assert [reader.result().tokens for reader in readers] == alone
    assert serving.stats().step_failures == forwards.n_failures <= 1
    assert serving.stats().requests == RequestCounts(done=3)
    if kind in (("prefill",) if loaded.info.spec == "mtp" else ("prefill", "decode")):
        assert forwards.n_failures == 1
    if kind == "ragged" and loaded.info.spec == "mtp" and nth == 1:
        assert forwards.n_failures == 1


@pytest.mark.parametrize("kind", ["decode", "prefill"])
@pytest.mark.parametrize("poisoned", [0, 1, 2])
def test_one_that_always_fails_takes_nobody_with_it(loaded: Loaded, kind: str, poisoned: int) -> None:
    alone = [answered(loaded, request).tokens for request in requests()]
    forwards = failing(loaded)
    # the first would be drafted for, and then not decode plainly
    forwards.fails = lambda what, slot: slot.id == poisoned and what in (kind, "verify", "ragged")
    readers = [Reader(request) for request in requests()]
    serving = served(loaded, readers)
    for i, reader in enumerate(readers):
        if i == poisoned:
            with pytest.raises(BackendError, match=f"a {kind} fails on purpose"):
                reader.result()
        else:
            assert reader.result().tokens == alone[i]
    assert serving.stats().requests == RequestCounts(done=2, failed=1)
    assert serving.stats().step_failures >= 2
    assert [slot.phase for slot in serving.stats().slots] == ["free"] * 3
    forwards.fails = lambda what, slot: False
    again = [Reader(request) for request in requests()]
    served(loaded, again)
    assert [reader.result().tokens for reader in again] == alone


def test_a_prompts_forward_that_may_have_changed_the_state_is_not_tried_again(loaded: Loaded) -> None:
    alone = [answered(loaded, request).tokens for request in requests()]
    forwards, n = failing(loaded, tears=True), 0

    def fails(what: str, slot: Slot) -> bool:
        nonlocal n
        n += what == "prefill" and slot.id == 1
        return what == "prefill" and slot.id == 1 and n == 2

    forwards.fails = fails
    readers = [Reader(request) for request in requests()]
    served(loaded, readers)
    with pytest.raises(BackendError, match="on purpose"):
        readers[1].result()
    assert [readers[i].result().tokens for i in (0, 2)] == [alone[0], alone[2]]
    assert forwards.n_failures == 1
    assert answered(loaded, requests()[1]).tokens == alone[1]


@pytest.mark.parametrize("nth", [1, 2, 7])
@pytest.mark.parametrize("limit", [0, 64])
@pytest.mark.parametrize("spec", ["off", "mtp"])
def test_a_state_that_was_lost_in_a_shared_forward_is_had_again(spec: Any, limit: int, nth: int) -> None:
    """From the prompt or a stored state of it, and by decoding the answer again."""
    more = [(25, {"temperature": 0.9, "seed": 4}), (150, {"repetition_penalty": 1.3})]
    asked = [replace(request, max_tokens=40) for request in requests()[:1]]
    for n_prompt, sampling in more:
        options = SamplingOptions(**sampling)  # type: ignore[arg-type]
        asked.append(replace(asked[0], tokens=tuple(prompt(n_prompt)), sampling=options))
    with opened(spec=spec, spec_width="auto" if spec == "off" else 3, prefix_cache_max_mib=limit) as loaded:
        alone = [answered(loaded, request) for request in asked]
        forwards, n = failing(plainly(loaded), tears=True), 0

        def fails(what: str, slot: Slot) -> bool:
            nonlocal n
            n += what == "decode" and slot.id == 2
            return what == "decode" and slot.id == 2 and n == nth

        forwards.fails = fails
        readers = [Reader(request) for request in asked]
        serving = served(loaded, readers)
        assert forwards.n_failures == 1
        found = [reader.result() for reader in readers]
        assert [(r.tokens, r.text) for r in found] == [(r.tokens, r.text) for r in alone]
        assert serving.stats().requests == RequestCounts(done=3)
        assert loaded.core.phases == ("free",) * 3


@pytest.mark.parametrize("poisoned", [0, 1, 2])
def test_one_that_always_loses_every_state_takes_nobody_with_it(loaded: Loaded, poisoned: int) -> None:
    alone = [answered(loaded, request).tokens for request in requests()]
    forwards = failing(loaded, tears=True)
    forwards.fails = lambda what, slot: slot.id == poisoned and what in ("decode", "verify", "ragged")
    readers = [Reader(request) for request in requests()]
    serving = served(loaded, readers)
    for i, reader in enumerate(readers):
        if i == poisoned:
            with pytest.raises(BackendError, match="fails on purpose"):
                reader.result()
        else:
            assert reader.result().tokens == alone[i]
    assert serving.stats().requests == RequestCounts(done=2, failed=1)


@pytest.mark.parametrize("tears", [False, True])
@pytest.mark.parametrize("limit", [0, 64])
@pytest.mark.parametrize("spec", ["off", "mtp"])
def test_prompts_whose_shared_forward_fails_run_alone(spec: Any, limit: int, tears: bool) -> None:
    """From where they are, or from the beginning where their states may have changed; their answers stay."""
    asked = [
        GenerationRequest(tokens=tuple(prompt(n, seed=n)), max_tokens=12, ignore_eos=True)
        for n in (9, 84, 76)
    ]
    with opened(spec=spec, prefix_cache_max_mib=limit, chunk=64) as loaded:
        alone = [answered(loaded, request).tokens for request in asked]
        if loaded.core.reuse is not None:
            loaded.core.reuse.clear()
        forwards, n = failing(loaded, tears=tears), 0

        def fails(what: str, slot: Slot) -> bool:
            nonlocal n
            n += what == "joined" and slot.id == 2
            return what == "joined" and slot.id == 2 and n == 1

        forwards.fails = fails
        readers = [Reader(request) for request in asked]
        serving = served(loaded, readers)
        assert forwards.n_failures == serving.stats().step_failures == 1
        assert [reader.result().tokens for reader in readers] == alone
        assert serving.stats().requests == RequestCounts(done=3)


@pytest.mark.parametrize("tears", [False, True])
@pytest.mark.parametrize("poisoned", [0, 1, 2])
def test_a_prompt_that_always_fails_takes_no_other_with_it(poisoned: int, tears: bool) -> None:
    asked = [
        GenerationRequest(tokens=tuple(prompt(n, seed=n)), max_tokens=12, ignore_eos=True)
        for n in (9, 20, 12)
    ]
    with opened(spec="off", chunk=64, max_ctx=1024) as loaded:
        alone = [answered(loaded, request).tokens for request in asked]
        forwards = failing(loaded, tears=tears)
        forwards.fails = lambda what, slot: slot.id == poisoned and what in ("joined", "prefill")
        readers = [Reader(request) for request in asked]
        serving = served(loaded, readers)
        for i, reader in enumerate(readers):
            if i == poisoned:
                with pytest.raises(BackendError, match="a prefill fails on purpose"):
                    reader.result()
            else:
                assert reader.result().tokens == alone[i]
        assert forwards.n_failures == serving.stats().step_failures == 2
        assert serving.stats().requests == RequestCounts(done=2, failed=1)


def test_who_leaves_while_a_state_is_had_again_frees_the_slot(loaded: Loaded) -> None:
    alone = [answered(loaded, request).tokens for request in requests()]
    forwards = failing(plainly(loaded), tears=True)
    readers = [Reader(request) for request in requests()]
    serving = Serving(loaded, lambda: True)
    for reader in readers:
        serving.add(reader)
    while "prefill" in loaded.core.phases or "free" in loaded.core.phases:
        serving.turn()
    forwards.fails = lambda what, slot: slot.id == 1
    serving.turn()
    assert loaded.core.phases == ("prefill",) * 3
    forwards.fails = lambda what, slot: False
    readers[1].cancel()
    while not serving.is_idle:
        serving.turn()
    assert readers[1].result().finish_reason == "cancelled"
    assert [readers[i].result().tokens for i in (0, 2)] == [alone[0], alone[2]]


def test_one_that_runs_alone_is_tried_again_too(loaded: Loaded) -> None:
    request = requests()[1]
    alone = answered(loaded, request).tokens
    for kind in ("decode", "prefill", "verify"):
        forwards, n = failing(loaded), 0

        def fails(what: str, slot: Slot, kind: str = kind) -> bool:
            nonlocal n
            n += what == kind
            return what == kind and n == 3

        forwards.fails = fails
        assert answered(loaded, request).tokens == alone


def test_logits_that_are_no_numbers_fail_one_request(loaded: Loaded) -> None:
    alone = [answered(loaded, request).tokens for request in requests()]
    forwards = loaded.core._forwards

    class Poisoned(Failing):
        def decode(self, slot: Slot, token: int, **more: Any) -> Logits:
            logits = super().decode(slot, token, **more)
            return logits * float("nan") if slot.id == 1 else logits

    loaded.core._forwards = Poisoned(forwards)  # type: ignore[assignment]
    readers = [Reader(request) for request in requests()]
    readers[1] = Reader(replace(requests()[1], max_tokens=20))  # decodes alone in the end
    served(loaded, readers)
    with pytest.raises(BackendError, match="NaN"):
        readers[1].result()
    assert [readers[i].result().tokens for i in (0, 2)] == [alone[0], alone[2]]


def test_a_request_without_memory_for_its_graphs_fails_alone(loaded: Loaded) -> None:
    long = replace(requests()[0], tokens=tuple(prompt(400)))
    alone = [answered(loaded, request).tokens for request in requests()]
    ledger, readers = loaded.core._ledger, [Reader(request) for request in (*requests()[:2], long)]
    serving = Serving(loaded, lambda: True)
    for reader in readers:
        serving.add(reader)
    while readers[2].state.done < 240:
        serving.turn()
    ledger.caps["CPU"] = ledger.charged("CPU")  # graphs of more cache rows are others
    try:
        while not serving.is_idle:
            serving.turn()
    finally:
        del ledger.caps["CPU"]
    with pytest.raises(DeviceMemoryError, match="graph"):
        readers[2].result()
    assert [reader.result().tokens for reader in readers[:2]] == alone[:2]
    assert len(answered(loaded, long).tokens) == 12


def test_callbacks_that_fail_fail_their_own_request(loaded: Loaded) -> None:
    alone = [answered(loaded, request).tokens for request in requests()]

    def fail(progress: Progress) -> None:
        if progress.done >= CHUNK:
            raise ZeroDivisionError(progress.done)

    readers = [Reader(request) for request in requests()]
    readers[1].progress = fail
    served(loaded, readers)
    with pytest.raises(ZeroDivisionError, match="16"):
        readers[1].result()
    assert [readers[i].result().tokens for i in (0, 2)] == [alone[0], alone[2]]


def test_a_request_that_cannot_begin_is_told_and_frees_its_place(loaded: Loaded) -> None:
    bad = replace(requests()[0], sampling=SamplingOptions(logit_bias={10**6: 1.0}))
    readers = [Reader(bad), *(Reader(request) for request in requests())]
    serving = served(loaded, readers)
    with pytest.raises(UsageError, match="logit_bias"):
        readers[0].result()
    assert all(len(reader.result().tokens) == 12 for reader in readers[1:])
    assert serving.stats().requests == RequestCounts(done=3, failed=1)


def test_only_those_who_share_a_forward_lose_their_states_in_it() -> None:
    """Nine slots decode in three forwards; the states of those in the other two are good."""
    with opened(slots=9, chunk=64, max_ctx=256, spec="off", prefix_cache_max_mib=0) as loaded:
        own = loaded.core._forwards
        own.use(replace(own.batching, rows=4))
        many = [replace(requests()[0], tokens=tuple(prompt(9, seed=i))) for i in range(9)]
        alone = [answered(loaded, request).tokens for request in many]
        forwards, n = failing(loaded, tears=True), 0

        def fails(what: str, slot: Slot) -> bool:
            nonlocal n
            n += what == "decode" and slot.id == 8
            return what == "decode" and slot.id == 8 and n == 3

        forwards.fails = fails
        readers = [Reader(request) for request in many]
        serving = Serving(loaded, lambda: True)
        for reader in readers:
            serving.add(reader)
        while not forwards.n_failures:
            serving.turn()
        assert loaded.core.phases == ("decode",) * 6 + ("prefill",) * 3
        while not serving.is_idle:
            serving.turn()
        assert [reader.result().tokens for reader in readers] == alone


@pytest.mark.parametrize("name", ["begin", "after_forward", "leave"])
def test_a_store_that_fails_costs_no_answer(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("the disk is gone")

    with opened(spec="mtp", spec_width=3) as loaded:
        alone = [answered(loaded, request).tokens for request in requests()]
        monkeypatch.setattr(loaded.core.reuse, name, fail)
        readers = [Reader(request) for request in (*requests(), *requests())]
        left = Reader(replace(requests()[0], tokens=tuple(prompt(300))))
        left.is_enough = lambda: left.state.done >= 2 * CHUNK
        served(loaded, [*readers, left])
        assert [reader.result().tokens for reader in readers] == alone * 2
        assert left.result().finish_reason == "cancelled"
        assert loaded.core.phases == ("free",) * 3
    assert "the disk is gone" in caplog.text
