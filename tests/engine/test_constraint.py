"""Constraints over a vocabulary: what they let through, what is refused, and that both take bounded time."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyggml_dflash import BackendError, Constraint, UsageError
from pyggml_dflash.engine.assembly import DEFAULT_MODEL
from pyggml_dflash.engine.constraint import Constraints
from pyggml_dflash.extras import install_hint
from pyggml_dflash.ggml.gguf import GgufFile
from pyggml_dflash.model.tokenizer import Tokenizer
from tests.engine.apart import program
from tests.engine.walks import walk
from tests.model.vocabularies import byte_level, sentencepiece

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "shy"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def bytes_only() -> Tokenizer:
    """Every token is a byte, but the one that ends."""
    metadata = byte_level(added=[("<|im_end|>", 3)]) | {"tokenizer.ggml.eos_token_id": 256}
    return Tokenizer.from_metadata(metadata)


def endless() -> Tokenizer:
    """No token ends an answer."""
    return Tokenizer.from_metadata(byte_level())


def pieces() -> Tokenizer:
    """SentencePiece, with bytes that are also pieces."""
    return Tokenizer.from_metadata(sentencepiece(["\u2581", "a", "b", "\u2581a", "{", '"', "1", "\n"]))


def shipped() -> Tokenizer:
    with GgufFile.open(DEFAULT_MODEL) as file:
        return Tokenizer.from_metadata(file.metadata)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return shipped()


@pytest.fixture(scope="module")
def constraints(tokenizer: Tokenizer) -> Constraints:
    return Constraints(tokenizer)


def takes(constraints: Constraints, tokenizer: Tokenizer, constraint: Constraint, text: str) -> bool:
    """True if `text`, byte by byte, is a whole answer."""
    matcher = constraints.matcher(constraint)
    of_byte = {tokenizer.token_bytes(i): i for i in range(tokenizer.n_vocab)}
    tokens = [of_byte[bytes([byte])] for byte in text.encode()]
    for token in tokens:
        if matcher.finished or not matcher.allows(token):
            return False
        matcher.accept(token)
    return matcher.finished or any(matcher.allows(token) for token in tokenizer.stop_ids)


# what is let through


@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [
        ("regex", "[0-9]{2,3}", ["12", "123"], ["1", "1234", "a"]),
        ("regex", "a|bc", ["a", "bc"], ["ab", ""]),
        ("regex", "^(a|b)c$", ["ac", "bc"], ["c", "acc"]),
        ("regex", "\u00e9+", ["\u00e9", "\u00e9\u00e9"], ["e"]),
        ("regex", "", [""], ["a"]),
        ("json_object", "", ["{}", '{"a":[1, null]}'], ["[]", "1", '"{}"']),
        ("json_schema", json.dumps(PERSON), ['{"name":"A","age":3}', '{"name": "", "age": 150}'], ["{}"]),
        (
            "json_schema",
            json.dumps(PERSON),
            ['{"name":"A","age":3,"tags":["shy"]}'],
            ['{"name":"A","age":151'],
        ),
        ("json_schema", '{"type": "integer"}', ["7", "-12"], ["1.5", '"1"', ""]),
        ("json_schema", '{"enum": ["a", 1, null]}', ['"a"', "1", "null"], ["2"]),
        (
            "grammar",
            'root ::= "yes" | "no" digit*\ndigit ::= [0-9]',
            ["yes", "no", "no12"],
            ["maybe", "yes1"],
        ),
        ("grammar", 'start: "(" start ")" | "x"', ["x", "((x))"], ["(x", "()"]),
        ("grammar", 'start: "a" %json {"type": "boolean"}', ["atrue", "afalse"], ["a1"]),
    ],
)
def test_a_constraint_takes_what_it_describes_and_nothing_else(
    kind: Any, text: str, good: list[str], bad: list[str]
) -> None:
    tokenizer = bytes_only()
    constraints, constraint = Constraints(tokenizer), Constraint(kind=kind, text=text)
    assert [answer for answer in good if not takes(constraints, tokenizer, constraint, answer)] == []
    assert [answer for answer in bad if takes(constraints, tokenizer, constraint, answer)] == []


@pytest.mark.parametrize("made", [bytes_only, endless, pieces, shipped])
def test_every_kind_of_vocabulary_writes_what_the_schema_says(made: Callable[[], Tokenizer]) -> None:
    tokenizer = made()
    constraints, n_whole = Constraints(tokenizer), 0
    for seed in range(20):
        text = walk(constraints.matcher(Constraint.json_schema(PERSON)), tokenizer, seed)
        if text is not None:
            jsonschema_rs.validate(PERSON, json.loads(text))
            n_whole += 1
    assert n_whole > 10


def test_an_answer_is_finished_with_its_last_token(constraints: Constraints, tokenizer: Tokenizer) -> None:
    matcher = constraints.matcher(Constraint(kind="regex", text="ab"))
    token = tokenizer.find("ab")
    assert token is not None
    assert matcher.allows(token)
    matcher.accept(token)
    assert matcher.finished
    matcher.reset()
    assert not matcher.finished
    assert matcher.allowed().tolist() == [token]


def test_an_answer_that_may_end_and_may_go_on_does_either(
    constraints: Constraints, tokenizer: Tokenizer
) -> None:
    matcher = constraints.matcher(Constraint(kind="regex", text="a+"))
    (a,) = tokenizer.encode("a")
    assert not any(matcher.allows(stop) for stop in tokenizer.stop_ids)
    matcher.accept(a)
    assert not matcher.finished
    assert all(matcher.allows(stop) for stop in tokenizer.stop_ids)
    assert matcher.allows(a)


def test_control_tokens_are_no_text(constraints: Constraints, tokenizer: Tokenizer) -> None:
    matcher = constraints.matcher(Constraint(kind="regex", text="(?s:.*)"))
    special = {i for i in range(tokenizer.n_vocab) if tokenizer.is_special(i)}
    assert special - tokenizer.stop_ids
    assert {i for i in special if matcher.allows(i)} == tokenizer.stop_ids


def test_a_copy_goes_its_own_way(constraints: Constraints, tokenizer: Tokenizer) -> None:
    constraint = Constraint(kind="regex", text="[ab]c")
    first, second = constraints.matcher(constraint), constraints.matcher(constraint)
    first.accept(tokenizer.encode("a")[0])
    assert first.allowed().tolist() != second.allowed().tolist()


# hypothesis: schemas that people write


def values() -> st.SearchStrategy[Any]:
    return st.one_of(st.none(), st.booleans(), st.integers(-99, 99), st.text('ab\u00e9"\\ ', max_size=4))


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    leaves = st.one_of(
        st.sampled_from([{"type": name} for name in ("boolean", "null", "integer", "number")]),
        st.builds(
            lambda low, n: {"type": "integer", "minimum": low, "maximum": low + n},
            st.integers(-50, 50),
            st.integers(0, 60),
        ),
        st.builds(
            lambda low, n: {"type": "string", "minLength": low, "maxLength": low + n},
            st.integers(0, 3),
            st.integers(0, 5),
        ),
        st.builds(
            lambda pattern: {"type": "string", "pattern": pattern},
            st.sampled_from(["^[a-c]{1,4}$", "^x", "[0-9]$"]),
        ),
        st.sampled_from([{"type": "string", "format": name} for name in ("date", "uuid", "ipv4")]),
        st.builds(lambda choices: {"enum": choices}, st.lists(values(), min_size=1, max_size=3)),
        st.builds(lambda value: {"const": value}, values()),
    )
    return st.recursive(leaves, branches, max_leaves=5)


def branches(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def of_object(parts: dict[str, Any], n_required: int, closed: bool) -> dict[str, Any]:
        schema = {"type": "object", "properties": parts, "required": list(parts)[:n_required]}
        return {**schema, "additionalProperties": False} if closed else schema

    return st.one_of(
        st.builds(
            of_object,
            st.dictionaries(st.sampled_from(["a", "b c", "\u00e9", '"']), inner, max_size=3),
            st.integers(0, 3),
            st.booleans(),
        ),
        st.builds(
            lambda items, low, n: {"type": "array", "items": items, "minItems": low, "maxItems": low + n},
            inner,
            st.integers(0, 2),
            st.integers(0, 2),
        ),
        st.builds(lambda one, other: {"anyOf": [one, other]}, inner, inner),
    )


def is_date(text: str) -> bool:
    """True for a day of some year: the library lets every year have a 29 February."""
    try:
        return text[:4].isdigit() and bool(date.fromisoformat(f"2000{text[4:]}"))
    except ValueError:
        return False


@pytest.mark.parametrize("n", [40, pytest.param(400, marks=pytest.mark.slow)])
def test_whatever_the_dice_say_the_answer_is_valid(
    constraints: Constraints, tokenizer: Tokenizer, n: int
) -> None:
    @given(schema=schemas(), seed=st.integers(0, 2**32))
    @settings(max_examples=n, deadline=None)
    def holds(schema: dict[str, Any], seed: int) -> None:
        text = walk(constraints.matcher(Constraint.json_schema(schema)), tokenizer, seed)
        if text is not None:
            answer = json.loads(text)
            jsonschema_rs.validate(schema, answer, validate_formats=True, formats={"date": is_date})

    holds()


# what is refused


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("json_schema", "{", r"json_schema is no JSON: Expecting property name"),
        ("json_schema", "[1]", r"json_schema is '\[1\]'; it must be an object"),
        ("json_schema", "true", r"json_schema is 'true'; it must be an object"),
        ("json_schema", '{"type": "text"}', r"json_schema cannot be used: Invalid type: text"),
        ("json_schema", '{"not": {}}', r'json_schema cannot be used: Unimplemented keys: \["not"\]'),
        ("json_schema", '{"type": "array", "uniqueItems": true}', r'Unimplemented keys: \["uniqueItems"\]'),
        ("json_schema", '{"$ref": "#/$defs/x"}', r"json_schema cannot be used: Pointer '/\$defs/x' does not"),
        ("json_schema", '{"$ref": "http://127.0.0.1:9/x"}', r"Default retriever does not fetch resources"),
        ("json_schema", '{"type": "string", "format": "shoe"}', r"Unknown format: shoe"),
        ("json_schema", '{"type": "string", "pattern": "("}', r"regex parse error.*unclosed group"),
        ("json_schema", '{"enum": []}', r"Unsatisfiable schema"),
        ("json_schema", '{"minimum": 5, "maximum": 3, "type": "integer"}', r"minimum \(5\) is greater than"),
        ("json_schema", '{"allOf": [{"type": "string"}, {"type": "null"}]}', r"Unsatisfiable schema"),
        ("json_schema", '{"properties": {"a": false}, "required": ["a"], "type": "object"}', r"'a' is unsat"),
        ("regex", "a(", r"regex cannot be used: .*unclosed group"),
        ("regex", "(?=a)", r"regex cannot be used: .*look-around"),
        ("grammar", "hello", r"neither Lark, which has a rule 'start:', nor GBNF: Expected ::="),
        ("grammar", "root ::= item", r"nor GBNF: Rule 'item' not found"),
        ("grammar", "start: item", r'grammar cannot be used: at 1\(8\): unknown name: "item"$'),
        ("grammar", "start: start", r"grammar cannot be used: there is no text that it describes"),
        ("grammar", 'start: "a" start', None),  # it has no end, but a beginning
    ],
)
def test_what_cannot_be_used_is_refused_with_the_reason(
    constraints: Constraints, kind: Any, text: str, message: str | None
) -> None:
    constraint = Constraint(kind=kind, text=text)
    if message is None:
        assert constraints.matcher(constraint).allowed().size
        return
    with pytest.raises(UsageError, match=message) as caught:
        constraints.matcher(constraint)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def chain(n: int, link: str) -> str:
    """Definitions that each lead to the next."""
    parts = ", ".join(f'"d{i}": {link % (i + 1)}' for i in range(n))
    return f'{{"$ref": "#/$defs/d0", "$defs": {{{parts}, "d{n}": {{"type": "null"}}}}}}'


DEEP = {
    "references": chain(7000, '{"$ref": "#/$defs/d%d"}'),
    "objects": chain(3000, '{"type": "object", "properties": {"a": {"$ref": "#/$defs/d%d"}}}'),
    "lists": chain(4000, '{"type": "array", "items": {"$ref": "#/$defs/d%d"}}'),
    "choices": chain(3800, '{"anyOf": [{"$ref": "#/$defs/d%d"}, {"type": "null"}]}'),
}


@pytest.mark.parametrize("name", DEEP)
def test_a_schema_that_is_too_deep_for_the_stack_ends_no_process(
    constraints: Constraints, tokenizer: Tokenizer, name: str
) -> None:
    """Each of these ended one, where it was compiled on a thread with a stack of 8 MiB."""
    schema = DEEP[name]
    matcher = constraints.matcher(Constraint(kind="json_schema", text=schema))
    text = walk(matcher, tokenizer, 1)
    assert text is None or isinstance(json.loads(text), dict | list | None)


RULES = "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(17_000)) + 'r17000: "a"'
TOKENS = "start: R0\n" + "".join(f'R{i}: R{i + 1} "a"\n' for i in range(300)) + 'R300: "a"'
MORE_TOKENS = "start: R0\n" + "".join(f'R{i}: R{i + 1} "a"\n' for i in range(8000)) + 'R8000: "a"'


@pytest.mark.parametrize(
    ("text", "message"),
    [(RULES, None), (TOKENS, None), (MORE_TOKENS, "too big")],
    ids=["rules", "tokens", "more"],
)
def test_a_grammar_that_is_deep_ends_no_process(
    constraints: Constraints, tokenizer: Tokenizer, text: str, message: str | None
) -> None:
    constraint = Constraint(kind="grammar", text=text)
    if message is None:
        assert walk(constraints.matcher(constraint), tokenizer, 1)
        return
    with pytest.raises(UsageError, match=message):
        constraints.matcher(constraint)


HUGE = {
    "too many properties": Constraint.json_schema(
        {"properties": {f"p{i}": {"type": "null"} for i in range(9000)}}
    ),
    "nested too deeply": Constraint(kind="json_schema", text='{"items":' * 20_000 + "{}" + "}" * 20_000),
    "a product of choices": Constraint.json_schema(
        {"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {}}} for j in range(4)]} for i in range(9)]}
    ),
    "remainders": Constraint.json_schema({"type": "integer", "multipleOf": 99_999_989}),
    "an intersection of expressions": Constraint.json_schema(
        {"allOf": [{"type": "string", "pattern": f".*{c}.*"} for c in "abcdefghijklmnop"]}
    ),
    "an intersection of terminals": Constraint(
        kind="grammar", text="start: T\nT: " + " & ".join(f"/.*{i}.*/" for i in range(150))
    ),
    "a long sequence": Constraint(kind="grammar", text="start: " + '"a" ' * 65_000),
    "brackets": Constraint(kind="grammar", text="root ::= " + "(" * 5000 + '"a"' + ")" * 5000),
    "brackets in Lark": Constraint(kind="grammar", text="start: " + "(" * 5000 + '"a"' + ")" * 5000),
    "many rules": Constraint(
        kind="grammar", text='root ::= "a"\n' + "".join(f'r{i} ::= "a"\n' for i in range(2000))
    ),
    "a repetition": Constraint(kind="regex", text="((a{1,1000}){1,1000}){1,1000}(x|y)*a{1000000}"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if "terminals" in n else ()) for n in HUGE]
)
def test_a_constraint_that_explodes_is_refused_before_long(
    constraints: Constraints, tokenizer: Tokenizer, name: str
) -> None:
    """At once, or when the answer gets where it explodes: within seconds, and two of these took minutes."""
    with pytest.raises(UsageError, match=r"cannot be used|cannot go on|no JSON|GBNF") as caught:
        walk(constraints.matcher(HUGE[name]), tokenizer, 1)
    assert len(str(caught.value)) < 500


def test_states_that_double_with_each_letter_are_made_when_they_are_met(
    constraints: Constraints, tokenizer: Tokenizer
) -> None:
    text = "(a|b)*a(a|b){25}"
    found = walk(constraints.matcher(Constraint(kind="regex", text=text)), tokenizer, 3)
    assert found is None or re.fullmatch(text, found)


def test_the_time_of_gbnf_rules_is_bounded(constraints: Constraints) -> None:
    """Each rule hangs on the next, so that the library goes through all of them as often as there are."""
    rules = [f"r{i} ::= r{i + 1}\n" for i in range(998)]
    chain = Constraint(kind="grammar", text="".join([*rules, 'r998 ::= "a"\n', "root ::= r0\n"]))
    assert constraints.matcher(chain).allowed().size == 1
    longer = Constraint(kind="grammar", text="".join(f"r{i} ::= r{i + 1}\n" for i in range(1001)))
    with pytest.raises(UsageError, match="grammar has 1001 GBNF rules; at most 1000"):
        constraints.matcher(longer)


def test_a_constraint_is_tried_out_once(constraints: Constraints, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine compiles again what was dropped while its request waited, and must not be held up."""
    first = Constraint(kind="regex", text="[a-f]{7}")
    constraints.matcher(first)
    for n in range(20):
        constraints.matcher(Constraint.json_schema({"const": n}))
    assert first not in constraints._compiled
    monkeypatch.setattr("sys.executable", "/nowhere")
    assert constraints.matcher(first).allowed().size
    with pytest.raises(BackendError, match="no process can be started"):
        constraints.matcher(Constraint(kind="regex", text="[a-f]{8}"))


