"""Opens a target that records and a draft beside it: on the CPU, one thread, caches in single precision."""

from __future__ import annotations

import lzma
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyggml_dflash.arch import architecture_of, mtp_block_of
from pyggml_dflash.arch.base import Capture, StateUpdate
from pyggml_dflash.arch.dflash import BlockInputs, build_block
from pyggml_dflash.arch.dflash_config import DraftConfig, draft_tensors, read_draft_config
from pyggml_dflash.arch.draft_forms import open_draft
from pyggml_dflash.engine.assembly import settle
from pyggml_dflash.engine.dflash_drafter import DFlashDrafter
from pyggml_dflash.engine.drafting import Drafter, Proposal
from pyggml_dflash.engine.graphs import Forwards, Model, Recording
from pyggml_dflash.engine.inputs import bucketed
from pyggml_dflash.engine.mtp_drafter import MtpDrafter
from pyggml_dflash.ggml.arena import read
from pyggml_dflash.ggml.device import Backend, choose_device
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.gguf import GgufFile
from pyggml_dflash.ggml.ledger import Ledger
from pyggml_dflash.ggml.ops import GraphBuilder
from pyggml_dflash.model.config import ModelConfig
from pyggml_dflash.model.weights import EMBEDDING, LoadedWeights, check_tensors, place_weights
from pyggml_dflash.options import DraftCausal, KVType, MtpConvention
from pyggml_dflash.state.slot import Slot, SlotTable
from tests.reference.opened import OnOff, on_the_cpu
from tests.reference.stored import MODELS, Kind, model_file

Floats = NDArray[np.float32]
Arrays = dict[str, NDArray[Any]]
F32 = ElementType.F32
CHUNK = 64
MAX_WIDTH = 8


def arrays(name: str) -> Arrays:
    """Everything stored of a model."""
    with np.load(MODELS / name / "reference.npz") as z:
        return {key: z[key] for key in z.files}


def draft_file(name: str, folder: Path, kind: Kind = "F32") -> Path:
    """The draft as a GGUF file of `kind`, made in `folder`."""
    packed = MODELS / name / "f32.gguf.xz"
    if not packed.exists():
        return model_file(name, kind, folder)
    path = folder / f"{name}-F32.gguf"
    if not path.exists():
        path.write_bytes(lzma.decompress(packed.read_bytes()))
    return path


@dataclass(frozen=True, slots=True)
class Target:
    """A model, and what its forwards are made of."""

    backend: Backend
    ledger: Ledger
    model: Model
    slots: SlotTable

    @property
    def slot(self) -> Slot:
        """The first slot."""
        return self.slots.slots[0]

    @property
    def config(self) -> ModelConfig:
        """The model's numbers."""
        return self.model.config

    @contextmanager
    def recording(
        self,
        capture: Capture,
        update: StateUpdate = "snapshots",
        *,
        max_width: int = MAX_WIDTH,
        chunk: int = CHUNK,
        gather: bool = False,
    ) -> Iterator[Forwards]:
        """Forwards that record, from the front of the record on.

        `gather`: embedding rows are read outside of graphs, as for a GPU.
        """
        recording = Recording(capture=capture, update=update, max_width=max_width)
        forwards = Forwards(
            self.backend,
            self.ledger,
            self.model,
            self.slots,
            chunk=chunk,
            host=self.backend if gather else None,
            recording=recording,
        )
        forwards.recorded[:] = [0] * forwards.n_slots
        try:
            yield forwards
        finally:
            forwards.close()


@contextmanager
def open_target(
    path: Path,
    *,
    max_ctx: int = 768,
    flash_attn: OnOff = "off",
    mtp: bool = False,
    n_slots: int = 1,
    cache: KVType = "f32",
) -> Iterator[Target]:
    """The model of a file, with its MTP block if asked for."""
    options = on_the_cpu(
        path, max_ctx=max_ctx, chunk=CHUNK, flash_attn=flash_attn, cache_type_k=cache, cache_type_v=cache
    )
    with ExitStack() as stack:
        file = stack.enter_context(GgufFile.open(path))
        name, architecture = architecture_of(file)
        config = architecture.read_config(file, name)
        specs = architecture.tensors(config, file)
        known = {spec.name for spec in specs}
        if mtp:
            specs = specs + [spec for spec in mtp_block_of(config).tensors(file) if spec.name not in known]
        ledger, settings = Ledger(), settle(options, architecture, config)
        backend = Backend(choose_device("CPU"), threads=1)
        stack.callback(backend.close)
        placements = place_weights(file, check_tensors(file, specs), backend, repack=False)
        weights = LoadedWeights(file, placements, backend, ledger)
        stack.callback(weights.close)
        slots = SlotTable(backend, ledger, settings.layout, n_slots)
        stack.callback(slots.close)
        yield Target(backend, ledger, Model(architecture, config, weights, flash_attn == "on"), slots)


