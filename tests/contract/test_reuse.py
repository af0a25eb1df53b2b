"""Answers do not depend on what is stored: requests that continue stored states equal cold ones, bit by bit.

The flow of a server, for every architecture: restore, run the rest of the prompt, capture on the way, decode
greedily.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from pyggml_dflash.arch import ARCHITECTURES
from pyggml_dflash.engine.reuse import Reuse, StoreLimits
from pyggml_dflash.state.cuts import TurnMarkers, prompt_ends, turn_boundaries
from pyggml_dflash.state.fingerprint import fingerprint
from pyggml_dflash.state.prefix_cache import PrefixCache
from pyggml_dflash.state.prefix_match import Match
from pyggml_dflash.state.slot import Slot
from pyggml_dflash.state.snapshot import Snapshot
from tests.reference.opened import Floats, Parts, assembled, on_the_cpu
from tests.tiny import Tiny, tokens, write_tiny

CHUNK = 64
START, END, LINE = 250, 251, 10
MARKERS = TurnMarkers(frozenset({START}), frozenset({END}))


@pytest.fixture(scope="module", params=sorted(ARCHITECTURES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("reuse"), Tiny(architecture=request.param))


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request got, and how it was served."""

    tokens: list[int]
    logits: Floats  # behind the prompt
    match: Match
    n_run: int  # prompt tokens that ran


@dataclass(slots=True)
class Server:
    """Serves one request after the other in one slot."""

    parts: Parts
    reuse: Reuse
    slot: Slot

    @property
    def cache(self) -> PrefixCache[Snapshot]:
        return self.reuse.cache

    def ask(self, prompt: list[int], n_answer: int = 6) -> Answer:
        """The greedy answer to a prompt."""
        slot, reuse = self.slot, self.reuse
        slot.reset()
        boundaries = turn_boundaries(prompt, MARKERS)
        ends = prompt_ends(len(prompt), boundaries, CHUNK)
        continued = reuse.begin(slot, prompt, boundaries=boundaries, ends=ends)
        assert slot.n_past == continued.match.n_reused
        for end in ends.all:
            if end <= slot.n_past:
                continue
            part = prompt[slot.n_past : end]
            logits = self.parts.forwards.prefill(slot, part, "last")
            slot.commit(len(part))
            reuse.after_forward(continued, slot)
        assert logits is not None
        answer = [int(logits[0].argmax())]
        while len(answer) < n_answer:
            answer.append(int(self.parts.forwards.decode(slot, answer[-1]).argmax()))
            slot.commit(1)
        return Answer(answer, logits[0], continued.match, len(prompt) - continued.match.n_reused)


@contextmanager
def served(
    model: Path, *, limit: int = 2**30, most: int = 32, folder: Path | None = None, slot: int = 0
) -> Iterator[Server]:
    """A server; with a folder, states that have to go are kept there."""
    with assembled(on_the_cpu(model, max_ctx=1024, chunk=CHUNK), n_slots=2) as parts:
        mark = fingerprint(b"model", parts.slots.layout, {"chunk": CHUNK})
        limits = StoreLimits(n_bytes=limit, n_entries=most, folder=folder, folder_bytes=2**30)
        reuse = Reuse(parts.ledger, limits, fingerprint=mark)
        reuse.bind(parts.slots, parts.backend, chunk=CHUNK)
        yield Server(parts, reuse, parts.slots.slots[slot])
        reuse.close()
        assert parts.ledger.by_label("CPU").get("snapshots", 0) == 0
        assert not reuse.stats().capture_failures


def assert_same(found: Answer, cold: Answer) -> None:
    np.testing.assert_array_equal(found.logits, cold.logits)
    assert found.tokens == cold.tokens


def cold(model: Path, prompts: list[list[int]]) -> list[Answer]:
    """Each prompt with nothing stored."""
    found = []
    with served(model) as server:
        for prompt in prompts:
            server.cache.clear()
            found.append(server.ask(prompt))
            assert found[-1].match.tier is None
    return found


def turn(role: int, text: list[int]) -> list[int]:
    return [START, role, LINE, *text, END, LINE]


def conversation(n_turns: int, *, system: int = 0) -> list[list[int]]:
    """Prompts of a conversation that only grows; `system`: tokens of a system message."""
    history = turn(1, tokens(system, seed=50)) if system else []
    prompts = []
    for i in range(n_turns):
        history = history + turn(2, tokens(11 + 3 * i, seed=60 + i, n_vocab=200))
        prompts.append([*history, START, 3, LINE])
        history = history + turn(3, tokens(9 + 2 * i, seed=80 + i, n_vocab=200))
    return prompts


