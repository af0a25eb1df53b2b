"""What a request holds its answer to: JSON, a grammar, an expression, calls of tools. Layer 7."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pyggml_dflash.api import Engine
from pyggml_dflash.errors import UsageError
from pyggml_dflash.requests import Constraint

Tool = dict[str, Any]
OWN_FORMS: Final = ("json_schema", "grammar", "regex")  # fields that OpenAI has no words for


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """Which tools a request offers, and what it wants of their calls."""

    tools: list[Tool] | None = None  # as templates show them to models; None: nothing may be called
    one: bool = False  # the answer ends with its first call
    demanded: bool = False  # the answer is calls
    name: str | None = None  # of the tool that must be called; None: any


def tool(function: Mapping[str, Any]) -> Tool:
    """A function as templates show it to models."""
    shown = {name: function.get(name) for name in ("name", "description", "parameters")}
    return {"type": "function", "function": {name: v for name, v in shown.items() if v is not None}}


def calls_of(
    functions: Sequence[Mapping[str, Any]] | None, choice: str | None, name: str | None, *, parallel: bool
) -> Calls:
    """What fields of a request mean together; the `choice` 'none' hides the tools from the model.

    `name`: the tool that must be called, with any choice.
    """
    demanded = name is not None or choice == "required"
    if not functions and demanded:
        raise UsageError("tool_choice demands a call, but there are no tools", param="tool_choice")
    if not functions or choice == "none":
        return Calls()
    return Calls(
        tools=[tool(function) for function in functions],
        one=not parallel or name is not None,
        demanded=demanded,
        name=name,
    )


def format_of(format: Mapping[str, Any] | None) -> Constraint | None:
    """What a `response_format` that was checked holds an answer to; None: nothing."""
    if format is None or format["type"] == "text":
        return None
    if format["type"] == "json_object":
        return Constraint(kind="json_object")
    return Constraint.json_schema(format.get("json_schema", format)["schema"])


def fields_of(body: Mapping[str, Any]) -> dict[str, Constraint | None]:
    """What those of `OWN_FORMS` hold an answer to, each by its name."""
    schema, grammar, regex = (body.get(name) for name in OWN_FORMS)
    return {
        "json_schema": None if schema is None else Constraint.json_schema(schema),
        "grammar": None if grammar is None else Constraint(kind="grammar", text=grammar),
        "regex": None if regex is None else Constraint(kind="regex", text=regex),
    }


def only_form(forms: Mapping[str, Constraint | None], calls: Calls) -> Constraint | None:
    """The form that is given; refuses several, and one that leaves no room for the calls."""
    given = {name: form for name, form in forms.items() if form is not None}
    names = [*given, *(["tool_choice"] if calls.demanded else [])]
    if len(names) > 1:
        raise UsageError(f"{' and '.join(names)} each say what the answer must be; give one", param=names[1])
    for name, form in given.items():
        if calls.tools:
            raise UsageError(
                f"{name} leaves no room for calls of tools; leave tools out, or choose 'none'", param=name
            )
        return form
    return None


def held_to(engine: Engine, calls: Calls, form: Constraint | None) -> Constraint | None:
    """What an answer is held to: the form, or the calls that are demanded as the model writes them.

    Compiles it, which may take seconds. Raises `UsageError` for what no answer can have.
    """
    if calls.demanded:
        assert calls.tools is not None
        return engine.tool_constraint(calls.tools, name=calls.name, parallel=not calls.one)
    if form is not None:
        engine.check_constraint(form)
    return form
