"""Values that a schema allows, for `hypothesis`: of the keywords that our schemas have; and bodies
that are spoiled."""

from __future__ import annotations

from typing import Any

import jsonschema
from hypothesis import strategies as st

from workbench.server.api.fields import SCHEMAS

Schema = dict[str, Any]
FEW = 3  # entries and letters beyond the least
MANY = 12  # optional fields of an object; of more, so many are drawn


def from_schema(schema: Schema) -> st.SearchStrategy[Any]:
    if "anyOf" in schema:
        return st.one_of([from_schema(one) for one in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    kinds = schema.get("type", ["null", "boolean"])  # where anything will do
    return st.one_of([_OF_TYPE[k](schema) for k in ([kinds] if isinstance(kinds, str) else kinds)])


def _numbers(schema: Schema) -> st.SearchStrategy[Any]:
    above = schema.get("exclusiveMinimum")
    return st.floats(
        schema.get("minimum", above), schema.get("maximum"), exclude_min=above is not None,
        allow_nan=False, allow_infinity=False,
    )  # fmt: skip


def _strings(schema: Schema) -> st.SearchStrategy[str]:
    least = schema.get("minLength", 0)
    return st.text(min_size=least, max_size=least + FEW)


def _arrays(schema: Schema) -> st.SearchStrategy[Any]:
    least = schema.get("minItems", 0)
    most = min(schema.get("maxItems", least + FEW), least + FEW)
    return st.lists(from_schema(schema["items"]) if most else st.nothing(), min_size=least,
                    max_size=most)  # fmt: skip


def _objects(schema: Schema) -> st.SearchStrategy[Any]:
    fields = dict(schema.get("properties", {}))
    required = {name: from_schema(fields.pop(name)) for name in schema.get("required", ())}
    optional = {name: st.deferred(lambda of=of: from_schema(of)) for name, of in fields.items()}
    if len(optional) <= MANY:
        drawn = st.fixed_dictionaries(required, optional=optional)
    else:
        some = st.sets(st.sampled_from(sorted(optional)), max_size=MANY)
        drawn = some.flatmap(
            lambda names: st.fixed_dictionaries(required | {n: optional[n] for n in sorted(names)})
        )
    if "dependentSchemas" not in schema:
        return drawn
    allowed = jsonschema.Draft202012Validator({"dependentSchemas": schema["dependentSchemas"]})
    return drawn.filter(allowed.is_valid)


_OF_TYPE = {
    "string": _strings,
    "integer": lambda s: st.integers(s.get("minimum"), s.get("maximum")),
    "number": _numbers,
    "boolean": lambda s: st.booleans(),
    "null": lambda s: st.none(),
    "array": _arrays,
    "object": _objects,
}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 200) | st.floats(-2, 3) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@st.composite
def bodies(draw: st.DrawFn, path: str) -> dict[str, Any]:
    """A body that the schema of `path` allows, with some of its fields spoiled, maybe."""
    body = draw(from_schema(SCHEMAS[path]))
    names = sorted(SCHEMAS[path]["properties"])
    for name in draw(st.lists(st.sampled_from(names), max_size=2)):
        body[name] = draw(VALUES)
    return body


def bounded(body: dict[str, Any]) -> dict[str, Any]:
    """The body, of the model that is served, with answers short and few enough for a test."""
    for name in ("max_tokens", "max_completion_tokens", "n_predict", "n"):
        if isinstance(body.get(name), int | float) and body[name] > 5:
            body[name] = 5
    if isinstance(body.get("timeout"), int | float) and body["timeout"] > 8:
        body["timeout"] = 8
    if isinstance(body.get("model"), str):
        body["model"] = "tiny"
    return body
