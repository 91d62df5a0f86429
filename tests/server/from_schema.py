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
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 200) | st.floats(-2, 3) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


def from_schema(schema: Schema) -> st.SearchStrategy[Any]:
    above, low, high = (schema.get(k) for k in ("exclusiveMinimum", "minimum", "maximum"))
    least = schema.get("minLength", schema.get("minItems", 0))
    match schema:
        case {"anyOf": several}:
            return st.one_of([from_schema(one) for one in several])
        case {"enum": values}:
            return st.sampled_from(values)
        case {"type": [*kinds]}:
            return st.one_of([from_schema(schema | {"type": kind}) for kind in kinds])
        case {"type": "string"}:
            return st.text(min_size=least, max_size=least + FEW)
        case {"type": "integer"}:
            return st.integers(low, high)
        case {"type": "number"}:
            finite = {"allow_nan": False, "allow_infinity": False}
            low = above if low is None else low
            return st.floats(low, high, exclude_min=above is not None, **finite)
        case {"type": "array"}:
            most = min(schema.get("maxItems", least + FEW), least + FEW)
            inner = from_schema(schema["items"]) if most else st.nothing()
            return st.lists(inner, min_size=least, max_size=most)
        case {"type": "object"}:
            return _objects(schema)
        case {"type": "null"}:
            return st.none()
    return st.booleans() if "type" in schema else st.none() | st.booleans()  # anything will do


def _objects(schema: Schema) -> st.SearchStrategy[Any]:
    fields = dict(schema.get("properties", {}))
    required = {name: from_schema(fields.pop(name)) for name in schema.get("required", ())}
    optional = {name: st.deferred(lambda of=of: from_schema(of)) for name, of in fields.items()}
    some = st.sets(st.sampled_from(sorted(optional) or [""]), max_size=MANY)
    drawn = some.flatmap(
        lambda names: st.fixed_dictionaries(required | {n: optional[n] for n in sorted(names)})
    )
    if len(optional) <= MANY:
        drawn = st.fixed_dictionaries(required, optional=optional)
    allowed = jsonschema.Draft202012Validator(
        {"dependentSchemas": schema.get("dependentSchemas", {})}
    )
    return drawn.filter(allowed.is_valid)


@st.composite
def bodies(draw: st.DrawFn, path: str) -> dict[str, Any]:
    """A body that the schema of `path` allows, with some of its fields spoiled, maybe; of the model
    that is served, with answers short and few enough for a test."""
    body = draw(from_schema(SCHEMAS[path]))
    names = sorted(SCHEMAS[path]["properties"])
    for name in draw(st.lists(st.sampled_from(names), max_size=2)):
        body[name] = draw(VALUES)
    most = dict.fromkeys(("max_tokens", "max_completion_tokens", "n_predict", "n"), 5)
    for name, least in (most | {"timeout": 8}).items():
        if isinstance(body.get(name), int | float):
            body[name] = min(body[name], least)
    if isinstance(body.get("model"), str):
        body["model"] = "tiny"
    return body
