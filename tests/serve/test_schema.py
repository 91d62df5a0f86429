"""The checks of requests: those of JSON Schema, with words for a client."""

from __future__ import annotations

import json

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.profiles import examples
from tests.serve.from_schema import from_schema
from workbench.server.api.faults import ApiError
from workbench.server.api.fields import SCHEMAS
from workbench.server.api.openapi import described
from workbench.server.api.schema import check, parse

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 200) | st.floats(-2, 3) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@st.composite
def bodies(draw: st.DrawFn, path: str) -> dict:
    """A body that the schema of `path` allows, with some of its fields spoiled, maybe."""
    body = draw(from_schema(SCHEMAS[path]))
    names = sorted(SCHEMAS[path]["properties"])
    for name in draw(st.lists(st.sampled_from(names), max_size=2)):
        body[name] = draw(VALUES)
    return body


@pytest.mark.parametrize("path", SCHEMAS)
@given(data=st.data())
@settings(max_examples=examples(150))
def test_a_body_is_refused_exactly_where_json_schema_refuses_it(path, data):
    body = data.draw(bodies(path))
    allowed = jsonschema.Draft202012Validator(SCHEMAS[path]).is_valid(body)
    try:
        check(body, SCHEMAS[path])
        refused = None
    except ApiError as error:
        refused = error
    assert (refused is None) == allowed, body
    if refused is not None:
        assert refused.status == 400 and refused.param in refused.message


@pytest.mark.parametrize(
    ("path", "body", "words", "param"),
    [
        ("/v1/completions", {}, "prompt is missing", "prompt"),
        ("/v1/completions", {"prompt": "a", "n": "2"}, "n must be a whole number or null", "n"),
        ("/v1/completions", {"prompt": "a", "n": True}, "not true", "n"),
        ("/v1/completions", {"prompt": "a", "n": 0}, "n must be at least 1, and is 0", "n"),
        ("/v1/completions", {"prompt": {}}, "a list of token ids, or", "prompt"),
        ("/v1/completions", {"prompt": "a", "echo": 2}, "echo must be true or false", "echo"),
        ("/completion", {"prompt": "a", "min_p": 2}, "min_p must be at most 1", "min_p"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}, {"role": 3}]},
            "messages[1].role must be a string, not 3",
            "messages[1].role",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user"}], "chat_template_kwargs": {"bos_token": "x"}},
            "chat_template_kwargs.bos_token cannot be set here",
            "chat_template_kwargs.bos_token",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user"}], "top_logprobs": 2, "logprobs": False},
            "needs logprobs=true",
            "top_logprobs",
        ),
        (
            "/apply-template",
            {
                "messages": [{"role": "user"}],
                "add_generation_prompt": True,
                "continue_final_message": True,
            },
            "continue_final_message cannot be, with add_generation_prompt=true",
            "continue_final_message",
        ),
        (
            "/completion",
            {"prompt": "a", "n_predict": -2},
            "n_predict must be at least 0, or -1",
            "n_predict",
        ),
        ("/detokenize", {"tokens": [1, 2, "3"]}, "tokens[2] must be a whole", "tokens[2]"),
        ("/detokenize", {"tokens": [1, -2, 3]}, "tokens[1] must be at least 0", "tokens[1]"),
    ],
)
def test_an_error_says_which_field_and_why(path, body, words, param):
    with pytest.raises(ApiError) as caught:
        check(body, SCHEMAS[path])
    assert words in caught.value.message and caught.value.param == param
    assert json.loads(caught.value.body)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "Infinity"),
        (b'{"a": "\xff"}', "no UTF-8 at byte 7"),
        (b'{"a": 1', "no JSON"),
        (b"", "no JSON"),
        (b"[" * 100_000, "nests too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "no JSON"),
    ],
)
def test_what_is_no_json_is_refused_with_the_reason(raw, words):
    with pytest.raises(ApiError, match=words):
        parse(raw)


def test_the_last_of_equal_keys_counts():
    assert parse(b'{"a": 1, "a": 2}') == {"a": 2}


def test_schemas_and_the_description_are_right_themselves():
    for schema in SCHEMAS.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    document = described(1024)
    assert document["openapi"].startswith("3.1") and set(SCHEMAS) <= set(document["paths"])
    ref = document["paths"]["/tokenize"]["post"]["responses"]["default"]["content"]
    name = ref["application/json"]["schema"]["$ref"].rpartition("/")[2]
    jsonschema.Draft202012Validator.check_schema(document["components"]["schemas"][name])
