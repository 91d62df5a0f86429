"""Checks a value against a JSON schema, and names the field that is wrong.

This module knows the part of JSON Schema 2020-12 that the interface needs: type, enum, anyOf, the
bounds of numbers, strings, arrays and objects, items, properties, required and dependentSchemas. A
schema may give the client's message in `x-refusal`; else the message is made from the schema.

The `jsonschema` package checks the same, and tests compare the two. The package has no messages for
a client, and makes an object for every value. With its keywords for types, lists, objects and anyOf
replaced, it took 30 to 40 us more for a body of 1 kB. For a chat of 10,000 messages in small parts
(16 MiB) it took 10 s, not 4. Unchanged, it took 1.5 ms more for 200 token ids.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from workbench.server.api.faults import bad

Schema = dict[str, Any]
SHOWN = 60  # characters of a value in a message


def _is_whole(value: Any) -> bool:
    if isinstance(value, float):
        return value.is_integer()
    return isinstance(value, int) and not isinstance(value, bool)


_IS: dict[str, Callable[[Any], bool]] = {
    "string": lambda v: isinstance(v, str),
    "integer": _is_whole,
    "number": lambda v: isinstance(v, int | float) and not isinstance(v, bool),
    "boolean": lambda v: isinstance(v, bool),
    "array": lambda v: isinstance(v, list),
    "object": lambda v: isinstance(v, dict),
    "null": lambda v: v is None,
}
_WORDS = {
    "string": "a string", "integer": "a whole number", "number": "a number", "null": "null",
    "boolean": "true or false", "array": "a list", "object": "an object",
}  # fmt: skip
# keyword -> (the measured quantity of a value, whether the bound holds, the words of the bound)
_BOUNDS: dict[str, tuple[Callable[[Any], float], Callable[[float, float], bool], str]] = {
    "minimum": (float, lambda v, bound: v >= bound, "be at least {}"),
    "maximum": (float, lambda v, bound: v <= bound, "be at most {}"),
    "exclusiveMinimum": (float, lambda v, bound: v > bound, "be above {}"),
    "minLength": (len, lambda v, bound: v >= bound, "have at least {} characters"),
    "maxLength": (len, lambda v, bound: v <= bound, "have at most {} characters"),
    "minItems": (len, lambda v, bound: v >= bound, "have at least {} entries"),
    "maxItems": (len, lambda v, bound: v <= bound, "have at most {} entries"),
    "maxProperties": (len, lambda v, bound: v <= bound, "have at most {} entries"),
}
_OF_TYPE = {
    "number": ("minimum", "maximum", "exclusiveMinimum"),
    "string": ("minLength", "maxLength"),
    "array": ("minItems", "maxItems"),
    "object": ("maxProperties",),
}


def check(value: Any, schema: Schema, name: str = "") -> None:
    """Raises ApiError (400) where `schema` does not allow `value`. name: the field's."""
    problem = _problem(value, schema, name)
    if problem is not None:
        where, what = problem
        raise bad(f"{where or 'the body'} {what}", where or None)


def _problem(value: Any, schema: Schema, name: str) -> tuple[str, str] | None:
    """The field that is wrong, and the words for what it must be; None where all is right."""
    found = _of_the_value(value, schema, name)
    if found is not None and "x-refusal" in schema:
        return name, schema["x-refusal"]
    return found


def _of_the_value(value: Any, schema: Schema, name: str) -> tuple[str, str] | None:
    if "anyOf" in schema and all(_problem(value, s, name) for s in schema["anyOf"]):
        kinds = " or ".join(dict.fromkeys(_described(s) for s in schema["anyOf"]))
        return name, f"must be {schema.get('title', kinds)}, not {shown(value)}"
    if "type" in schema:
        types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        if not any(_IS[kind](value) for kind in types):
            return name, f"must be {_described(schema)}, not {shown(value)}"
    if "enum" in schema and not any(_same(value, allowed) for allowed in schema["enum"]):
        values = ", ".join(map(json.dumps, schema["enum"]))
        return name, f"must be one of {values}, not {shown(value)}"
    if (what := _out_of_bounds(value, schema)) is not None:
        return name, f"must {what}, and is {shown(value)}"
    if isinstance(value, list) and "items" in schema:
        return _of_items(value, schema["items"], name)
    if isinstance(value, dict):
        return _of_fields(value, schema, name)
    return None


def _of_items(values: list[Any], schema: Schema, name: str) -> tuple[str, str] | None:
    if schema.get("type") == "integer" and set(map(type, values)) == {int}:
        # a prompt may have many thousand ids: only the least and the greatest are checked
        suspects = {min(values), max(values)}
        if not any(_problem(value, schema, name) for value in suspects):
            return None
    for at, value in enumerate(values):
        if problem := _problem(value, schema, f"{name}[{at}]"):
            return problem
    return None


def _of_fields(value: dict[str, Any], schema: Schema, name: str) -> tuple[str, str] | None:
    prefix = f"{name}." if name else ""
    for field in schema.get("required", ()):
        if field not in value:
            return prefix + field, "is missing"
    properties = schema.get("properties", {})
    for field in min(value, properties, key=len):  # loops over the shorter of the two
        if field in value and field in properties:
            problem = _problem(value[field], properties[field], prefix + field)
            if problem:
                return problem
    for field, of in schema.get("dependentSchemas", {}).items():
        if field in value and (problem := _problem(value, of, name)):
            return prefix + field, problem[1]
    return None


def _out_of_bounds(value: Any, schema: Schema) -> str | None:
    kind = next((kind for kind in _OF_TYPE if _IS[kind](value)), None)
    for keyword in _OF_TYPE.get(kind or "", ()):
        if keyword in schema:
            measure, holds, words = _BOUNDS[keyword]
            measured = value if measure is float else measure(value)
            if not holds(measured, schema[keyword]):
                return words.format(schema[keyword])
    return None


def _same(value: Any, allowed: Any) -> bool:
    """Whether two values are equal in JSON, where true is not 1."""
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)


def _described(schema: Schema) -> str:
    if "title" in schema:
        return schema["title"]
    kinds = schema.get("type", "object")
    return " or ".join(_WORDS[kind] for kind in (kinds if isinstance(kinds, list) else [kinds]))


def shown(value: Any) -> str:
    """A value as JSON, cut where it is long."""
    if isinstance(value, list | dict) and len(value) > SHOWN:
        return f"{_WORDS['array' if isinstance(value, list) else 'object']} of {len(value)} entries"
    text = json.dumps(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def parse(body: bytes) -> dict[str, Any]:
    """The object of a JSON text. Raises ApiError (400) for a text that is no JSON, nests too
    deeply, or is no object."""
    try:
        found = json.loads(body.decode("utf-8"), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise bad(f"the body is no UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise bad(
            f"the body is no JSON: {error.msg} (line {error.lineno} column {error.colno})"
        ) from None
    except RecursionError:
        raise bad("the body nests too deeply") from None
    except ValueError as error:  # NaN or Infinity, or a number of thousands of digits
        raise bad(f"the body is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise bad("the body must be a JSON object")
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")
