"""Graphs have the forms that ggml's GPU back ends recognise and run as one kernel (ggml-cuda.cu).

A delta net whose states are copied right behind it writes them to their place itself. That needs the copy as
the next node that computes, from all states of the result to a view [size, sequence, state].
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pyggml_dflash.arch.base import Capture, GraphKey, StateUpdate
from pyggml_dflash.ggml.ffi import CData, c_string, lib
from pyggml_dflash.ggml.ops import GraphBuilder
from tests.drafts.drafted import open_target
from tests.reference.stored import model_file

VIEWS = ("NONE", "VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE")


def op(node: CData) -> str:
    return c_string(lib.ggml_op_name(node.op))


def nodes(builder: GraphBuilder) -> list[CData]:
    return [lib.ggml_graph_node(builder.graph, i) for i in range(builder.n_nodes)]


@pytest.mark.parametrize(
    ("update", "width"), [("commit", 1), ("commit", 5), ("snapshots", 1), ("snapshots", 6)]
)
def test_states_are_copied_right_behind_the_recurrence(
    update: StateUpdate, width: int, tmp_path: Path
) -> None:
    key = GraphKey(n_tokens=width, n_kv=256, slot=0, output="all", update=update)
    with open_target(model_file("qwen35-tiny", "F32", tmp_path)) as target:
        net = target.config.delta_net
        assert net is not None
        with target.recording(Capture(), "snapshots") as forwards:
            builder, _ = forwards._build(key, forwards._inputs.few)
            found = nodes(builder)
            recurrences = [i for i, node in enumerate(found) if op(node) == "GATED_DELTA_NET"]
            assert len(recurrences) == sum(target.config.recurrent)
            for i in recurrences:
                copy = next(node for node in found[i + 1 :] if op(node) not in VIEWS)
                n_states = width if update == "snapshots" else 1
                size, row = net.head_dim * net.value_dim, 4 * net.head_dim * net.value_dim
                assert op(copy) == "CPY"
                assert copy.src[0].view_src == found[i]
                assert copy.src[0].view_offs == 4 * net.value_dim * width
                assert op(copy.src[1]) == "VIEW"
                assert list(copy.src[1].ne) == [size, 1, n_states, 1]
                assert list(copy.src[1].nb)[:2] == [4, row]
            builder.close()


def test_states_of_several_slots_are_copied_right_behind_their_recurrences(tmp_path: Path) -> None:
    with open_target(model_file("qwen35-tiny", "F32", tmp_path), n_slots=3) as target:
        net = target.config.delta_net
        assert net is not None
        with target.recording(Capture(), "snapshots") as forwards:
            keys = tuple(GraphKey(n_tokens=1, n_kv=256, slot=i, output="last") for i in range(3))
            builder = forwards.builder(GraphKey.batch(keys))
            found = nodes(builder)
            recurrences = [i for i, node in enumerate(found) if op(node) == "GATED_DELTA_NET"]
            assert len(recurrences) == 3 * sum(target.config.recurrent)
            for i in recurrences:
                copy = next(node for node in found[i + 1 :] if op(node) not in VIEWS)
                assert op(copy) == "CPY"
                assert copy.src[0].view_src == found[i]
                assert copy.src[0].view_offs == 4 * net.value_dim
                assert list(copy.src[1].ne) == [net.head_dim * net.value_dim, 1, 1, 1]
            builder.close()
