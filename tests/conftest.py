"""What all tests share: no settings of the user who runs them, threads that make way, and files named on the
command line.

Tests marked `trained` need files that the repository has no room for. Without them they are deselected, which
pytest counts, and an error where they were asked for.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

for _name in [name for name in os.environ if name.startswith("DFLASH_") and name != "DFLASH_GGML_SOURCE"]:
    del os.environ[_name]
os.environ["DFLASH_CONFIG"] = os.devnull  # an empty file, in place of the user's
# Several test processes share the processors: threads that wait sleep instead of spinning, and NumPy, whose
# products are small here, has one. Both are read when the libraries are loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
settings.register_profile("without deadlines", deadline=None)  # on a busy machine they fail what is right
settings.load_profile("without deadlines")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--pico-next", type=Path, metavar="FILE", help="pico-next-q8_0.gguf, for tests marked trained"
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    trained = [item for item in items if item.get_closest_marker("trained")]
    if not trained or config.getoption("pico_next") is not None:
        return
    if "trained" in config.getoption("markexpr"):
        raise pytest.UsageError("tests marked 'trained' need --pico-next FILE, pico-next-q8_0.gguf")
    config.hook.pytest_deselected(items=trained)
    items[:] = [item for item in items if item not in trained]


@pytest.fixture(scope="session")
def pico_next(pytestconfig: pytest.Config) -> Path:
    """The trained model of the family qwen4exp."""
    path = pytestconfig.getoption("pico_next")
    assert isinstance(path, Path)
    return path


@pytest.fixture(scope="session")
def gpu() -> str:
    """The first GPU's name; what is marked `gpu` needs one."""
    from pyggml_dflash.ggml.device import devices  # not before the variables above are set

    found = [device.name for device in devices()]
    gpus = [device.name for device in devices() if device.kind in ("gpu", "igpu")]
    if not gpus:
        pytest.skip(f"needs a GPU; there is {', '.join(found)}")
    return gpus[0]
