"""What a line holds its answer to: JSON, a grammar, an expression, calls of tools. Layer 8."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pyggml_dflash.errors import UsageError
from pyggml_dflash.options import check_choice, check_flag, refusal
from pyggml_dflash.requests import Constraint


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """Which tools a line offers, and what it wants of their calls."""

    tools: Any = None  # the engine's to check; None: nothing may be called
    one: bool = False  # the answer ends with its first call
    demanded: bool = False  # the answer is calls
    name: str | None = None  # of the tool that must be called; None: any


def calls_of(tools: Any, choice: object, parallel: object) -> Calls:
    """What the fields mean together; 'none' hides the tools from the model."""
    kind, name = _choice(choice)
    if parallel is not None:
        check_flag("parallel_tool_calls", parallel)
    no_tools = tools is None or tools == []
    if no_tools and kind == "required":
        raise UsageError("tool_choice demands a call, but there are no tools")
    if no_tools or kind == "none":
        return Calls()
    return Calls(
        tools=tools, one=parallel is False or name is not None, demanded=kind == "required", name=name
    )


def _choice(choice: object) -> tuple[str, str | None]:
    """Whether a call may come or must, and of which tool."""
    if isinstance(choice, Mapping):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if choice != {"type": "function", "function": {"name": name}} or not isinstance(name, str):
            wanted = 'it must name a tool as in {"type": "function", "function": {"name": "f"}}'
            raise refusal("tool_choice", choice, wanted)
        return "required", name
    if choice is not None:
        check_choice("tool_choice", choice, ("auto", "none", "required"))
    return str(choice or "auto"), None


def form_of(fields: Mapping[str, Any], default: Constraint | None) -> Constraint | None:
    """What the one field of `FORMS` that is not None holds an answer to; `default` where none is given."""
    given = {name: value for name, value in fields.items() if value is not None}
    forms = {name: FORMS[name](value) for name, value in given.items()}
    found = [name for name, form in forms.items() if form is not None]
    if len(found) > 1:
        raise UsageError(f"{' and '.join(found)} each say what the answer must be; give one")
    if not forms:
        return default
    return forms[found[0]] if found else None


def _schema(value: object) -> Constraint:
    if not isinstance(value, Mapping):
        raise refusal("json_schema", value, "it must be an object")
    return Constraint.json_schema(value)


def _response_format(value: object) -> Constraint | None:
    if value == {"type": "text"}:
        return None
    if value == {"type": "json_object"}:
        return Constraint(kind="json_object")
    named = value.get("json_schema") if isinstance(value, Mapping) else None
    if (
        not isinstance(value, Mapping)
        or value != {"type": "json_schema", "json_schema": named}
        or not isinstance(named, Mapping)
        or not {"schema"} <= named.keys() <= {"name", "description", "schema", "strict"}
    ):
        wanted = 'it must be as {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}'
        raise refusal("response_format", value, f'{wanted}, or its type "text" or "json_object" alone')
    return _schema(named["schema"])


FORMS: Final[Mapping[str, Callable[[Any], Constraint | None]]] = {
    "response_format": _response_format,
    "json_schema": _schema,
    "grammar": lambda text: Constraint(kind="grammar", text=text),
    "regex": lambda text: Constraint(kind="regex", text=text),
}
