"""Forwards end where the prompt alone says, and states are stored where the next request can use them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyggml_dflash.ggml.gguf import GgufFile
from pyggml_dflash.model.tokenizer import Tokenizer
from pyggml_dflash.state.cuts import (
    LAST,
    LONG,
    MAX_BOUNDARIES,
    CapturePoint,
    PromptEnds,
    TurnMarkers,
    capture_points,
    cut_points,
    forward_ends,
    holds_answer,
    prompt_ends,
    turn_boundaries,
)
from tests.engine.tiny import QWEN35

CHATML = TurnMarkers(frozenset({1}), frozenset({2}))
ROLES = TurnMarkers(frozenset({1, 3}), frozenset())
TOKENS = st.lists(st.sampled_from([0, 0, 0, 1, 2, 5]), max_size=80)


@pytest.mark.parametrize(
    ("tokens", "boundaries"),
    [
        ([1, 5, 5, 2, 9, 1, 6, 5], [6]),  # <s>sys..</s>\n<s>user
        ([1, 5, 2, 9, 1, 6, 2, 9, 1, 7, 2, 9, 1, 6], [5, 9, 13]),
        ([2, 9, 2, 1, 5, 2, 1], [7]),  # ends before the first turn are stray
        ([1, 5, 2, 9, 9, 9, 9, 1, 6], [8]),  # a turn begins within five tokens
        ([1, 5, 2, 9, 9, 9, 9, 9, 1, 6], []),
        ([1, 5, 2, 5, 2, 1], [6]),  # the newest end counts
        ([1, 5, 1, 6, 2, 1], [6]),  # a turn that never ended
        ([1, 2, 1, 2, 1], [3, 5]),
        ([5, 5, 5], []),
        ([], []),
    ],
)
def test_a_boundary_is_behind_the_token_that_begins_the_next_turn(
    tokens: list[int], boundaries: list[int]
) -> None:
    assert turn_boundaries(tokens, CHATML) == boundaries


@pytest.mark.parametrize(
    ("tokens", "markers", "whole"),
    [
        (
            [1, 5, 2, 9, 1, 7, 5, 2, 9, 1, 5, 2, 9, 1, 7],
            CHATML,
            10,
        ),  # user, answer, user, and what is asked for
        ([1, 5, 2, 9, 1, 7], CHATML, None),  # the first answer
        ([1, 5, 2, 9, 1, 6, 2, 9, 1, 7], CHATML, None),  # turns of others alone
        ([1, 5, 2, 9, 1, 7, 2, 9, 1, 6, 2, 9, 1], CHATML, None),  # no role is named at the end
        ([5, 5, 5], CHATML, None),
        ([], CHATML, None),
        ([1, 5, 3, 6, 1, 5, 3], ROLES, 5),  # nothing ends a turn but the next one
        ([1, 5, 1, 6, 3], ROLES, None),
    ],
)
def test_an_answer_is_held_once_the_turn_behind_it_has_begun(
    tokens: list[int], markers: TurnMarkers, whole: int | None
) -> None:
    boundaries = turn_boundaries(tokens, markers)
    held = [n for n in range(len(tokens) + 1) if holds_answer(tokens, boundaries, n, markers)]
    assert held == ([] if whole is None else list(range(whole, len(tokens) + 1)))


def test_without_ends_every_role_is_a_boundary() -> None:
    assert turn_boundaries([5, 1, 5, 3, 5, 5, 1], ROLES) == [2, 4, 7]
    assert len(turn_boundaries([1] * 10_000, ROLES)) == MAX_BOUNDARIES


@pytest.mark.parametrize(
    ("vocabulary", "found"),
    [
        ({"<|im_start|>": 4, "<|im_end|>": 5}, ({4}, {5})),
        ({"<|start_header_id|>": 4, "<|eot_id|>": 5}, ({4}, {5})),
        ({"<start_of_turn>": 4, "<end_of_turn>": 5}, ({4}, {5})),
        ({"<｜User｜>": 4, "<｜Assistant｜>": 5}, ({4, 5}, set())),
        ({"<｜User｜>": 4}, None),
        ({"<|im_start|>": 4}, None),
        ({}, None),
    ],
)
def test_markers_are_those_of_the_vocabulary(
    vocabulary: dict[str, int], found: tuple[set[int], set[int]] | None
) -> None:
    markers = TurnMarkers.of(vocabulary.get)
    assert markers == (None if found is None else TurnMarkers(frozenset(found[0]), frozenset(found[1])))


def test_turns_of_a_rendered_conversation_are_found() -> None:
    with GgufFile.open(QWEN35) as file:
        tokenizer = Tokenizer.from_metadata(file.metadata)
    markers = TurnMarkers.of(tokenizer.find)
    assert markers is not None
    text = "".join(
        f"<|im_start|>{role}\nwords{'<|im_end|>' if role != 'assistant' else ''}\n"
        for role in ("system", "user", "assistant")
    )
    tokens = tokenizer.encode(text, parse_special=True)
    starts = [i for i, token in enumerate(tokens) if token == tokenizer.find("<|im_start|>")]
    assert len(starts) == 3
    assert turn_boundaries(tokens, markers) == [i + 1 for i in starts[1:]]


@pytest.mark.parametrize(
    ("n", "boundaries", "cuts"),
    [
        (10_000, [], [4096, 8192]),
        (4096, [], []),
        (4097, [], [4096]),
        (10_000, [15, 16, 20, 5000, 5015, 5031, 4095], [16, 4095, 5000, 5031, 8192]),
        (100, [50, 99, 100, 200], [50, 99]),
        (5, [], []),
    ],
)
def test_cuts_are_boundaries_and_multiples_apart_from_each_other(
    n: int, boundaries: list[int], cuts: list[int]
) -> None:
    assert cut_points(n, boundaries) == cuts


@given(
    text=TOKENS, more=TOKENS, spacing=st.integers(3, 40), least=st.integers(1, 6), limit=st.integers(1, 30)
)
def test_a_prompt_that_goes_on_has_the_ends_of_its_beginning(
    text: list[int], more: list[int], spacing: int, least: int, limit: int
) -> None:
    def ends(tokens: list[int]) -> list[int]:
        boundaries = turn_boundaries(tokens, CHATML)
        cuts = cut_points(len(tokens), boundaries, spacing=spacing, min_cut=least)
        return forward_ends(len(tokens), cuts, limit)

    short, long = ends(text), ends(text + more)
    assert short[:-1] == [end for end in long if end < len(text)]
    for found, n in ((short, len(text)), (long, len(text + more))):
        sizes = [b - a for a, b in zip([0, *found], found, strict=False)]
        assert found[-1] == n
        assert all(0 < size <= limit for size in sizes) or n == 0


@pytest.mark.parametrize(
    ("n", "boundaries", "limit", "own"),
    [
        (16_384, [], 2048, 16_320),
        (16_384, [], 512, 16_320),
        (16_384, [16_381], 2048, 0),  # a chat's last forward is short
        (16_384, [16_000], 2048, 16_320),
        (16_384 + 127, [], 2048, 0),  # so is that behind a cut
        (16_384 + 128, [], 2048, 16_384 + 64),
        (LONG, [], 2048, 4032),
        (LONG - 1, [], 2048, 0),
        (100_000, [], 2048, 99_840),
    ],
)
def test_a_long_prompt_has_an_end_of_its_own_shortly_before_its_end(
    n: int, boundaries: list[int], limit: int, own: int
) -> None:
    ends = prompt_ends(n, boundaries, limit)
    assert ends.own == own
    assert ends.shared == tuple(forward_ends(n, cut_points(n, boundaries), limit))
    assert set(ends.all) - set(ends.shared) == ({own} if own else set())


LENGTHS = st.integers(LONG, 40_000)


@given(n=LENGTHS, boundaries=st.sets(st.integers(1, 40_000), max_size=5), limit=st.integers(16, 4096))
def test_little_of_a_long_prompt_lies_behind_the_end_before_its_last(
    n: int, boundaries: set[int], limit: int
) -> None:
    found = prompt_ends(n, sorted(boundaries), limit)
    ends = found.all
    assert list(ends) == sorted(set(ends))
    assert ends[-1] - ends[-2] < LAST + n / 256 <= 0.02 * n
    assert all(b - a <= limit for a, b in zip((0, *ends), ends, strict=False))
    if found.own:
        assert ends[-1] - ends[-2] >= LAST


@given(
    n=LENGTHS,
    more=st.integers(0, 3000),
    boundaries=st.sets(st.integers(1, 43_000), max_size=5),
    limit=LENGTHS,
)
def test_prompts_with_the_same_own_end_have_the_same_ends_before_it(
    n: int, more: int, boundaries: set[int], limit: int
) -> None:
    """So that a state from there was made by the forwards of the one that continues it."""
    one, other = (prompt_ends(m, sorted(boundaries), limit % 2048 + 1) for m in (n, n + more))
    assert one.shared[:-1] == tuple(end for end in other.shared if end < n)
    if one.own and one.own == other.own:
        assert [e for e in one.all if e <= one.own] == [e for e in other.all if e <= one.own]
    if one.own and more == 0:
        assert one == other


def points(
    n: int, boundaries: list[int], *, n_restored: int = 0, n_common: int = 0, tools: bool = False
) -> list[tuple[int, bool]]:
    ends = prompt_ends(n, boundaries, 512)
    found = capture_points(
        n, boundaries, ends, n_restored=n_restored, n_common=n_common, has_tools=tools, chunk=512
    )
    assert all(isinstance(point, CapturePoint) for point in found)
    return [(point.position, point.protect) for point in found]


@pytest.mark.parametrize(
    ("n", "boundaries", "options", "expected"),
    [
        # the boundary before the newest turn: system, then user and assistant
        (300, [100, 290], {}, [(100, False)]),
        (900, [100, 400, 700, 890], {}, [(700, False)]),
        (900, [100, 400, 700, 890], {"n_restored": 400}, [(700, False)]),
        (900, [100, 400, 700, 890], {"n_restored": 700}, []),
        # a chat that begins with the user has the last one only
        (120, [110], {}, [(110, False)]),
        # a newest turn longer than a chunk is worth a state of its own
        (900, [100, 890], {}, [(100, False), (890, False)]),
        # a long tail behind a short head: the last boundary instead
        (6000, [100, 5990], {}, [(5990, False)]),
        (9000, [3000, 8990], {}, [(3000, False), (8990, False)]),
        # tools: the head that all conversations share is protected
        (900, [300, 600, 890], {"tools": True}, [(300, True), (600, False)]),
        (900, [300, 600, 890], {"tools": True, "n_restored": 300}, [(600, False)]),
        (600, [300, 590], {"tools": True}, [(300, True)]),
        # without turns: the last end before the prompt's
        (300, [], {}, []),
        (1300, [], {}, [(1024, False)]),
        (1024, [], {}, [(512, False)]),
        (4000, [], {}, [(3584, False)]),
        # and the end that a long one has for itself, a few tokens before its end
        (5000, [], {}, [(4608, False), (4928, False)]),
        (5000, [], {"n_restored": 4608}, [(4928, False)]),
        (5000, [], {"n_restored": 4928}, []),
        (4620, [], {}, [(4608, False)]),
        # the newest turn of a long chat need not be as long as a chunk
        (6000, [100, 3000, 5700, 5990], {}, [(5700, False), (5990, False)]),
        (6000, [100, 3000, 5920, 5990], {}, [(5920, False)]),
        (6000, [100, 3000, 5700], {}, [(3000, False), (5700, False), (5924, False)]),
        (6000, [100, 3000], {}, [(3000, False), (5632, False), (5936, False)]),
        # where the prompt leaves what is stored, rounded down to an end
        (2000, [], {"n_common": 700}, [(512, False), (1536, False)]),
        (2000, [], {"n_common": 511}, [(1536, False)]),
        (2000, [], {"n_common": 2000}, [(1536, False)]),
        (900, [100, 890], {"n_restored": 100, "n_common": 800}, [(612, False), (890, False)]),
        (1, [], {}, []),
    ],
)
def test_states_are_stored_where_another_request_can_use_them(
    n: int, boundaries: list[int], options: dict[str, object], expected: list[tuple[int, bool]]
) -> None:
    assert points(n, boundaries, **options) == expected  # type: ignore[arg-type]


@given(text=TOKENS, n_restored=st.integers(0, 80), n_common=st.integers(0, 90), tools=st.booleans())
def test_states_are_stored_behind_what_was_restored_and_before_the_last_token(
    text: list[int], n_restored: int, n_common: int, tools: bool
) -> None:
    boundaries = turn_boundaries(text, CHATML)
    ends = PromptEnds(
        tuple(forward_ends(len(text), cut_points(len(text), boundaries, spacing=20, min_cut=3), 7))
    )
    found = capture_points(
        len(text), boundaries, ends, n_restored=n_restored, n_common=n_common, has_tools=tools
    )
    positions = [point.position for point in found]
    assert positions == sorted(set(positions))
    assert all(n_restored < p < len(text) and p in ends.all for p in positions)
