"""Forms that a request may hold its answer to: JSON, grammars, expressions, a call of a tool. Layer 8."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pyggml_dflash.api import Engine
from pyggml_dflash.errors import UsageError
from pyggml_dflash.requests import Constraint
from pyggml_dflash.serve.bodies import Ignored, RequestBody, by_type, tag
from pyggml_dflash.serve.tool_fields import Offer, Schema


class TextFormat(RequestBody):
    """An answer without a form of its own."""

    type: Literal["text"]


class JsonObjectFormat(RequestBody):
    """An answer that is any JSON object."""

    type: Literal["json_object"]


class NamedSchema(RequestBody):
    """A JSON schema; what it does not describe is refused, so `strict` changes nothing."""

    name: str
    description: Ignored = None
    schema_: Schema = Field(alias="schema")
    strict: Ignored = None


class JsonSchemaFormat(RequestBody):
    """An answer that is JSON of a schema, as chat completions ask for it."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class ResponsesSchemaFormat(NamedSchema):
    """An answer that is JSON of a schema, as responses ask for it."""

    type: Literal["json_schema"]


class MessagesSchemaFormat(RequestBody):
    """An answer that is JSON of a schema, as Anthropic's messages ask for it."""

    type: Literal["json_schema"]
    schema_: Schema = Field(alias="schema")


ResponseFormat = Annotated[
    Annotated[TextFormat, tag("text")]
    | Annotated[JsonObjectFormat, tag("json_object")]
    | Annotated[JsonSchemaFormat, tag("json_schema")],
    by_type("text", "json_object", "json_schema"),
]
ResponsesFormat = Annotated[
    Annotated[TextFormat, tag("text")]
    | Annotated[JsonObjectFormat, tag("json_object")]
    | Annotated[ResponsesSchemaFormat, tag("json_schema")],
    by_type("text", "json_object", "json_schema"),
]


def form_of(format: ResponseFormat | ResponsesFormat | MessagesSchemaFormat | None) -> Constraint | None:
    """What a format holds an answer to; None: nothing."""
    if format is None or isinstance(format, TextFormat):
        return None
    if isinstance(format, JsonObjectFormat):
        return Constraint(kind="json_object")
    named = format.json_schema if isinstance(format, JsonSchemaFormat) else format
    return Constraint.json_schema(named.schema_)


class FormFields(RequestBody):
    """Forms that OpenAI's requests have no words for."""

    json_schema: Schema | None = Field(None, description="The answer is JSON of this schema.")
    grammar: str | None = Field(None, description="The answer is a text of this grammar, in Lark or GBNF.")
    regex: str | None = Field(None, description="The whole answer matches this expression.")

    def forms(self) -> dict[str, Constraint | None]:
        """What each field holds the answer to."""
        schema, grammar, regex = self.json_schema, self.grammar, self.regex
        return {
            "json_schema": None if schema is None else Constraint.json_schema(schema),
            "grammar": None if grammar is None else Constraint(kind="grammar", text=grammar),
            "regex": None if regex is None else Constraint(kind="regex", text=regex),
        }


def held_to(engine: Engine, offered: Offer, **forms: Constraint | None) -> Constraint | None:
    """What an answer is held to by the only form that is given, or by a call that it must be.

    Compiles it, which may take seconds: not for the event loop. Raises `UsageError` for forms that no answer
    can have, or not together.
    """
    given = {name: form for name, form in forms.items() if form is not None}
    if offered.must_call:
        assert offered.tools is not None
        given["tool_choice"] = engine.tool_constraint(
            offered.tools, name=offered.name, parallel=not offered.one_call
        )
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} each say what the answer must be; give one")
    for name, form in given.items():
        if offered.tools and not offered.must_call:
            raise UsageError(f"{name} leaves no room for calls of tools; leave tools out, or choose 'none'")
        engine.check_constraint(form)
        return form
    return None
