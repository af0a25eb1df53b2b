"""What goes into the wheel and the source package."""

from __future__ import annotations

from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parents[1]
SHIPPED = {f"pyggml_dflash/models/pico-{name}q8_0.gguf" for name in ("", "dflash-")}


@pytest.mark.parametrize("builder", [WheelBuilder, SdistBuilder])
def test_the_shipped_model_goes_with_its_draft(builder: type[WheelBuilder] | type[SdistBuilder]) -> None:
    packed = {file.distribution_path for file in builder(str(ROOT)).recurse_included_files()}
    assert {name for name in packed if name.endswith(".gguf") and "tests" not in name} == SHIPPED
