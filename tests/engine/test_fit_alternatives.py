"""What other options would fit is found with fewer graphs than by a search of its own, and is the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import pytest

from pyggml_dflash.arch import ARCHITECTURES
from pyggml_dflash.engine.fit import SMALLER_TYPES, Planner
from pyggml_dflash.engine.graphs import Forwards
from pyggml_dflash.options import EngineOptions, Spec
from tests.engine.test_fit import N_TRAIN, STEP, planner
from tests.tiny import Tiny, write_tiny

SLOT_COUNTS: Final = (1, 2, 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("alternatives")


def options(folder: Path, architecture: str, *, slots: int = 2) -> EngineOptions:
    """A model of the architecture, with drafts where it can have them."""
    tiny = Tiny(architecture=architecture, n_ctx_train=N_TRAIN)
    drafts: Spec = "mtp" if tiny.has_delta_nets else "off"
    tiny = Tiny(architecture=architecture, n_ctx_train=N_TRAIN, n_mtp=int(drafts == "mtp"))
    path = folder / f"{architecture}.gguf"
    return EngineOptions(
        model=path if path.exists() else write_tiny(folder, tiny),
        max_ctx="auto",
        slots=slots,
        spec=drafts,
        device="CPU",
        threads=1,
    )


@contextmanager
def variants(plans: Planner) -> Iterator[list[Planner]]:
    """Planners for every type of keys and values and number of slots, which know what others measured."""
    with ExitStack() as stack:
        found = [plans.variant(kv, slots, stack) for kv in SMALLER_TYPES for slots in SLOT_COUNTS]
        yield [variant for variant in found if variant is not None]


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_graphs_that_another_planner_measured_are_as_large_as_ones_own(
    architecture: str, folder: Path
) -> None:
    with planner(options(folder, architecture)) as plans, variants(plans) as found:
        for n_ctx in (STEP, N_TRAIN):
            plans.plan_at(n_ctx)
            for variant in found:
                alone = Planner(variant.blueprint, plans._ledger)
                try:
                    (share,), (own,) = variant.plan_at(n_ctx).shares, alone.plan_at(n_ctx).shares
                    assert share.terms == own.terms
                finally:
                    alone.close()


@pytest.mark.parametrize("architecture", ["llama", "qwen4exp"])
@pytest.mark.parametrize("part", [0.0, 0.3, 0.7, 1.0])
def test_the_largest_context_is_the_one_that_a_search_finds(
    architecture: str, part: float, folder: Path
) -> None:
    """With room for a part of what the largest context of all takes."""
    with planner(options(folder, architecture)) as plans:
        like = plans.plan_at(N_TRAIN)
        (least, most) = (sum(plans.plan_at(n).shares[0].terms.values()) for n in (STEP, N_TRAIN))
        plans._free["CPU"] = int(1.2 * (least + part * (most - least)))
        with variants(plans) as found:
            for variant in found:
                variant._free = plans._free
                expected = variant.search(N_TRAIN).plan
                assert variant.largest(N_TRAIN, like) == expected


def test_a_context_without_room_for_its_state_is_no_reason_to_build_graphs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with planner(options(folder, "qwen35")) as plans:
        like = plans.plan_at(STEP)
        plans._free["CPU"] = int(1.36 * sum(like.shares[0].terms.values()))
        contexts: list[int] = []
        needs = Forwards.needs

        def noted(self: Forwards, probe: object) -> int:
            contexts.append(self.n_ctx)
            return needs(self, probe)  # type: ignore[arg-type]

        monkeypatch.setattr(Forwards, "needs", noted)
        found = plans.largest(N_TRAIN, like)
        assert found is not None
        assert contexts == [found.n_ctx]
        contexts.clear()
        assert plans.search(N_TRAIN).plan == found
        assert len(contexts) > 2
