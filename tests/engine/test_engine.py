"""What an engine promises about a request: its context, text and end, and no trace of the one before."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from threading import Event

import numpy as np
import pytest

from pyggml_dflash import (
    ContextOverflowError,
    DamagedFileError,
    Engine,
    Progress,
    SamplingOptions,
    UsageError,
    inspect_model,
)
from pyggml_dflash.engine.forward import build_forward
from pyggml_dflash.engine.graphs import BUCKET, Forwards
from pyggml_dflash.ggml.ffi import c_string, lib
from pyggml_dflash.ggml.gguf import TensorInfo
from tests.engine.apart import Apart
from tests.engine.hostile import Array, NewTensor, edited
from tests.engine.scripted import START, scripted
from tests.engine.tiny import LLAMA, PATIENCE_S, QWEN35, opened, prompt
from tests.reference.opened import Parts, assembled, on_the_cpu


@pytest.fixture(scope="module")
def long_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model trained for so many tokens that no test lives to see the last."""
    return edited(LLAMA, tmp_path_factory.mktemp("long") / "long.gguf", keys={"llama.context_length": 65536})


@pytest.fixture(scope="module")
def llama() -> Iterator[Engine]:
    with opened(LLAMA, max_ctx=64) as engine:
        yield engine


# attention reads only filled rows


def mask_bytes(forwards: Forwards, n_tokens: int, n_kv: int) -> bytes:
    return forwards._inputs.streams[0].mask.array[: n_tokens * n_kv].tobytes()


def compute_nodes(parts: Parts) -> list[tuple[str, list[int]]]:
    """Operation and shape of every node of a decode graph that computes; views and cache writes do not."""
    key = parts.forwards._cache.keys[0]
    builder, _ = build_forward(parts.backend, parts.model, parts.state, parts.forwards._inputs.ones[0], key)
    nodes = [lib.ggml_graph_node(builder.graph, i) for i in range(builder.n_nodes)]
    found = [(c_string(lib.ggml_op_name(node.op)), list(node.ne)) for node in nodes]
    builder.close()
    return [node for node in found if node[0] not in ("VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE", "SET_ROWS")]


def test_a_larger_context_changes_nothing_that_a_forward_computes(long_llama: Path) -> None:
    tokens = prompt(300)
    seen = []
    for n_ctx in (4096, 65536):
        with assembled(on_the_cpu(long_llama, max_ctx=n_ctx, chunk=512)) as parts:
            forwards, slot = parts.forwards, parts.slots.slots[0]
            last = forwards.prefill(slot, tokens, "last")
            slot.commit(len(tokens))
            row = forwards.decode(slot, 5).copy()
            seen.append(
                {
                    "mask": mask_bytes(forwards, len(tokens), 2 * BUCKET),
                    "buckets": [key.n_kv for key in forwards._cache.keys],
                    "nodes": compute_nodes(parts),
                    "memory of graphs": forwards._cache.n_bytes,
                    "logits": (last.tobytes() if last is not None else b"", row.tobytes()),
                }
            )
    assert seen[0] == seen[1]
    assert seen[0]["buckets"] == [2 * BUCKET]


# text


SPLIT_CHARACTERS = [
    [b"\xc3", b"\xa9"],
    [b"a", b"\xe2", b"\x82", b"\xac", b"b"],
    [b"\xe2\x82", b"\xac!"],
    [b"\xf0", b"\x9f", b"\x98", b"\x80"],
    [b"x\xf0\x9f", b"\x98\x80y", b"\xf0\x9f\x98", b"\x81"],
    [b"\xf0\x9f\x91\x8d", b"\xf0\x9f\x8f", b"\xbd"],
]


