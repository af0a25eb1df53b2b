"""Decodes the same prompts plainly and with drafts, and has drafts say what a test wants them to say."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pyggml_dflash.arch.base import Capture, StateUpdate
from pyggml_dflash.engine.assembly import DEFAULT_MODEL
from pyggml_dflash.engine.drafting import Drafter, Proposal
from pyggml_dflash.engine.near_tie import NearTies
from pyggml_dflash.engine.sampling import Sampler
from pyggml_dflash.engine.speculate import Speculation
from pyggml_dflash.ggml.gguf import GgufFile
from pyggml_dflash.ggml.gguf_writer import GgufWriter
from pyggml_dflash.options import SamplingOptions
from tests.drafts.drafted import MAX_WIDTH, Drafted, Target, draft_file, with_draft, with_mtp

Tell = Callable[[int, int, Proposal], Sequence[int]]  # n_past, drafts asked for, what was proposed


class Told:
    """A drafter whose forwards run as ever, while `tell` says what it proposes."""

    def __init__(self, drafter: Drafter, tell: Tell) -> None:
        self._drafter, self._tell = drafter, tell
        self.name, self.capture, self.max_drafts = drafter.name, drafter.capture, drafter.max_drafts
        self.begin, self.observe, self.close = drafter.begin, drafter.observe, drafter.close

    def propose(self, anchor: int, n_past: int, n_drafts: int, sampler: Sampler | None) -> Proposal:
        """What `tell` makes of the drafter's own proposal: without distributions if it is another one."""
        own = self._drafter.propose(anchor, n_past, n_drafts, sampler)
        told = tuple(self._tell(n_past, n_drafts, own))
        return own if told == own.tokens else Proposal(told)


class Silent:
    """Proposes nothing and reads nothing: for a `Told` beside a target that has no draft."""

    name = "silent"
    capture = Capture()
    max_drafts = MAX_WIDTH - 1

    def begin(self) -> None:
        """Nothing to forget."""

    def observe(self, tokens: Sequence[int], n_past: int, row: int | None = None) -> None:
        """Nothing to see."""

    def propose(self, anchor: int, n_past: int, n_drafts: int, sampler: Sampler | None) -> Proposal:
        """No drafts."""
        return Proposal(())

    def close(self) -> None:
        """Nothing to free."""


def right_up_to(n_right: int, text: Sequence[int]) -> Tell:
    """The first `n_right` drafts are the next tokens of `text`, prompt and answer; the others are not."""

    def tell(n_past: int, n_drafts: int, own: Proposal) -> list[int]:
        drafts = [*text[n_past + 1 : n_past + 1 + n_drafts]]
        drafts += [0] * (n_drafts - len(drafts))
        return [*drafts[:n_right], *((token + 1) % 700 for token in drafts[n_right:])]

    return tell


@dataclass(frozen=True, slots=True)
class PlainRun:
    """What plain decoding gives: tokens, and which of them were chosen so closely that rounding decides."""

    prompt: list[int]
    tokens: list[int]
    near: list[bool]


def sampler_of(drafted: Drafted, prompt: Sequence[int], **options: Any) -> Sampler:
    """Greedy unless options say otherwise."""
    return Sampler(SamplingOptions(**options), prompt, n_vocab=drafted.target.config.n_vocab)


def plain(drafted: Drafted, prompt: list[int], n: int, **options: Any) -> PlainRun:
    """Decode `n` tokens one by one."""
    forwards, slot, sampler = drafted.forwards, drafted.target.slot, sampler_of(drafted, prompt, **options)
    run, ties = PlainRun(prompt, [], []), NearTies(forwards)
    slot.reset()
    for start in range(0, len(prompt), forwards.chunk):
        part = prompt[start : start + forwards.chunk]
        rows = forwards.prefill(slot, part, "last")
        slot.commit(len(part))
    assert rows is not None
    logits = rows[0]
    while True:
        run.tokens.append(sampler.pick(logits))
        run.near.append(ties.is_near(sampler.lead(logits, run.tokens[-1]), logits))
        sampler.accept(run.tokens[-1])
        if len(run.tokens) == n:
            return run
        logits = forwards.decode(slot, run.tokens[-1])
        slot.commit(1)