@dataclass(frozen=True, slots=True)
class Drafted:
    """A target's forwards, and a drafter that reads what they record."""

    target: Target
    forwards: Forwards
    drafter: Drafter

    def begin(self) -> None:
        """Forget the sequence before."""
        self.target.slot.reset()
        self.drafter.begin()

    def feed(self, tokens: list[int], piece: int = CHUNK) -> list[Floats]:
        """Run tokens in pieces and show them to the drafter; what each piece recorded."""
        slot, found = self.target.slot, []
        for start in range(0, len(tokens), piece):
            part = tokens[start : start + piece]
            self.forwards.prefill(slot, part, "none", capture=True)
            found.append(self.recorded(len(part)))
            self.drafter.observe(part, slot.n_past)
            slot.commit(len(part))
        return found

    def recorded(self, n: int) -> Floats:
        """The first `n` rows of the last forward: features, or what the head read."""
        name = "features" if "features" in self.forwards.record else "hidden"
        rows = rows_of(read(self.forwards.record[name]))
        return rows[:n] if name == "features" else rows[1 : n + 1]

    def step(self, drafts: list[int], n_keep: int) -> None:
        """Verify some tokens and keep the first of them."""
        slot = self.target.slot
        self.forwards.verify(slot, drafts)
        self.forwards.commit(slot, width=len(drafts), n_keep=n_keep)
        self.drafter.observe(drafts[:n_keep], slot.n_past)
        slot.commit(n_keep)

    def propose(self, anchor: int, n_drafts: int | None = None) -> Proposal:
        """The greedy proposal behind what was fed."""
        n = self.drafter.max_drafts if n_drafts is None else n_drafts
        return self.drafter.propose(anchor, self.target.slot.n_past, n, None)


def rows_of(x: NDArray[Any]) -> Floats:
    """A tensor's elements as NumPy's [rows, columns]."""
    return x.reshape(-1, x.shape[-1]).copy()


@contextmanager
def with_mtp(
    target: Target,
    update: StateUpdate = "replay",
    *,
    max_drafts: int = MAX_WIDTH - 1,
    gather: bool = False,
    convention: MtpConvention = "all-streams",
) -> Iterator[Drafted]:
    """The target's own MTP block."""
    block = mtp_block_of(target.config, convention)
    with target.recording(Capture(hidden=True), update, gather=gather) as forwards:
        drafter = MtpDrafter(
            target.backend, target.ledger, forwards, block, max_drafts=max_drafts, type_k=F32, type_v=F32
        )
        try:
            yield Drafted(target, forwards, drafter)
        finally:
            drafter.close()


@contextmanager
def with_draft(
    target: Target,
    path: Path,
    causality: DraftCausal = "auto",
    *,
    chunk: int = CHUNK,
    gather: bool = False,
    update: StateUpdate = "snapshots",
) -> Iterator[Drafted]:
    """A DFlash draft in any form."""
    with ExitStack() as stack:
        file = stack.enter_context(open_draft(path))
        config = read_draft_config(file, target.config, causality)
        specs = check_tensors(file, draft_tensors(config, target.config.n_vocab))
        placements = place_weights(file, specs, target.backend, repack=False)
        weights = LoadedWeights(file, placements, target.backend, target.ledger)
        stack.callback(weights.close)
        capture = Capture(layers=config.target_layers)
        recording = target.recording(capture, update, chunk=chunk, gather=gather)
        forwards = stack.enter_context(recording)
        drafter = DFlashDrafter(target.backend, target.ledger, config, weights, forwards, F32, F32)
        stack.callback(drafter.close)
        yield Drafted(target, forwards, drafter)


@dataclass(frozen=True, slots=True)
class Block:
    """What is inside the last proposal: states [block, n_embd]; of rows 1.. logits, candidates, scores."""

    states: Floats
    logits: Floats
    candidates: NDArray[np.int32] | None
    scores: Floats | None  # [row, predecessor, successor]


def inside(drafted: Drafted) -> Block:
    """Run the block of the last proposal again, for what a proposal does not return."""
    drafter, config = drafted.drafter, _draft_config(drafted)
    assert isinstance(drafter, DFlashDrafter)
    n_past = drafted.target.slot.n_past
    spans = tuple(min(ring.n_cells, bucketed(n_past + config.block_size)) for ring in drafter._kinds)
    graph = drafter._cache.get(("states", spans), lambda: _build_states(drafted, spans))
    states = rows_of(graph.run()[0])
    graph = drafter._cache.get(("block", spans, "logits"), lambda: drafter._build_block(spans, "logits"))
    logits = rows_of(graph.run()[0])
    if config.selector is None:
        return Block(states, logits, None, None)
    key = ("block", spans, "candidates")
    ids, scores = drafter._cache.get(key, lambda: drafter._build_block(spans, "candidates")).run()
    n = config.selector.n_candidates
    return Block(states, logits, ids.copy(), scores.reshape(-1, n, n).copy())


def _draft_config(drafted: Drafted) -> DraftConfig:
    assert isinstance(drafted.drafter, DFlashDrafter)
    return drafted.drafter.config


def _build_states(drafted: Drafted, spans: tuple[int, ...]) -> tuple[GraphBuilder, tuple[Any, ...]]:
    drafter, model = drafted.drafter, drafted.target.model
    assert isinstance(drafter, DFlashDrafter)
    g, block, inputs = drafter._builder(), drafter.config.block_size, drafter._inputs
    masks = [g.view(inputs[f"mask{i}"].tensor, (n, block), (2 * n,), 0) for i, n in enumerate(spans)]
    cells = [g.view(inputs[f"cells{i}"].tensor, (block,), (), 0) for i in range(len(spans))]
    rows = BlockInputs(
        rows=g.get_rows(model.weights[EMBEDDING], g.view(inputs["tokens"].tensor, (block,), (), 0)),
        positions=g.view(inputs["positions"].tensor, (block,), (), 0),
        cells=drafter._per_layer(cells),
        masks=drafter._per_layer(masks),
        flash_attn=model.flash_attn,
    )
    states = build_block(g, drafter.config, drafter._weights, drafter._caches, rows)
    return g, (g.output(states),)