@pytest.mark.parametrize("pieces", SPLIT_CHARACTERS)
def test_characters_come_out_whole(pieces: list[bytes], tmp_path: Path) -> None:
    whole = b"".join(pieces).decode()
    with opened(scripted(tmp_path / "m.gguf", pieces)) as engine, engine.stream([START]) as stream:
        deltas = [piece.text for piece in stream]
        assert "".join(deltas) == stream.result.text == whole
        assert all(whole.startswith(text) for text in accumulate(deltas))
        assert stream.result.finish_reason == "stop"


@pytest.mark.parametrize("pieces", SPLIT_CHARACTERS)
def test_a_character_that_never_ends_is_replaced_only_at_the_end(pieces: list[bytes], tmp_path: Path) -> None:
    for n in range(1, len(pieces)):
        with opened(scripted(tmp_path / f"{n}.gguf", pieces[:n])) as engine:
            deltas = [piece.text for piece in engine.stream([START])]
        assert "".join(deltas) == b"".join(pieces[:n]).decode(errors="replace")
        certain = codecs.getincrementaldecoder("utf-8")().decode(b"".join(pieces[:n]))
        assert "".join(deltas).rstrip("\ufffd") == certain


@pytest.mark.parametrize(
    ("pieces", "stop", "text", "ended_by"),
    [
        ([b"one", b" two", b" three"], ["two"], "one ", "two"),
        ([b"one", b" t", b"wo", b" three"], ["two"], "one ", "two"),
        ([b"o", b"ne t", b"w", b"o three"], ["ne two th"], "o", "ne two th"),
        ([b"a", b"aa", b"b", b"c"], ["aab"], "a", "aab"),
        ([b"aaab"], ["aab"], "a", "aab"),
        ([b"x", b"yz", b"!"], ["z!", "yz"], "x", "yz"),
        ([b"ab", b"c", b"d"], ["abcd", "c"], "", "abcd"),
        ([b"ab", b"c", b"e"], ["abcd", "c"], "ab", "c"),
        ([b"ab", b"c"], ["abcd"], "abc", None),
        ([b"\xf0\x9f", b"\x98\x80", b"<", b"end>"], ["<end>"], "\U0001f600", "<end>"),
        ([b"\xf0\x9f", b"\x98\x80", b"!"], ["\U0001f600"], "", "\U0001f600"),
        ([b"a", b"\n", b"\nb"], ["\n\n"], "a", "\n\n"),
    ],
)
def test_the_text_ends_before_the_earliest_stop_string_and_none_of_it_leaks(
    pieces: list[bytes], stop: list[str], text: str, ended_by: str | None, tmp_path: Path
) -> None:
    with opened(scripted(tmp_path / "m.gguf", pieces)) as engine, engine.stream([START], stop=stop) as stream:
        for shown in accumulate(piece.text for piece in stream):
            assert text.startswith(shown)
        result = stream.result
        assert (result.text, result.stop, result.finish_reason) == (text, ended_by, "stop")
        assert engine.generate([START], stop=stop).text == text


def test_every_token_is_in_one_piece_with_its_logprob(tmp_path: Path) -> None:
    pieces = [b"a", b"\xf0\x9f", b"\x98", b"\x80", b"st", b"op", b"!"]
    with opened(scripted(tmp_path / "m.gguf", pieces)) as engine:
        stream = engine.stream([START], stop=["stop"], logprobs=2)
        shown = list(stream)
        result = stream.result
    tokens = tuple(token for piece in shown for token in piece.tokens)
    assert tokens == result.tokens == tuple(range(1, 7))
    logprobs = tuple(logprob for piece in shown for logprob in piece.logprobs)
    assert logprobs == result.logprobs
    assert [logprob.token for logprob in logprobs] == list(tokens)
    assert all(logprob.top[0] == (logprob.token, logprob.logprob) for logprob in logprobs)


