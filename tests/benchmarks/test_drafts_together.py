"""The benchmark of drafts in several slots: its drafts hold as often as asked, and texts stay the same."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner
from drafts_together import main


def test_drafts_hold_as_often_as_asked_and_change_no_text(tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    options = (
        "--slots 2 --holds 0 --holds 1 --width 3 --answer 16 --prompt 8 --repeat 1 --threads 1 --device CPU"
    )
    result = CliRunner().invoke(main, [*options.split(), "--json", str(path)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    sides = json.loads(path.read_text())["sides"]
    assert list(sides) == ["off", "0.0", "1.0"]
    assert all(side["same"] == 2 for side in sides.values())
    assert sides["off"]["verify_steps"] == 0
    assert sides["1.0"]["of_these_shared"] > 0
    assert sides["0.0"]["accepted"] == 0 < sides["0.0"]["drafted"]
    assert sides["1.0"]["accepted"] == sides["1.0"]["drafted"] > 0
