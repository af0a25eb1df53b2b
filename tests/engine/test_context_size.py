"""B05: a prompt costs the same in a small and a large context: attention reads the rows that are filled."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Final

import pytest

from pyggml_dflash.engine.graph_cache import GraphCache
from pyggml_dflash.engine.inputs import bucketed
from pyggml_dflash.engine.loader import load
from pyggml_dflash.ggml.ffi import c_string, lib
from pyggml_dflash.ggml.graph import StepGraph
from pyggml_dflash.ggml.ops import GraphBuilder
from pyggml_dflash.ggml.tensor import Tensor
from pyggml_dflash.options import EngineOptions
from tests.tiny import Tiny, tokens, write_tiny

SMALL: Final = 4 * 1024
LARGE: Final = 64 * 1024
N_PROMPT: Final = 2048
CHUNK: Final = 512
Shape = tuple[int, int, int, int]
Node = tuple[str, Shape, tuple[Shape, ...]]
NAMES_ONLY: Final = ("VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE")  # move no data
WRITES: Final = "SET_ROWS"  # has the whole cache as its result, of which it touches a few rows


@pytest.fixture(scope="module", params=["qwen35", "qwen4exp", "llama"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny = Tiny(architecture=request.param, n_ctx_train=LARGE)
    return write_tiny(tmp_path_factory.mktemp("sizes"), tiny)


def nodes(builder: GraphBuilder) -> list[Node]:
    """Every operation that reads: its name, its result's shape, and the shapes of what it reads."""
    found = []
    for i in range(builder.n_nodes):
        node = lib.ggml_graph_node(builder.graph, i)
        op = c_string(lib.ggml_op_name(node.op))
        if op not in (*NAMES_ONLY, WRITES):
            read = tuple(Tensor(source).shape for source in node.src if source)
            found.append((op, Tensor(node).shape, read))
    return found


def graphs_of_a_prompt(model: Path, n_ctx: int, monkeypatch: pytest.MonkeyPatch) -> list[list[Node]]:
    """The operations of each forward: a prompt's chunks and a decoded token."""
    found: list[list[Node]] = []
    once = GraphCache.once

    def noted(self: GraphCache, builder: GraphBuilder, outputs: tuple[Tensor, ...]) -> StepGraph:
        found.append(nodes(builder))
        return once(self, builder, outputs)

    options = EngineOptions(model=model, max_ctx=n_ctx, chunk=CHUNK, device="CPU", threads=1, spec="off")
    core = load(options, lambda _: None).core
    with closing(core), monkeypatch.context() as patch:
        patch.setattr(GraphCache, "once", noted)
        ids, slot = tokens(N_PROMPT, seed=5), core.slots[0]
        for start in range(0, N_PROMPT, CHUNK):
            core.prefill(slot, ids[start : start + CHUNK], last=start + CHUNK == N_PROMPT)
        core.decode(slot, 7)
    return found


def test_a_prompt_runs_the_same_operations_in_a_small_and_in_a_large_context(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large = (graphs_of_a_prompt(model, n_ctx, monkeypatch) for n_ctx in (SMALL, LARGE))
    assert len(small) == N_PROMPT // CHUNK + 1
    assert small == large
    for i, graph in enumerate(large[:-1]):
        keys = {read[1][1] for op, _, read in graph if op == "FLASH_ATTN_EXT"}
        filled = bucketed(CHUNK * (i + 1))
        assert keys == {filled} or ("qwen4exp" in model.name and max(keys) < filled)  # which chooses rows
