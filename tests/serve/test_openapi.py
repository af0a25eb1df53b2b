"""What the OpenAPI document promises is kept, and no request of any form makes the server fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from pyggml_dflash import Engine
from tests.serve.live import Live, live

LIMITS = {"n": 2, "max_tokens": 3, "max_output_tokens": 3}


@pytest.fixture(scope="module")
def short(pico: Engine) -> Iterator[Live]:
    """A server whose answers are short unless a request says otherwise."""
    with live(pico, default_max_tokens=2) as server:
        yield server


def tame(body: Any) -> None:
    """Make a request of the right form one that can be answered, and soon."""
    if not isinstance(body, dict):
        return
    if body.get("model") is not None:
        body["model"] = "pico"
    for name, most in LIMITS.items():
        if isinstance(body.get(name), int):
            body[name] = min(body[name], most)
    for name in (
        "logit_bias",
        "spec",
        "top_logprobs",
        "max_completion_tokens",
    ):  # they need a match elsewhere
        body.pop(name, None)
    for message in body.get("messages", []):
        message["content"] = message.get("content") or "x"


def try_out(server: Live, n: int) -> Counter[int]:
    """Send `n` requests of each mode to every operation; how many answers had which status."""
    statuses: Counter[int] = Counter()
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    for found in document.get_all_operations():
        operation = found.ok()
        statuses += try_mode(operation, GenerationMode.POSITIVE, n)
        if operation.body:  # where there is none, no request is wrong
            statuses += try_mode(operation, GenerationMode.NEGATIVE, n)
    assert not server.engine.parked  # it was parked, and then unparked
    return statuses


def try_mode(operation: Any, mode: GenerationMode, n: int) -> Counter[int]:
    """Statuses of `n` answers to right requests, or to wrong ones; each as the document says."""
    statuses: Counter[int] = Counter()

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(max_examples=n, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    def check(case: Any) -> None:
        if mode is GenerationMode.POSITIVE:
            tame(case.body)
        answer = case.call()
        statuses[answer.status_code] += 1
        # No schema says which prompts fit the context, or which messages a template takes.
        case.validate_response(answer, excluded_checks=[positive_data_acceptance])

    check()
    return statuses


def test_requests_of_every_form_are_answered_as_documented(short: Live) -> None:
    statuses = try_out(short, 8)
    assert statuses[200] > 5
    assert statuses[400] > 5


@pytest.mark.slow
def test_thousands_of_requests_are_answered_as_documented(short: Live) -> None:
    statuses = try_out(short, 500)
    assert statuses.total() >= 2000
