"""The snapshot benchmark: states of real shapes go in and out, and its layout is the architecture's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from model_shapes import PRESETS, tiny
from random_model import write_model
from snapshot_rates import layout_of, main

from pyggml_dflash.arch import architecture_of
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.gguf import GgufFile


@pytest.mark.parametrize("preset", ["qwen35-27b", "qwen3-4b"])
def test_its_layout_is_that_of_a_model_of_the_shape(preset: str, tmp_path: Path) -> None:
    shape, path = tiny(PRESETS[preset]), tmp_path / "model.gguf"
    write_model(path, shape, "Q8_0")
    with GgufFile.open(path) as file:
        name, architecture = architecture_of(file)
        config = architecture.read_config(file, name)
        expected = architecture.state_layout(config, 256, ElementType.F16, ElementType.F16)
    found = layout_of(shape, 256, ElementType.F16)
    assert {t.name: t for t in found.tensors} == {t.name: t for t in expected.tensors}


def test_every_length_is_measured(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    lengths = ["--tokens", "1", "--tokens", "200"]
    fixed = ["--small", "--device", "CPU", "--context", "256", "--repeat", "2", "--json", str(out)]
    result = CliRunner().invoke(main, [*lengths, *fixed])
    assert result.exit_code == 0, result.output
    rates = json.loads(out.read_text())
    assert [(rate["memory"], rate["tokens"]) for rate in rates] == [("own", 1), ("own", 200)]
    assert all(rate["capture_gbs"] > 0 and rate["restore_ms"]["median"] > 0 for rate in rates)
    assert rates[0]["n_bytes"] < rates[1]["n_bytes"]


def test_lengths_beyond_the_context_are_refused() -> None:
    result = CliRunner().invoke(main, ["--small", "--device", "CPU", "--context", "256", "--tokens", "257"])
    assert result.exit_code == 2
    assert "do not fit" in result.output