def test_without_the_package_the_error_says_how_to_get_it() -> None:
    done = program(
        "import sys; sys.modules['llguidance'] = None\n"
        "from pyggml_dflash import Constraint, Engine, UsageError\n"
        "with Engine.open(max_ctx=256, device='CPU', threads=1, spec='off') as engine:\n"
        "    assert engine.generate('A', max_tokens=1).tokens\n"
        "    try: engine.generate('A', max_tokens=1, constraint=Constraint(kind='json_object'))\n"
        "    except UsageError as error: print(error)\n"
    )
    assert done.returncode == 0, done.stderr
    assert install_hint("serve") in done.stdout


def test_the_package_is_not_imported_before_it_is_needed() -> None:
    done = program(
        "import sys; from pyggml_dflash import Engine\n"
        "with Engine.open(max_ctx=256, device='CPU', threads=1, spec='off') as engine:\n"
        "    engine.generate('A', max_tokens=1)\n"
        "print('llguidance' in sys.modules)\n"
    )
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr


# threads


def test_threads_compile_and_match_side_by_side(tokenizer: Tokenizer) -> None:
    constraints = Constraints(tokenizer)
    schemas = [{"type": "string", "minLength": n, "maxLength": n} for n in range(30)]  # more than are kept

    def is_written(schema: dict[str, Any]) -> bool:
        text = walk(constraints.matcher(Constraint.json_schema(schema)), tokenizer, 1)
        return text is not None and len(json.loads(text)) == schema["minLength"]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(is_written, schemas * 2))
