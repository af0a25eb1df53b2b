"""Memory is checked before it is taken, refused with numbers, and a failure leaves all as it was."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from pyggml_dflash import ContextFitError, DeviceMemoryError, UsageError
from pyggml_dflash.arch import architecture_of
from pyggml_dflash.engine.assembly import settle
from pyggml_dflash.engine.graphs import BUCKET, Forwards, Model
from pyggml_dflash.ggml.device import Backend, choose_device
from pyggml_dflash.ggml.gguf import GgufFile
from pyggml_dflash.ggml.ledger import Ledger
from pyggml_dflash.model.weights import LoadedWeights, check_tensors, place_weights
from pyggml_dflash.options import EngineOptions
from pyggml_dflash.state.slot import SlotTable
from tests.engine.apart import program
from tests.engine.hostile import edited
from tests.engine.tiny import LLAMA, QWEN3, QWEN35, opened, prompt


@pytest.fixture(scope="module")
def endless_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that claims to be trained for as many tokens as the format can say."""
    keys = {"llama.context_length": 2**31 - 1}
    return edited(LLAMA, tmp_path_factory.mktemp("endless") / "endless.gguf", keys=keys)


# what is held


def test_memory_tells_what_is_held_and_for_what() -> None:
    with opened(QWEN3, max_ctx=512) as engine:
        engine.generate(prompt(40), max_tokens=2, ignore_eos=True)
        held = engine.memory()["CPU"]
        info = engine.info
    assert held["state"] == info.state_bytes
    assert held["weights (mapped)"] == info.weight_bytes["mapped"]
    assert {"inputs", "graphs"} < set(held)
    assert all(n > 0 for n in held.values())
    moved = sum(n for kind, n in info.weight_bytes.items() if kind != "mapped")
    assert sum(n for label, n in held.items() if label.startswith("weights (")) == (
        info.weight_bytes["mapped"] + moved
    )


def test_requests_do_not_pile_up_memory() -> None:
    with opened(QWEN35, max_ctx=1024, chunk=64) as engine:
        engine.generate(prompt(1000), max_tokens=20, ignore_eos=True)
        after_one = engine.memory()
        for seed in range(6):
            engine.generate(prompt(100 * seed + 50, seed=seed), max_tokens=8, ignore_eos=True)
            engine.logits(prompt(90, seed=seed))
        assert sum(engine.memory()["CPU"].values()) <= 1.5 * sum(after_one["CPU"].values())
        before = engine.memory()
        for seed in range(6):
            engine.generate(prompt(100 * seed + 50, seed=seed), max_tokens=8, ignore_eos=True)
            engine.logits(prompt(90, seed=seed))
        assert engine.memory() == before


def test_the_state_holds_whole_buckets_of_the_context() -> None:
    sizes = []
    for n_ctx in (1, BUCKET, BUCKET + 1, 2 * BUCKET):
        with opened(LLAMA, max_ctx=n_ctx) as engine:
            assert engine.info.n_ctx == n_ctx
            sizes.append(engine.memory()["CPU"]["state"])
    assert sizes == [sizes[0], sizes[0], 2 * sizes[0], 2 * sizes[0]]


# what cannot be had


def test_a_context_that_does_not_fit_is_refused_with_one_that_does(endless_llama: Path) -> None:
    with pytest.raises(ContextFitError, match="--max-ctx") as raised:
        opened(endless_llama, max_ctx=2**31 - 1)
    error = raised.value
    assert (error.asked, error.device, error.exit_code) == (2**31 - 1, "CPU", 4)
    assert 0 < error.fits < error.asked
    assert error.missing > 0


def test_a_context_beyond_the_training_is_refused_with_the_most_possible() -> None:
    with pytest.raises(UsageError, match=r"max_ctx is 2049; .* at most 2048"):
        opened(LLAMA, max_ctx=2049)


def test_a_chunk_beyond_the_context_is_refused() -> None:
    with pytest.raises(UsageError, match="chunk is 65; it must be at most the context of 64"):
        opened(LLAMA, max_ctx=64, chunk=65)


