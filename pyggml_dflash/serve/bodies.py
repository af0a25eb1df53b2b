"""JSON as it leaves the server, and what all request and response bodies have in common. Layer 8."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Final

from fastapi import Response
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag
from pydantic_core import PydanticSerializationError

# Valid in JSON, but line ends to many programs that read a stream by lines.
_LINE_ENDS: Final = {"\u2028": "\\u2028", "\u2029": "\\u2029", "\x85": "\\u0085"}

Ignored = Annotated[Any, Field(description="Accepted; it changes nothing here.")]
Unsupported = Annotated[None, Field(description="Not supported: refused unless null or absent.")]


TAG_MARK: Final = "*"  # begins the tags of `by_type`, which are no part of a field's name


def tag(type: str) -> Tag:
    """Marks the member of a union that is for values of a type."""
    return Tag(TAG_MARK + type)


def by_type(*types: str) -> Discriminator:
    """Chooses the member of a union by a value's `type`, so that a refusal is about that member only.

    A value without a type has the first one.
    """

    def of(value: Any) -> str | None:
        found = value.get("type", types[0]) if isinstance(value, dict) else getattr(value, "type", None)
        return TAG_MARK + found if isinstance(found, str) and found in types else None

    return Discriminator(
        of,
        custom_error_type="unknown_kind",
        custom_error_message=f"its type must be {' or '.join(map(repr, types))}",
    )


class RequestBody(BaseModel):
    """A request: unknown names are refused, and no value is taken for one of another type."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


class ResponseBody(BaseModel):
    """A response; only what was set is sent."""

    model_config = ConfigDict(protected_namespaces=())

    def json_bytes(self) -> bytes:
        """UTF-8 JSON on one line."""
        try:
            return _escaped(self.model_dump_json(exclude_unset=True)).encode()
        except PydanticSerializationError:  # text that is no Unicode, which a request may have brought
            return json_bytes(self.model_dump(exclude_unset=True))


def json_bytes(value: Any) -> bytes:
    """UTF-8 JSON on one line; text that is no Unicode, as a request may quote, is escaped."""
    try:
        return _escaped(json.dumps(value, ensure_ascii=False, allow_nan=False)).encode()
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False).encode()


def json_response(
    value: ResponseBody | Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """A JSON answer."""
    content = value.json_bytes() if isinstance(value, ResponseBody) else json_bytes(value)
    return Response(content, status, dict(headers or {}), media_type="application/json")


def _escaped(text: str) -> str:
    for char, escape in _LINE_ENDS.items():
        text = text.replace(char, escape)
    return text
