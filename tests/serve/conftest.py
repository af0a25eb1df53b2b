"""The shipped model, behind a server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pyggml_dflash import Engine
from tests.engine.tiny import opened
from tests.serve.live import Live, live


@pytest.fixture(scope="session")
def pico() -> Iterator[Engine]:
    """The shipped model, decoding plainly."""
    with opened(None, max_ctx=512) as engine:
        yield engine


@pytest.fixture(scope="session")
def server(pico: Engine) -> Iterator[Live]:
    """A server of it with the options that it has by default."""
    with live(pico) as server:
        yield server


@pytest.fixture(scope="session")
def lasting() -> Iterator[Engine]:
    """The same model with room for answers that no test waits for."""
    with opened(None, max_ctx=8192) as engine:
        yield engine