def load_parts(stack: ExitStack, model: Path, ledger: Ledger) -> Forwards:
    """What the loader makes, in its order, charged to a ledger that may have a cap."""
    options = EngineOptions(model=model, max_ctx=512, chunk=64)
    file = stack.enter_context(GgufFile.open(model))
    name, architecture = architecture_of(file)
    config = architecture.read_config(file, name)
    specs = check_tensors(file, architecture.tensors(config, file))
    settings = settle(options, architecture, config)
    backend = Backend(choose_device("CPU"), threads=1)
    stack.callback(backend.close)
    weights = LoadedWeights(file, place_weights(file, specs, backend, repack=True), backend, ledger)
    stack.callback(weights.close)
    slots = SlotTable(backend, ledger, settings.layout, 1)
    stack.callback(slots.close)
    model_parts = Model(architecture, config, weights, True)
    forwards = Forwards(backend, ledger, model_parts, slots, chunk=64, host=None)
    stack.callback(forwards.close)
    slot = slots.slots[0]
    forwards.prefill(slot, prompt(40), "last")
    slot.commit(40)
    forwards.decode(slot, 1)
    return forwards


@pytest.mark.parametrize("model", [LLAMA, QWEN35, QWEN3])
def test_an_allocation_that_fails_anywhere_in_a_load_frees_the_rest(model: Path) -> None:
    ledger = Ledger()
    with ExitStack() as stack:
        load_parts(stack, model, ledger)
        steps = sorted({*_running_totals(ledger)})
    assert ledger.charged("CPU") == 0
    failed_for = set()
    for most in steps:
        ledger = Ledger(caps={"CPU": most - 1})
        with ExitStack() as stack, pytest.raises(DeviceMemoryError) as raised:
            load_parts(stack, model, ledger)
        error = raised.value
        assert error.free is not None
        assert error.wanted > error.free
        assert ledger.charged("CPU") == 0
        failed_for.add(error.what)
    assert {"state", "inputs", "graphs"} <= failed_for


def _running_totals(ledger: Ledger) -> list[int]:
    """Bytes held after each label's charge, in the order of the charges."""
    totals, held = [], 0
    for n in ledger.by_label("CPU").values():
        held += n
        totals.append(held)
    return totals


def test_a_forward_that_finds_no_memory_leaves_the_model_usable() -> None:
    caps: dict[str, int] = {}
    ledger = Ledger(caps=caps)
    with ExitStack() as stack:
        forwards = load_parts(stack, LLAMA, ledger)
        slots = forwards._slots.slots
        slots[0].reset()
        expected = forwards.prefill(slots[0], prompt(8), "last")
        caps["CPU"] = ledger.charged("CPU")
        slots[0].reset()
        with pytest.raises(DeviceMemoryError, match="graphs"):
            forwards.prefill(slots[0], prompt(64, seed=2), "all")
        assert slots[0].n_past == 0
        again = forwards.prefill(slots[0], prompt(8), "last")
        assert expected is not None
        assert again is not None
        assert again.tolist() == expected.tolist()
        del caps["CPU"]
        assert forwards.prefill(slots[0], prompt(64, seed=2), "all") is not None


LIMITED = """
import resource, sys
from pathlib import Path
from pyggml_dflash import DeviceMemoryError
from tests.engine.tiny import LLAMA, opened
with opened(LLAMA, max_ctx=64) as engine:
    expected = engine.generate([1, 2], max_tokens=3).tokens
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, -1))
    for _ in range(3):
        try:
            opened(Path(sys.argv[1]), max_ctx=2**21)  # 1 GiB of keys and values
        except DeviceMemoryError as error:
            print(error.what, error.wanted >= 2**30, error.exit_code)
    print(engine.generate([1, 2], max_tokens=3).tokens == expected)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the address space")
def test_memory_that_the_system_refuses_is_our_error_and_frees_the_rest(endless_llama: Path) -> None:
    done = program(LIMITED, endless_llama)
    assert (done.returncode, done.stdout) == (0, 3 * "state True 1\n" + "True\n"), done.stderr