def speculated(
    drafted: Drafted,
    prompt: list[int],
    n: int,
    width: int | None,
    *,
    tell: Tell | None = None,
    ends: Set[int] = frozenset(),
    **options: Any,
) -> tuple[list[int], Speculation]:
    """Decode `n` tokens with verify forwards of `width` rows."""
    forwards, slot, sampler = drafted.forwards, drafted.target.slot, sampler_of(drafted, prompt, **options)
    drafter: Drafter = drafted.drafter if tell is None else Told(drafted.drafter, tell)
    slot.reset()
    drafter.begin()
    for start in range(0, len(prompt), forwards.chunk):
        part = prompt[start : start + forwards.chunk]
        rows = forwards.prefill(slot, part, "last", capture=True)
        drafter.observe(part, slot.n_past)
        slot.commit(len(part))
    assert rows is not None
    tokens = [sampler.pick(rows[0])]
    sampler.accept(tokens[0])
    speculation = Speculation(forwards, drafter, sampler, width=width, ends=ends)
    for run in speculation.runs(slot, tokens[0], forwards.n_ctx, limit=n - 1):
        tokens += [chosen.token for chosen in run]
        assert slot.n_past == len(prompt) + len(tokens) - 1
    return tokens, speculation


def near_tie_flip(run: PlainRun, tokens: list[int], speculation: Speculation) -> bool:
    """False if the tokens are those of plain decoding; True if they part at a near tie, as reported.

    Anything else fails the test. What follows a parting cannot be compared.
    """
    parting = [a != b for a, b in zip(run.tokens, tokens, strict=True)]
    if not any(parting):
        return False
    at = parting.index(True)
    assert run.near[at], f"token {at} is another one, and plain decoding did not choose it at a near tie"
    assert at in speculation.stats.near_ties
    return True


@contextmanager
def drafting(target: Target, name: str, folder: Path, update: StateUpdate = "replay") -> Iterator[Drafted]:
    """The target with the draft called `name`, with its own MTP block, or with nothing ('silent')."""
    if name == "silent":
        with target.recording(Capture(), update) as forwards:
            yield Drafted(target, forwards, Silent())
        return
    if name == "mtp":
        with with_mtp(target, update) as drafted:
            yield drafted
        return
    with with_draft(target, any_draft(name, folder), update=update) as drafted:
        yield drafted


def any_draft(name: str, folder: Path) -> Path:
    """A stored draft, the one that ships ('pico-dflash'), or that as version 2 ('pico-dflash2')."""
    shipped = DEFAULT_MODEL.with_name("pico-dflash-q8_0.gguf")
    if name == "pico-dflash":
        return shipped
    if name != "pico-dflash2":
        return draft_file(name, folder)
    path = folder / f"{name}.gguf"
    if not path.exists():
        second_version(shipped, path)
    return path


def second_version(source: Path, path: Path, *, noise: float = 0.003, n_candidates: int = 6) -> None:
    """A DFlash 2 draft that drafts much as a version 1 draft does.

    Its convolutions weigh the row itself by 1, and its candidates' pairs by 0, each up to noise.
    """
    rng, rank, taps, group = np.random.default_rng(7), 16, 3, 8
    writer = GgufWriter()
    with GgufFile.open(source) as file:
        writer.copy_metadata(file)
        width, n_vocab = file.get_int("dflash.embedding_length"), len(file.get_strs("tokenizer.ggml.tokens"))
        numbers = {"conv_kernel_size": taps, "conv_group_size": group}
        for key, value in {**numbers, "selector_rank": rank, "selector_top_k": n_candidates}.items():
            writer.set(f"dflash.{key}", value)
        for info in file.tensors.values():
            writer.add_raw(info.name, file.data(info), shape=info.shape, element=info.type)
        shapes = {
            "selector_hidden.weight": (rank, width),
            "selector_predecessor.weight": (n_vocab, rank),
            "selector_successor.weight": (n_vocab, rank),
        }
        for layer in range(file.get_int("dflash.block_count")):
            for part in ("attn", "ffn"):
                shapes[f"blk.{layer}.{part}_conv_base"] = (2, taps, width)
                shapes[f"blk.{layer}.{part}_conv_proj.weight"] = (2 * taps * width // group, width)
        for name, shape in shapes.items():
            values = noise * rng.standard_normal(shape, np.float32)
            if name.endswith("conv_base"):
                values[:, 0] += 1
            elif name.startswith("selector"):
                values *= 30
            writer.add_tensor(name, values)
        writer.write(path)