def test_the_end_token_ends_the_answer_unless_it_is_ignored(tmp_path: Path) -> None:
    with opened(scripted(tmp_path / "m.gguf", [b"a", b"b"])) as engine:
        ended = engine.generate([START])
        assert (ended.tokens, ended.finish_reason, ended.text) == ((1, 2), "stop", "ab")
        ignored = engine.generate([START], ignore_eos=True, max_tokens=3)
        assert (ignored.tokens, ignored.finish_reason, ignored.text) == ((1, 2, 3), "length", "ab")


# the end of the context


@pytest.mark.parametrize(
    ("n_prompt", "max_tokens"), [(65, None), (65, 1), (64, 2), (60, 6), (1, 65), (1000, 7)]
)
def test_what_cannot_fit_the_context_is_refused_with_both_numbers(
    llama: Engine, n_prompt: int, max_tokens: int | None
) -> None:
    with pytest.raises(ContextOverflowError, match=rf"{n_prompt} tokens.* context of 64;") as raised:
        llama.stream(prompt(n_prompt), max_tokens=max_tokens)
    error = raised.value
    assert (error.n_prompt, error.max_tokens, error.n_ctx, error.exit_code) == (n_prompt, max_tokens, 64, 4)
    assert max_tokens is None or f"{max_tokens} to generate" in str(error)


@pytest.mark.parametrize(
    ("n_prompt", "max_tokens", "n_answer"),
    [(64, None, 1), (64, 1, 1), (63, None, 2), (60, 5, 5), (1, 64, 64)],
)
def test_what_fits_the_context_exactly_runs_to_its_end(
    llama: Engine, n_prompt: int, max_tokens: int | None, n_answer: int
) -> None:
    result = llama.generate(prompt(n_prompt), max_tokens=max_tokens, ignore_eos=True)
    assert (len(result.tokens), result.finish_reason) == (n_answer, "length")
    assert result.usage.prompt_tokens == n_prompt
    assert result.usage.completion_tokens == n_answer


def test_a_context_of_one_token_answers_one_token(tmp_path: Path) -> None:
    for model, key in ((LLAMA, "llama.context_length"), (QWEN35, "qwen35.context_length")):
        with opened(edited(model, tmp_path / model.name, keys={key: 1})) as engine:
            assert engine.info.n_ctx == 1
            assert len(engine.generate([5], ignore_eos=True).tokens) == 1
            with pytest.raises(ContextOverflowError):
                engine.generate([5, 6])


def test_logits_and_scores_end_where_the_context_ends(llama: Engine) -> None:
    tokens = prompt(64)
    logits = llama.logits(tokens)
    assert logits.shape == (64, 640)
    assert logits.dtype == np.float32
    assert llama.logits([]).shape == (0, 640)
    assert len(llama.score(tokens).logprobs) == 63
    for call in (llama.logits, llama.score):
        with pytest.raises(ContextOverflowError, match="65 tokens"):
            call(prompt(65))


