"""The benchmark of prompts that share forwards: it runs both ways and says what they come to."""

from __future__ import annotations

from click.testing import CliRunner
from prompt_cost import main


def test_prompts_are_timed_alone_and_together() -> None:
    options = "--slots 3 --rows 4 --rows 90 --repeat 2 --threads 1 --device CPU"
    result = CliRunner().invoke(main, options.split(), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "share forwards of up to 64 rows" in result.output
    assert result.output.count(" together ") == 2
