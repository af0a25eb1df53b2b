"""What a whole prompt takes of the system is what was planned, scratch of CPU kernels included."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.engine.apart import program
from tests.tiny import Tiny, write_tiny

N_CTX = 8192
PEAK = """
import sys
from pathlib import Path
from pyggml_dflash import Engine
from tests.tiny import tokens

def kib(name):
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines()
                if line.startswith(name))

options = dict(flash_attn=sys.argv[2], chunk=256, threads=1, device="CPU", slots=1,
               prefix_cache_max_mib=0)
n_ctx = int(sys.argv[3])
with Engine.open(sys.argv[1], max_ctx=256, **options) as engine:  # what is loaded once
    engine.generate(tokens(200, seed=1), max_tokens=2, ignore_eos=True)
before = kib("VmRSS")
with Engine.open(sys.argv[1], max_ctx=n_ctx, **options) as engine:
    engine.generate(tokens(n_ctx - 2, seed=1), max_tokens=2, ignore_eos=True)
    terms = engine.fit_report().devices[0].terms
planned = sum(n for name, n in terms.items() if "(mapped)" not in name)
print(planned // 1024, kib("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, which only Linux has")
@pytest.mark.parametrize("flash_attn", ["on", "off"])
@pytest.mark.parametrize("architecture", ["qwen35", "qwen4exp"])
def test_a_prompt_takes_what_was_planned_of_the_system(
    architecture: str, flash_attn: str, tmp_path: Path
) -> None:
    model = write_tiny(tmp_path, Tiny(architecture=architecture, n_ctx_train=N_CTX))
    done = program(PEAK, model, flash_attn, N_CTX)
    assert done.returncode == 0, done.stderr
    planned, grew = map(int, done.stdout.split())
    air = 4096  # KiB that a heap has unused, or had before
    assert 0.85 * planned - air <= grew <= 1.15 * planned + air
