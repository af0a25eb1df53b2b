"""`dflash inspect`, and the report behind it: every byte of a file is accounted for, run or not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from dflash_cli.main import cli

from pyggml_dflash import Engine, UsageError
from pyggml_dflash.api import inspect_model
from pyggml_dflash.engine.report import tensor_kind
from pyggml_dflash.ggml.gguf import GgufFile
from pyggml_dflash.ggml.gguf_writer import GgufWriter
from tests.cli.dflash_command import PICO, dflash, told


@pytest.fixture
def unknown_model(tmp_path: Path) -> Path:
    """A sound file of an architecture that nobody runs, with a name that would clear a terminal."""
    writer = GgufWriter()
    writer.set("general.architecture", "abacus")
    writer.set("general.name", "beads\x1b[2J")
    writer.set("abacus.block_count", 1)
    writer.set("abacus.rows", list(range(9)))
    writer.add_tensor("token_embd.weight", np.zeros((10, 32), np.float32))
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((32, 32), np.float16))
    writer.add_tensor("blk.0.bead.weight", np.zeros((4,), np.float32))
    (path,) = writer.write(tmp_path / "abacus.gguf")
    return path


def test_kinds_and_types_account_for_every_tensor() -> None:
    report = inspect_model(PICO)
    with GgufFile.open(PICO) as file:
        n_bytes = sum(t.n_bytes for t in file.tensors.values())
        n_params = sum(t.n_elements for t in file.tensors.values())
        n_tensors = len(file.tensors)
    for shares in (report.kinds, report.types):
        assert sum(share.n_bytes for share in shares) == n_bytes
        assert sum(share.n_params for share in shares) == n_params == report.n_params
        assert sum(share.n_tensors for share in shares) == n_tensors == len(report.tensors)


def test_the_shipped_model_is_described_as_its_card_has_it() -> None:
    report = inspect_model(PICO)
    assert (report.architecture, report.name, report.supported) == ("qwen35", "pico", True)
    sizes = report.sizes
    assert sizes is not None
    assert (sizes.n_layer, sizes.n_draft_layer, sizes.n_attention_layer) == (12, 1, 3)
    assert (sizes.n_embd, sizes.n_head, sizes.n_head_kv, sizes.head_dim) == (256, 4, 2, 64)
    assert (sizes.n_vocab, sizes.n_ctx_train) == (4096, 8192)


@pytest.mark.parametrize("n_ctx", [300, None])
def test_state_bytes_are_those_that_an_engine_allocates(n_ctx: int | None) -> None:
    state = inspect_model(PICO, n_ctx=n_ctx, cache_type_k="q8_0").state
    assert state is not None
    with Engine.open(PICO, max_ctx=n_ctx, cache_type_k="q8_0", threads=1) as engine:
        assert (state.n_bytes, state.n_ctx) == (engine.info.state_bytes, engine.info.n_ctx)


def test_a_context_that_the_model_cannot_have_is_refused() -> None:
    with pytest.raises(UsageError, match="max_ctx is 8193"):
        inspect_model(PICO, n_ctx=8193)
    done = CliRunner().invoke(cli, ["inspect", str(PICO), "--ctx", "9k"])
    assert done.exit_code == 2


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("token_embd.weight", "embedding"),
        ("output.weight", "head"),
        ("output_norm.weight", "norms and other"),
        ("rope_freqs.weight", "norms and other"),
        ("blk.0.attn_norm.weight", "norms and other"),
        ("blk.0.ssm_norm.weight", "norms and other"),
        ("blk.0.ssm_out.weight", "delta net"),
        ("blk.0.attn_qkv.weight", "delta net"),
        ("blk.1.attn_qkv.weight", "attention"),
        ("blk.1.attn_output.bias", "attention"),
        ("blk.0.ffn_down.weight", "feed-forward"),
        ("blk.0.ffn_gate_exps.weight", "experts"),
        ("blk.0.ffn_up_shexp.weight", "experts"),
        ("blk.0.ffn_gate_inp.weight", "experts"),
        ("blk.2.ffn_down.weight", "draft block"),
        ("blk.2.nextn.eh_proj.weight", "draft block"),
        ("nextn.eh_proj.weight", "draft block"),
        ("mystery", "norms and other"),
    ],
)
def test_a_tensor_is_counted_where_it_is_used(name: str, kind: str) -> None:
    assert tensor_kind(name, trunk=2, recurrent={0}) == kind


def test_a_file_of_an_unknown_architecture_is_shown_with_the_reason(unknown_model: Path) -> None:
    report = inspect_model(unknown_model)
    assert not report.supported
    assert report.reason is not None
    assert "'abacus' is not supported" in report.reason
    assert (report.sizes, report.state) == (None, None)
    assert {share.name: share.n_tensors for share in report.kinds} == {
        "embedding": 1,
        "attention": 1,
        "norms and other": 1,
    }
    assert report.metadata["abacus.block_count"] == 1
    assert report.metadata["abacus.rows"] == "array of 9 i32: 0, 1, 2, 3, 4, 5, ..."


def test_what_a_file_says_cannot_steer_the_terminal(unknown_model: Path) -> None:
    done = dflash("inspect", str(unknown_model), "--metadata", "--tensors")
    assert done.code == 0
    assert "\x1b" not in done.out
    assert r"beads\x1b[2J" in done.out
    assert "blk.0.bead.weight" in done.out


def test_json_lists_tensors_and_metadata_on_demand() -> None:
    short = dflash("inspect", str(PICO), "--json", "--ctx", "1k").json
    assert not {"tensors", "metadata"} & set(short)
    assert short["state"]["n_ctx"] == 1024
    assert short["sizes"]["n_layer"] == 12
    full = dflash("inspect", str(PICO), "--json", "--tensors", "--metadata").json
    assert full["metadata"]["general.architecture"] == "qwen35"
    assert len(full["tensors"]) == sum(share["n_tensors"] for share in full["types"])


def test_without_a_model_the_shipped_one_is_shown() -> None:
    done = dflash("inspect")
    assert done.code == 0
    assert done.out == told("inspect", str(PICO))
    assert done.err.startswith("dflash: no MODEL given")


def test_a_file_that_is_cut_exits_3(tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(PICO.read_bytes()[:-1])
    done = dflash("inspect", str(path))
    assert (done.code, done.out) == (3, "")
    assert "tensor" in done.err