@pytest.mark.parametrize(("n_turns", "system"), [(12, 0), (4, 40)])
def test_turns_that_continue_stored_states_equal_cold_ones(model: Path, n_turns: int, system: int) -> None:
    """Twelve turns (B16), begun by the user (B14); what is new runs, and at most a chunk (B15)."""
    prompts = conversation(n_turns, system=system)
    expected = cold(model, prompts)
    with served(model) as server:
        for i, (prompt, answer) in enumerate(zip(prompts, expected, strict=True)):
            found = server.ask(prompt)
            assert_same(found, answer)
            assert (found.match.tier is not None) == (i > 0)
            if i > 0:
                n_new = len(prompt) - len(prompts[i - 1])
                assert found.n_run <= n_new + CHUNK
        assert server.cache.counters.hits == {"memory": n_turns - 1}
        assert len(server.cache.entries) <= 3


def test_questions_behind_one_head_do_not_get_each_others_answers(model: Path) -> None:
    """One slot, a shared head, four questions, asked twice (B09)."""
    head = turn(1, tokens(28, seed=40))
    prompts = [
        [*head, *turn(2, tokens(15, seed=seed, n_vocab=200)), START, 3, LINE] for seed in (41, 42, 43, 44)
    ]
    expected = cold(model, prompts)
    assert len({tuple(answer.tokens) for answer in expected}) > 1
    with served(model, slot=1) as server:
        for n, (prompt, answer) in enumerate([*zip(prompts, expected, strict=True)] * 2):
            found = server.ask(prompt)
            assert_same(found, answer)
            assert found.match.n_reused == (0 if n == 0 else len(head) + 1)


@pytest.mark.parametrize("limit_in_states", [0, 2])
def test_answers_do_not_depend_on_the_limit(model: Path, limit_in_states: int) -> None:
    prompts = [*conversation(3), *conversation(3, system=30), *conversation(4)[1:]]
    expected = cold(model, prompts)
    with served(model) as server:
        limit = limit_in_states * server.reuse.store.estimate(100) + 1
    with served(model, limit=limit) as server:
        for prompt, answer in zip(prompts, expected, strict=True):
            assert_same(server.ask(prompt), answer)
            assert server.cache.n_bytes <= limit
        assert server.cache.counters.skipped or limit_in_states > 1


def test_prompts_that_share_a_beginning_reuse_it(model: Path) -> None:
    """Seven tenths shared, cut at a turn that is no multiple of the chunk (B12)."""
    shared = turn(1, tokens(205, seed=45))
    a, b = ([*shared, *turn(2, tokens(80, seed=seed, n_vocab=200)), START, 3, LINE] for seed in (46, 47))
    expected = cold(model, [a, b])
    with served(model) as server:
        assert_same(server.ask(a), expected[0])
        found = server.ask(b)
        assert_same(found, expected[1])
        assert found.match.n_reused == len(shared) + 1


@pytest.mark.parametrize("n_shared", [100, 480])
def test_prompts_without_turns_reuse_all_but_a_chunk(model: Path, n_shared: int) -> None:
    """With recurrent state the second finds none in what is shared, and leaves one for the third (B22)."""
    shared = tokens(n_shared, seed=48)
    prompts = [[*shared, *tokens(150, seed=seed)] for seed in (51, 52, 53)]
    expected = cold(model, prompts)
    with served(model) as server:
        found = [server.ask(prompt) for prompt in prompts]
        for answer, again in zip(expected, found, strict=True):
            assert_same(again, answer)
        rows_only = server.reuse.store.has_rows_only
        why = "differs" if rows_only else "no snapshot between"
        assert [answer.match.stop for answer in found[:2]] == ["nothing stored", why]
        assert found[1].match.n_common == n_shared
        for answer in found[1 if rows_only else 2 :]:
            assert answer.match.n_reused >= n_shared - CHUNK
        longer = [*prompts[0], *tokens(30, seed=54)]
        match = server.ask(longer).match
        assert match.n_reused >= len(prompts[0]) - CHUNK
        assert match.stop == "end of what is stored"


def test_states_in_a_folder_serve_another_process(model: Path, tmp_path: Path) -> None:
    """Only what is new runs (B17); the hit is the folder's, once, and memory has the state then (B23)."""
    prompt = [*conversation(4)[3], 7, 7, 7, 7, 7]
    (expected,) = cold(model, [prompt])
    with served(model, folder=tmp_path) as server:
        server.ask(conversation(4)[3])
        cut = server.reuse.list()[-1].n_past
    for n_runs in (1, 2):
        with served(model, folder=tmp_path) as server:
            for _ in range(n_runs):
                found = server.ask(prompt)
                assert_same(found, expected)
                assert (found.match.n_reused, found.n_run) == (cut, len(prompt) - cut)
            hits = server.cache.counters.hits
            assert (hits["disk"], hits["memory"]) == (1, n_runs - 1)
            assert not server.cache.counters.misses


def test_a_damaged_file_gives_the_cold_answer(model: Path, tmp_path: Path) -> None:
    prompt = conversation(3)[2]
    (expected,) = cold(model, [prompt])
    with served(model, folder=tmp_path) as server:
        server.ask(prompt)
    for path in tmp_path.glob("*.dfsnap"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        path.write_bytes(data)
    with served(model, folder=tmp_path) as server:
        found = server.ask(prompt)
        assert_same(found, expected)
        assert found.match.tier is None
        assert sum(server.cache.counters.unusable.values()) > 0