def test_the_answer_crosses_buckets_of_the_cache_without_a_seam() -> None:
    start = prompt(2 * BUCKET - 3)
    with opened(LLAMA, max_ctx=3 * BUCKET, cache_type_k="f32", cache_type_v="f32") as engine:
        result = engine.generate(start, max_tokens=BUCKET // 2, ignore_eos=True)
        logits = engine.logits([*start, *result.tokens[:-1]])
    assert list(result.tokens) == logits[len(start) - 1 :].argmax(axis=1).tolist()


# cancelling


def stopped_in_prefill(engine: Engine, tokens: list[int], *, at: int) -> tuple[list[int], int]:
    """Cancels while chunk `at` is reported; tokens done at each report, and tokens answered."""
    done: list[int] = []
    reached, cancelled = Event(), Event()

    def watch(progress: Progress) -> None:
        done.append(progress.done)
        if progress.done >= at and not reached.is_set():
            reached.set()
            assert cancelled.wait(PATIENCE_S)

    with engine.stream(tokens, progress=watch) as stream:
        assert reached.wait(PATIENCE_S)
        stream.cancel()
        cancelled.set()
    assert stream.result.finish_reason == "cancelled"
    return done, len(stream.result.tokens)


def test_a_cancelled_prefill_ends_within_one_chunk(long_llama: Path) -> None:
    with opened(long_llama, max_ctx=8192, chunk=16) as engine:
        alone = engine.generate(prompt(20, seed=2), max_tokens=8).tokens
        done, n_answered = stopped_in_prefill(engine, prompt(8000), at=64)
        assert done[-1] <= 64 + 16
        assert n_answered == 0
        assert engine.generate(prompt(20, seed=2), max_tokens=8).tokens == alone


@pytest.mark.parametrize("leave", ["close", "with", "break"])
def test_a_closed_iterator_ends_the_answer_and_the_engine_is_free(long_llama: Path, leave: str) -> None:
    with opened(long_llama, max_ctx=65536) as engine:
        alone = engine.generate(prompt(5), max_tokens=20, ignore_eos=True).tokens
        stream = engine.stream(prompt(5), ignore_eos=True)
        first = next(stream).tokens
        if leave == "close":
            stream.close()
        elif leave == "with":
            with stream:
                next(stream)
        else:
            for _ in stream:
                break
            stream.cancel()
        result = stream.result
        assert result.finish_reason == "cancelled"
        assert len(first) <= len(result.tokens) < 60_000
        assert result.tokens[:20] == alone[: len(result.tokens)]
        assert engine.generate(prompt(5), max_tokens=20, ignore_eos=True).tokens == alone


def test_a_dropped_iterator_frees_the_engine(long_llama: Path) -> None:
    with opened(long_llama, max_ctx=65536) as engine:
        for _ in engine.stream(prompt(5), ignore_eos=True):
            break
        assert engine.generate(prompt(5), max_tokens=3, ignore_eos=True).finish_reason == "length"


def test_a_request_that_was_cancelled_while_it_waited_computes_nothing(long_llama: Path) -> None:
    reports: list[Progress] = []
    with opened(long_llama, max_ctx=65536) as engine, engine.stream(prompt(5), ignore_eos=True) as running:
        next(running)
        waiting = engine.stream(prompt(500), progress=reports.append)
        waiting.cancel()
        running.cancel()
        assert waiting.result.finish_reason == "cancelled"
        assert (waiting.result.tokens, waiting.result.text) == ((), "")
        assert list(waiting) == []
    assert [report.done for report in reports] in ([], [0])


def test_closing_a_stream_twice_or_after_its_end_does_nothing(llama: Engine) -> None:
    stream = llama.stream(prompt(5), max_tokens=3, ignore_eos=True)
    pieces = list(stream)
    stream.close()
    stream.close()
    assert stream.result.finish_reason == "length"
    assert list(stream) == []
    assert "".join(piece.text for piece in pieces) == stream.result.text


# one request leaves nothing for the next


@pytest.mark.parametrize("model", [LLAMA, QWEN35])
def test_a_call_is_answered_as_in_a_fresh_process(model: Path) -> None:
    first, second = prompt(40, seed=3), prompt(33, seed=4)
    with Apart() as apart:
        fresh = apart.open(model, prompt=second, max_tokens=12, max_ctx=512)
    with opened(model, max_ctx=512, chunk=16) as engine:

        def answer(tokens: list[int]) -> tuple[int, ...]:
            return engine.generate(tokens, max_tokens=12, ignore_eos=True).tokens

        one = answer(first)
        assert answer(second) == fresh.tokens
        assert answer(first) == one
        engine.logits(prompt(300, seed=5))
        assert answer(second) == fresh.tokens
        stopped_in_prefill(engine, prompt(500, seed=6), at=64)
        assert answer(second) == fresh.tokens
        engine.score(prompt(50, seed=7))
        assert answer(first) == one


def test_a_seed_gives_its_text_whatever_ran_before(llama: Engine) -> None:
    sampling = SamplingOptions(temperature=1.5, top_p=0.95, seed=11)

    def answer() -> tuple[int, ...]:
        return llama.generate(prompt(9), sampling=sampling, max_tokens=20, ignore_eos=True).tokens

    first = answer()
    llama.generate(prompt(30, seed=2), max_tokens=10, sampling=SamplingOptions(temperature=1.0))
    assert answer() == first
    unseeded = llama.generate(prompt(9), sampling=SamplingOptions(temperature=1.5), max_tokens=20)
    assert unseeded.seed is not None


# an MTP block beside the trunk


def without_block(name: str) -> Callable[[TensorInfo, Array], NewTensor | None]:
    def keep(info: TensorInfo, data: Array) -> NewTensor | None:
        return None if info.name.startswith(name) else (info.type, info.shape, data)

    return keep


def test_an_mtp_block_changes_nothing_while_nobody_speculates(tmp_path: Path) -> None:
    def answer(path: Path) -> tuple[int, ...]:
        with opened(path, max_ctx=256) as engine:
            assert engine.info.n_layer == 8
            assert engine.memory()["CPU"]["weights (mapped)"] == trunk_bytes
            return engine.generate(prompt(20), max_tokens=16, ignore_eos=True).tokens

    with opened(QWEN35, max_ctx=256) as engine:
        trunk_bytes = engine.memory()["CPU"]["weights (mapped)"]
    whole = answer(QWEN35)
    trunk = np.array([(i + 1) % 4 != 0 for i in range(8)])
    trunk_only = {"qwen35.attention.recurrent_layers": trunk}
    assert answer(edited(QWEN35, tmp_path / "listed.gguf", keys=trunk_only)) == whole
    unlisted = edited(QWEN35, tmp_path / "no.gguf", without=("qwen35.attention.recurrent_layers",))
    assert answer(unlisted) == whole
    bare = {"qwen35.block_count": 8, "qwen35.nextn_predict_layers": 0, **trunk_only}
    assert answer(edited(QWEN35, tmp_path / "bare.gguf", keys=bare, tensors=without_block("blk.8."))) == whole


def test_a_layer_list_of_another_length_is_refused(tmp_path: Path) -> None:
    for n in (7, 10):
        keys = {"qwen35.attention.recurrent_layers": np.ones(n, np.bool_)}
        with pytest.raises(DamagedFileError, match="recurrent_layers"):
            opened(edited(QWEN35, tmp_path / f"{n}.gguf", keys=keys))


# values


@pytest.mark.parametrize(
    "bad", [[640], [-1], [1, 2**70], [True], [1.0], ["a"], [None], [[1]], [np.float32(1)]]
)
def test_a_token_that_the_model_does_not_have_is_refused(llama: Engine, bad: list[object]) -> None:
    for call in (llama.generate, llama.logits, llama.score, llama.stream):
        with pytest.raises(UsageError, match="token"):
            call([*bad, 1])  # type: ignore[list-item]


def test_numpy_ids_are_tokens(llama: Engine) -> None:
    tokens = prompt(7)
    plain = llama.generate(tokens, max_tokens=4).tokens
    for kind in (np.int32, np.int64, np.uint16):
        assert llama.generate(np.array(tokens, kind), max_tokens=4).tokens == plain  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 0},
        {"max_tokens": -1},
        {"max_tokens": 1.5},
        {"max_tokens": True},
        {"max_tokens": 10**400},
        {"stop": "text"},
        {"stop": [""]},
        {"stop": [1]},
        {"logprobs": -1},
        {"logprobs": 101},
        {"sampling": {"temperature": 1}},
        {"sampling": SamplingOptions(logit_bias={640: 1.0})},
        {"sampling": SamplingOptions(logit_bias={i: float("-inf") for i in range(640)})},
    ],
)
def test_an_option_that_cannot_be_used_is_refused_and_the_engine_goes_on(
    llama: Engine, options: dict[str, object]
) -> None:
    with pytest.raises(UsageError):
        llama.generate(prompt(3), **options)  # type: ignore[arg-type]
    assert len(llama.generate(prompt(3), max_tokens=2, ignore_eos=True).tokens) == 2


