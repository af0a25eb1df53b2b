"""Answers of an engine that are held to a schema, a grammar or a budget of reasoning."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema_rs
import pytest

from pyggml_dflash import Constraint, Engine, GenerationResult, SamplingOptions, UsageError
from pyggml_dflash.api import ParsedAnswer
from pyggml_dflash.requests import GenerationRequest, ReasoningBlock
from tests.engine.test_spec_requests import same_up_to_a_near_tie
from tests.engine.tiny import LLAMA, QWEN35, opened, prompt

FOX = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "likes": {"type": "array", "items": {"enum": ["mice", "berries"]}, "maxItems": 3},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
IS_FOX = Constraint.json_schema(FOX)
ASKED = [{"role": "user", "content": "Describe a shy fox."}]
# Neither closes its block nor ends its answer if it need not.
THINKS = SamplingOptions(logit_bias={4094: -100.0, 4090: -100.0, 4092: -100.0})


@pytest.fixture(scope="module")
def plain() -> Iterator[Engine]:
    with opened(None, max_ctx=512) as engine:
        yield engine


@pytest.fixture(scope="module", params=["dflash", "mtp"])
def drafting(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with opened(None, max_ctx=512, spec=request.param) as engine:
        yield engine


def parsed(engine: Engine, result: GenerationResult, **options: Any) -> ParsedAnswer:
    return engine.answer_parser(engine.render_chat(ASKED, **options)).parse(result.text)


# B43: the constraint begins behind the reasoning


@pytest.mark.parametrize("reasoning", [True, False, None])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 5}, {"repetition_penalty": 1.2}])
def test_content_follows_the_schema_with_reasoning_and_without(
    plain: Engine, reasoning: bool | None, sampling: dict[str, Any]
) -> None:
    options = {"constraint": IS_FOX, "sampling": SamplingOptions(**sampling), "reasoning": reasoning}
    result = plain.chat(ASKED, **options)
    answer = parsed(plain, result, reasoning=reasoning)
    jsonschema_rs.validate(FOX, json.loads(answer.content))
    assert bool(answer.reasoning) == bool(reasoning) == bool(result.usage.reasoning_tokens)
    assert (result.finish_reason, result.stop) == ("stop", None)
    with plain.stream_chat(ASKED, **options) as stream:
        pieces = [piece.text for piece in stream]
    assert "".join(pieces) == result.text
    assert stream.result.tokens == result.tokens


def test_a_text_is_constrained_from_its_first_token(plain: Engine) -> None:
    result = plain.generate("A fox:", constraint=IS_FOX)
    assert result.text.startswith("{")
    jsonschema_rs.validate(FOX, json.loads(result.text))


def test_a_model_without_reasoning_answers_as_the_schema_says() -> None:
    for model in (LLAMA, QWEN35):
        with opened(model, max_ctx=512) as engine:
            for seed in range(3):
                sampling = SamplingOptions(temperature=1.0, seed=seed)
                result = engine.generate(prompt(20), constraint=IS_FOX, sampling=sampling, max_tokens=400)
                if result.finish_reason == "stop":
                    jsonschema_rs.validate(FOX, json.loads(result.text))
            yes = engine.generate(prompt(9), constraint=Constraint(kind="regex", text=" ?(yes|no)"))
            assert yes.text.strip() in ("yes", "no")


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint(kind="json_object"),
        Constraint(kind="regex", text=r"[A-Z][a-z]{2,9}( [a-z]{1,9}){3}\."),
        Constraint(kind="grammar", text='root ::= word ("-" word)?\nword ::= [a-z] [a-z]?'),
        Constraint(kind="grammar", text='start: "yes" | "no"'),
        Constraint(kind="regex", text=""),
    ],
    ids=lambda constraint: f"{constraint.kind} {constraint.text[:12]}",
)
def test_every_kind_of_constraint_ends_its_answer(plain: Engine, constraint: Constraint) -> None:
    checks = plain._loaded.constraints.matcher(constraint)
    result = plain.generate("Once upon a time", constraint=constraint, max_tokens=300)
    for token in result.tokens:
        assert checks.allows(token)
        checks.accept(token)
    assert result.finish_reason == "stop"
    assert checks.finished or any(checks.allows(stop) for stop in plain._loaded.tokenizer.stop_ids)


def test_an_answer_that_is_cut_says_so(plain: Engine) -> None:
    result = plain.chat(ASKED, constraint=IS_FOX, max_tokens=5)
    assert (result.finish_reason, len(result.tokens)) == ("length", 5)


def test_a_stop_string_still_ends_the_answer(plain: Engine) -> None:
    result = plain.chat(ASKED, constraint=IS_FOX, reasoning=False, stop=['"age"'])
    assert (result.finish_reason, result.stop) == ("stop", '"age"')


def test_log_probabilities_are_those_of_the_model(plain: Engine) -> None:
    """What the constraint keeps away is still what the model would have said."""
    result = plain.chat(ASKED, constraint=IS_FOX, reasoning=False, logprobs=1)
    assert [found.token for found in result.logprobs] == list(result.tokens)
    assert result.logprobs[0].top[0][0] != result.tokens[0]


def test_an_asynchronous_stream_is_constrained(plain: Engine) -> None:
    async def read() -> str:
        return "".join([piece.text async for piece in plain.astream("A fox:", constraint=IS_FOX)])

    jsonschema_rs.validate(FOX, json.loads(asyncio.run(read())))


def test_callers_side_by_side_get_their_own_constraints(plain: Engine) -> None:
    def asked(n: int) -> bool:
        schema = {"type": "object", "properties": {f"key{n}": {"const": n}}, "required": [f"key{n}"]}
        only = {**schema, "additionalProperties": False}
        result = plain.generate("A fox:", constraint=Constraint.json_schema(only))
        return bool(json.loads(result.text) == {f"key{n}": n})

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(asked, range(24)))


def test_slots_answer_side_by_side_what_each_answers_alone(plain: Engine) -> None:
    foxes = {"type": "array", "items": {"const": "fox"}, "minItems": 4, "maxItems": 9}
    schemas: list[dict[str, Any]] = [FOX, foxes, {"enum": [1, 22]}]
    options: list[dict[str, Any]] = [
        {"constraint": Constraint.json_schema(schema), "reasoning": i > 0} for i, schema in enumerate(schemas)
    ]
    with opened(None, max_ctx=256, slots=3) as engine, ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda own: engine.chat(ASKED, max_tokens=200, **own), options))
    for schema, own, result in zip(schemas, options, found, strict=True):
        assert same_up_to_a_near_tie(result, plain.chat(ASKED, max_tokens=200, logprobs=100, **own))
        jsonschema_rs.validate(schema, json.loads(parsed(plain, result, reasoning=own["reasoning"]).content))


# drafts


@pytest.mark.parametrize("width", ["auto", 2, 4])
@pytest.mark.parametrize("reasoning", [True, False])
def test_drafts_change_no_constrained_answer(
    plain: Engine, drafting: Engine, width: int, reasoning: bool
) -> None:
    n_accepted = 0
    for sampling in (
        SamplingOptions(),
        SamplingOptions(temperature=0.8, seed=11),
        SamplingOptions(presence_penalty=0.5),
    ):
        options: dict[str, Any] = {"sampling": sampling, "reasoning": reasoning, "constraint": IS_FOX}
        expected = plain.chat(ASKED, logprobs=100, **options)
        found = drafting.chat(ASKED, spec_width=width, **options)
        assert same_up_to_a_near_tie(found, expected)
        jsonschema_rs.validate(FOX, json.loads(parsed(drafting, found, reasoning=reasoning).content))
        assert found.speculation is not None
        n_accepted += found.speculation.accepted
    assert n_accepted or width == "auto"


def test_drawn_answers_follow_the_schema_under_drafts(drafting: Engine) -> None:
    for _ in range(5):
        result = drafting.chat(
            ASKED, constraint=IS_FOX, sampling=SamplingOptions(temperature=1.2), spec_width=4, reasoning=False
        )
        jsonschema_rs.validate(FOX, json.loads(result.text))
        assert result.seed is not None  # the tokens depend on no draft
        assert result.speculation is not None
        assert result.speculation.verify_steps


def test_a_run_of_drafts_ends_with_the_constraint(plain: Engine, drafting: Engine) -> None:
    """Several tokens of a run come before the last one that the constraint has."""
    story = Constraint(kind="regex", text="Once upon a time[a-z ,]*\\.")
    expected = plain.generate(ASKED[0]["content"], constraint=story, logprobs=100)
    for width in (2, 4):
        found = drafting.generate(ASKED[0]["content"], constraint=story, spec_width=width)
        assert same_up_to_a_near_tie(found, expected)
        assert found.text.endswith(".")
        assert found.text.count(".") == 1


# B44: budgets of reasoning


@pytest.mark.parametrize("budget", [1, 5, 40])
def test_a_budget_closes_the_block_and_the_answer_comes(plain: Engine, drafting: Engine, budget: int) -> None:
    for engine in (plain, drafting):
        result = engine.chat(
            ASKED, reasoning=True, reasoning_budget=budget, sampling=THINKS, max_tokens=budget + 30
        )
        answer = parsed(engine, result, reasoning=True)
        assert result.usage.reasoning_tokens == budget
        assert answer.reasoning
        assert answer.content
        assert result.text.count("</think>") == 1


def test_a_budget_that_is_not_reached_changes_nothing(plain: Engine) -> None:
    options: dict[str, Any] = {"reasoning": True, "max_tokens": 100}
    expected = plain.chat(ASKED, **options)
    for budget in (-1, 10_000):
        assert plain.chat(ASKED, reasoning_budget=budget, **options).tokens == expected.tokens
    assert 0 < expected.usage.reasoning_tokens < 100
    assert "</think>" in expected.text


@pytest.mark.parametrize("budget", [-1, 10_000])
def test_a_model_that_thinks_forever_does_so_without_a_budget(plain: Engine, budget: int) -> None:
    result = plain.chat(ASKED, reasoning=True, reasoning_budget=budget, sampling=THINKS, max_tokens=60)
    assert parsed(plain, result, reasoning=True).content == ""
    assert result.usage.reasoning_tokens == len(result.tokens)


def test_a_budget_of_nothing_is_an_answer_without_reasoning(plain: Engine) -> None:
    expected = plain.chat(ASKED, reasoning=False, max_tokens=20)
    found = plain.chat(ASKED, reasoning_budget=0, max_tokens=20)
    assert (found.tokens, found.usage) == (expected.tokens, expected.usage)
    assert found.usage.reasoning_tokens == 0
    tokens = plain.tokenize(plain.render_chat(ASKED, reasoning=True), add_special=False)
    block = ReasoningBlock(opens="<think>", closes="</think>", is_open=True, budget=0)
    opened_anyway = plain.generate(tokens, reasoning_block=block, max_tokens=20)
    assert opened_anyway.text.startswith("</think>")
    assert opened_anyway.usage.reasoning_tokens == 0


def test_a_budget_and_a_schema_hold_together(plain: Engine) -> None:
    result = plain.chat(ASKED, reasoning=True, reasoning_budget=3, sampling=THINKS, constraint=IS_FOX)
    assert result.usage.reasoning_tokens == 3
    jsonschema_rs.validate(FOX, json.loads(parsed(plain, result, reasoning=True).content))


def test_a_block_that_the_model_opens_is_read_to_its_end(plain: Engine) -> None:
    block = ReasoningBlock(opens="<think>", closes="</think>", is_open=False)
    tokens = plain.tokenize("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    shy = SamplingOptions(logit_bias={4093: -50.0})  # does not open it
    for sampling, begins, counts in ((None, "<think>", True), (shy, "{", False)):
        result = plain.generate(tokens, reasoning_block=block, constraint=IS_FOX, sampling=sampling)
        assert result.text.startswith(begins)
        assert bool(result.usage.reasoning_tokens) == counts
        jsonschema_rs.validate(FOX, json.loads(result.text.rpartition("</think>")[2]))


def test_the_block_of_a_prompt_is_what_it_ends_with(plain: Engine) -> None:
    opened_block = plain.reasoning_block(plain.render_chat(ASKED, reasoning=True), 7)
    assert opened_block == ReasoningBlock(opens="<think>", closes="</think>", is_open=True, budget=7)
    assert plain.reasoning_block(plain.render_chat(ASKED, reasoning=False)) is None
    may_open = plain.reasoning_block("<|im_start|>assistant\n")
    assert may_open == ReasoningBlock(opens="<think>", closes="</think>", is_open=False)
    with opened(LLAMA, max_ctx=256) as engine:
        assert engine.reasoning_block("<think>") is None


# tools


TOOLS = [
    {"name": "look", "parameters": {"properties": {"at": {"enum": ["fox", "den"]}}, "required": ["at"]}},
    {"name": "wait", "parameters": {"properties": {}}},
]


@pytest.mark.parametrize("name", [None, "look", "wait"])
@pytest.mark.parametrize("reasoning", [True, False])
def test_a_required_call_is_made_behind_the_reasoning(
    plain: Engine, name: str | None, reasoning: bool
) -> None:
    constraint = plain.tool_constraint(TOOLS, name=name)
    result = plain.chat(ASKED, constraint=constraint, reasoning=reasoning, max_tokens=200)
    rendered = plain.render_chat(ASKED, reasoning=reasoning)
    answer = plain.answer_parser(rendered, tools=TOOLS).parse(result.text)
    assert bool(answer.reasoning) == reasoning
    assert answer.content == ""
    (call,) = answer.calls
    assert call.name == name if name else call.name in ("look", "wait")
    assert json.loads(call.arguments) in ({"at": "fox"}, {"at": "den"}, {})


def test_the_tool_whose_schema_cannot_be_used_is_named(plain: Engine) -> None:
    bad = {"name": "bad", "parameters": {"properties": {"a": {"not": {}}}}}
    with pytest.raises(
        UsageError, match=r"tool 'bad': grammar cannot be used: .*Unimplemented keys: \[\"not\"\]"
    ):
        plain.tool_constraint([*TOOLS, bad])
    assert plain.tool_constraint([*TOOLS, bad], name="look")
    with pytest.raises(UsageError, match="there is no tool 'fly'"):
        plain.tool_constraint(TOOLS, name="fly")


# what is refused, before anything runs


def test_a_constraint_that_cannot_be_used_is_refused_when_it_is_asked_for(plain: Engine) -> None:
    bad = Constraint(kind="json_schema", text='{"type": "foo"}')
    for ask in (
        lambda: plain.stream("A", constraint=bad),
        lambda: plain.stream_chat(ASKED, constraint=bad),
        lambda: plain.check_constraint(bad),
    ):
        with pytest.raises(UsageError, match="json_schema cannot be used: Invalid type: foo"):
            ask()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"constraint": "x"}, "constraint is 'x'; it must be a Constraint"),
        ({"constraint": IS_FOX, "ignore_eos": True}, "ends where the constraint does"),
        ({"reasoning_block": 5}, "reasoning_block is 5; it must be a ReasoningBlock"),
    ],
)
def test_a_request_refuses_what_makes_no_sense(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        GenerationRequest(tokens=(1,), **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"kind": "xml", "text": "x"},
            "constraint kind is 'xml'; it must be one of json_schema",
        ),
        ({"kind": "json_object", "text": "{}"}, "it has no text of its own"),
        ({"kind": "json_schema"}, "json_schema is ''; it must not be empty"),
        ({"kind": "grammar", "text": " \n"}, "it must not be empty"),
        ({"kind": "grammar", "text": 5}, "grammar is 5; it must be text"),
        ({"kind": "regex", "text": "\ud800"}, "lone surrogate"),
        ({"kind": "regex", "text": "a" * 262_145}, "regex has 262145 characters; at most 262144"),
    ],
)
def test_a_constraint_refuses_what_is_none(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Constraint(**fields)


@pytest.mark.parametrize("schema", [{"a": {1}}, {"a": float("nan")}, {"a": object()}])
def test_a_schema_that_is_no_json_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="it cannot be written as JSON"):
        Constraint.json_schema(schema)


@pytest.mark.parametrize("tag", ["", " <think>", 5])
def test_a_block_needs_its_tags(tag: Any) -> None:
    with pytest.raises(UsageError, match="it must be a tag"):
        ReasoningBlock(opens=tag, closes="</think>", is_open=True)


def test_budgets_are_whole_numbers_that_contradict_nothing(plain: Engine) -> None:
    for budget in (-2, 1.5, True):
        with pytest.raises(UsageError, match=r"reasoning_budget is .*a whole number of at least -1"):
            plain.chat(ASKED, reasoning_budget=budget)
    with pytest.raises(UsageError, match="reasoning is True, but reasoning_budget is 0"):
        plain.chat(ASKED, reasoning=True, reasoning_budget=0)


def test_a_bias_against_all_that_may_come_is_an_error_of_its_request(plain: Engine) -> None:
    never = SamplingOptions(logit_bias={4094: float("-inf")})
    with pytest.raises(UsageError, match="logit_bias forbids every token that the constraint or the budget"):
        plain.chat(ASKED, reasoning=True, reasoning_budget=2, sampling=never)
    assert plain.generate("A", max_tokens=2).tokens
