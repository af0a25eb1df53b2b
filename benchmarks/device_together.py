"""Section of `device_check`: slots that decode together on the device give what each gives alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Final

from device_logits import fixtures
from device_report import Report, Setup

from pyggml_dflash import Engine

N_SLOTS: Final = (4, 8)
PROMPTS: Final = tuple([(seed * 7919 + 31 * i * i) % 250 for i in range(5 + 37 * seed)] for seed in range(8))

Answers = list[tuple[tuple[int, ...], tuple[float, ...]]]


def check_together(report: Report, setup: Setup) -> None:
    """Every fixture model: what the probe chose, tokens and log-probabilities alone and at once."""
    for fixture in fixtures(setup.scratch):
        for slots in N_SLOTS:
            what = f"{fixture.name} {fixture.weights}, {slots} slots"
            with Engine.open(
                fixture.path, device=setup.device, max_ctx=512, slots=slots, spec="off"
            ) as engine:
                info = engine.info
                report.details[what] = (info.decode_mode, info.decode_rows, info.decode_reason)
                alone, at_once = answers(engine, 1), answers(engine, slots)
                same = sum(one == other for one, other in zip(alone, at_once, strict=True))
                found = f"{info.decode_mode}, {info.decode_rows} rows, {same} of {len(alone)} equal"
                report.check(what, found, "all equal", same == len(alone))


def answers(engine: Engine, n_at_once: int) -> Answers:
    """Tokens and their log-probabilities, bit by bit, of as many requests at a time."""

    def ask(prompt: list[int]) -> tuple[tuple[int, ...], tuple[float, ...]]:
        result = engine.generate(prompt, max_tokens=24, ignore_eos=True, logprobs=1)
        assert result.logprobs is not None
        return result.tokens, tuple(token.logprob for token in result.logprobs)

    with ThreadPoolExecutor(n_at_once) as pool:
        return list(pool.map(ask, PROMPTS))