@pytest.mark.parametrize("empty", ["", [], ()])
def test_an_empty_prompt_is_refused(empty: str | list[int], tmp_path: Path) -> None:
    with opened(scripted(tmp_path / "m.gguf", [b"a"])) as engine, pytest.raises(UsageError, match="prompt"):
        engine.generate(empty)


WRONG_TYPES: dict[str, Callable[[Engine], object]] = {
    "prompt None": lambda engine: engine.generate(None),  # type: ignore[arg-type]
    "prompt 5": lambda engine: engine.generate(5),  # type: ignore[arg-type]
    "prompt bytes": lambda engine: engine.generate(b"abc"),
    "stop None": lambda engine: engine.generate([1], stop=None),  # type: ignore[arg-type]
    "stop 5": lambda engine: engine.generate([1], stop=5),  # type: ignore[arg-type]
    "sampling 0": lambda engine: engine.generate([1], sampling=0),  # type: ignore[arg-type]
    "top 1.5": lambda engine: engine.score([1, 2], top=1.5),  # type: ignore[arg-type]
    "top True": lambda engine: engine.score([1, 2], top=True),
    "ids 1.5": lambda engine: engine.detokenize([1.5]),  # type: ignore[list-item]
    "ids text": lambda engine: engine.detokenize("ab"),  # type: ignore[arg-type]
    "progress 5": lambda engine: engine.stream([1], progress=5),  # type: ignore[arg-type]
    "progress of a chat": lambda engine: engine.stream_chat([], progress="x"),  # type: ignore[arg-type]
    "progress of a submitted prompt": lambda engine: asyncio.run(
        engine.submit([1], progress=5)  # type: ignore[arg-type]
    ),
    "progress of opening": lambda _: Engine.open(LLAMA, progress=5),  # type: ignore[arg-type]
    "progress of unpark": lambda engine: engine.unpark(progress=5),  # type: ignore[arg-type]
    "cancel 'no'": lambda engine: engine.park(cancel="no"),  # type: ignore[arg-type]
    "ordered 1": lambda engine: engine.batch([], ordered=1),  # type: ignore[arg-type]
    "constraint 5": lambda engine: engine.check_constraint(5),  # type: ignore[arg-type]
    "prompt of a parser": lambda engine: engine.answer_parser(5),  # type: ignore[arg-type]
    "prompt of a block": lambda engine: engine.reasoning_block(None),  # type: ignore[arg-type]
    "inspected model 5": lambda _: inspect_model(5),  # type: ignore[arg-type]
    "model 5": lambda _: Engine.open(5),  # type: ignore[arg-type]
    "options a dict": lambda _: Engine({"model": LLAMA}),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("wrong", WRONG_TYPES)
def test_a_value_of_another_type_is_refused(llama: Engine, wrong: str) -> None:
    with pytest.raises(UsageError):
        WRONG_TYPES[wrong](llama)


def test_ids_that_come_from_an_iterator_are_refused_or_used(llama: Engine) -> None:
    try:
        result = llama.generate(iter(prompt(5)), max_tokens=4)  # type: ignore[arg-type]
    except UsageError as error:
        message = str(error)
    else:
        message = ""
        assert result.tokens == llama.generate(prompt(5), max_tokens=4).tokens
    assert "at least one token" not in message


@pytest.mark.parametrize(("n_ctx", "told"), [(64, "or open with a larger"), (2048, "no larger context")])
def test_a_larger_context_is_proposed_where_the_model_has_one(n_ctx: int, told: str) -> None:
    with opened(LLAMA, max_ctx=n_ctx) as engine, pytest.raises(ContextOverflowError, match=told):
        engine.generate([5] * (n_ctx + 1))
