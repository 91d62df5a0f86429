"""The fields of requests: a table without gaps, the schemas that are made of it, and the checks of
requests, which keep to both. And requests that are fuzzed from the schemas and in their bytes:
whatever comes, never a 5xx, and the server goes on."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench.server
from tests.profiles import examples
from tests.server.from_schema import VALUES, bodies
from tests.server.live import USER, Live, connected, events_of, posted
from workbench.server.api.faults import ApiError
from workbench.server.api.fields import (
    ANSWERS,
    CHAT,
    CHATS,
    COMPLETIONS,
    FIELDS,
    NATIVE,
    REFUSED,
    SCHEMAS,
    WITHOUT_EFFECT,
)
from workbench.server.api.openapi import described
from workbench.server.api.schema import check, parse

PAGE = Path(workbench.server.__file__).with_name("README.md")
N_VOCAB = 1024
CHATTED = {"messages": USER}
BODIES = {COMPLETIONS: {"prompt": [5]}, CHAT: CHATTED, NATIVE: {"prompt": [5]}}
BODIES = {route: body | {"max_tokens": 2} for route, body in BODIES.items()}
ROWS = [(name, route, of) for of in FIELDS for route in of.routes for name in of.names.split()]
PROBES = (0.37, 12345, True, False, "x", [1], ["x"], {"type": "x"})
# of the issue, and their kin: fields that engines have, with a value that changes an answer
CHANGES = {
    "guided_json": {"type": "object"}, "guided_regex": "a+", "guided_choice": ["a", "b"],
    "guided_grammar": "root ::= 'a'", "structured_outputs": {"regex": "a"}, "mirostat": 2,
    "dry_multiplier": 0.8, "xtc_probability": 0.5, "typical_p": 0.9, "dynatemp_range": 0.5,
    "samplers": ["temperature"], "min_tokens": 5, "bad_words": ["a"], "use_beam_search": True,
    "prompt_logprobs": 1, "truncate_prompt_tokens": 5, "lora": [{"id": 0, "scale": 1.0}],
    "id_slot": 2, "n_keep": 5, "chat_template": "{{ messages }}", "repeat_penalty": 1.1,
    "logit_bias": [[5, -1]], "max_new_tokens": 3, "top_n_sigma": 1.0, "n_indent": 2,
    "include_stop_str_in_output": True, "skip_special_tokens": False, "verbosity": "low",
    "allowed_token_ids": [1], "regex": "a", "response_format": {"type": "json_object"},
    "tools": [{"type": "function"}], "thinking": {"type": "enabled"}, "best_of": 3,
}  # fmt: skip
# what llama.cpp's own page sends: everything, at the value that turns it off
LLAMA_CPPS = {
    "dynatemp_range": 0, "dynatemp_exponent": 1, "xtc_probability": 0, "xtc_threshold": 0.1,
    "typ_p": 1, "min_p": 0, "repeat_last_n": 64, "repeat_penalty": 1, "presence_penalty": 0,
    "dry_multiplier": 0, "dry_base": 1.75, "dry_allowed_length": 2, "dry_penalty_last_n": -1,
    "mirostat": 0, "mirostat_tau": 5, "mirostat_eta": 0.1, "n_keep": 0, "id_slot": -1,
    "samplers": ["dry", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
    "n_probs": 0, "min_keep": 0, "logit_bias": [], "grammar": "", "lora": [],
    "t_max_predict_ms": -1, "timings_per_token": True, "reasoning_format": "auto",
    "cache_prompt": True, "max_tokens": -1, "top_n_sigma": -1,
}  # fmt: skip


def refusal(body: Any, schema: dict[str, Any]) -> ApiError | None:
    try:
        check(body, schema)
    except ApiError as error:
        assert error.status == 400 and (error.param or "body") in error.message
        return error
    return None


def published(path: str, body: Any) -> bool:
    """Whether the description allows it."""
    post = described(N_VOCAB)["paths"][path]["post"]
    schema = post["requestBody"]["content"]["application/json"]["schema"]
    return jsonschema.Draft202012Validator(schema).is_valid(body)


def test_every_field_has_one_row_at_every_path_that_answers():
    counts = Counter((name, route) for name, route, _ in ROWS)
    names = {name for name, route, _ in ROWS if route in ANSWERS}
    assert len(names) > 150 and max(counts.values()) == 1
    assert {*itertools.product(names, ANSWERS)} <= {*counts}


@pytest.mark.parametrize("route", ANSWERS)
def test_a_field_is_refused_unless_it_asks_for_nothing(route):
    for name, of, field in ROWS:
        if of != route or field.treatment != REFUSED:
            continue
        allowed = jsonschema.Draft202012Validator(field.schema).is_valid
        assert allowed(None), name
        probe = next(value for value in PROBES if not allowed(value))
        error = refusal(BODIES[route] | {name: probe}, SCHEMAS[route])
        assert error is not None and error.param == name
        assert error.message.startswith(f"{name} asks for ") and "\n" not in error.message
        for nothing in field.schema.get("enum", [None]):
            body = BODIES[route] | {name: nothing}
            assert refusal(body, SCHEMAS[route]) is None, (name, nothing)
    for name, value in CHANGES.items():
        error = refusal(BODIES[route] | {name: value}, SCHEMAS[route])
        assert error is not None and error.param.partition(".")[0] == name


@pytest.mark.parametrize("route", ANSWERS)
def test_what_changes_no_answer_passes(server, route):
    for probe in (True, "x", [1, {"a": "b"}]):
        idle = {name: probe for name, of, field in ROWS
                if of == route and field.treatment == WITHOUT_EFFECT}  # fmt: skip
        assert len(idle) > 30
        server.post(route, **BODIES[route] | idle | {"no_engine_has_this": {"deep": [1]}})
    server.post(route, **BODIES[route] | LLAMA_CPPS)


def test_the_page_lists_the_table():
    section = PAGE.read_text().partition("\n## Fields\n")[2].partition("\n## ")[0]
    said = set()
    for line in re.findall(r"^- \*\*(.*?)\.$", section, re.M | re.S):
        treatment, _, rest = line.partition("**")
        where, _, names = rest.partition(":")
        routes = set(re.findall(r"`(/.*?)`", where))
        routes |= set(ANSWERS) if "every path that answers" in where else set()
        said |= {(n, r, treatment.lower()) for n in re.findall(r"`(.*?)`", names) for r in routes}
    assert said == {(name, route, field.treatment) for name, route, field in ROWS}


@pytest.fixture(scope="module")
def http(server):
    with server.http() as client:
        yield client


def sent(http: httpx.Client, path: str, raw: bytes) -> tuple[int, dict[str, Any]]:
    """The status, and the error. Every answer is well made, and none is left behind it."""
    answer = http.post(path, content=raw, headers={"content-type": "application/json"})
    assert answer.status_code < 500, (raw, answer.text)
    is_stream = answer.headers["content-type"].startswith("text/event-stream")
    said, error = events_of(answer) if is_stream else answer.json(), {}
    if answer.status_code != 200:
        error = said["error"]
        assert error["message"] and set(error) == {"message", "type", "param", "code"}
    assert "workbench:requests_pending 0.0" in http.get("/metrics").text
    return answer.status_code, error


@pytest.mark.parametrize("path", SCHEMAS)
@given(data=st.data())
@settings(max_examples=examples(150))
def test_a_body_is_answered_where_json_schema_allows_it(http, path, data):
    """And refused where it does not."""
    body = data.draw(bodies(path) | VALUES)
    if path in CHATS and isinstance(body, dict):  # what the template of the tests does not do
        body.pop("reasoning_effort", None)
        if isinstance(messages := body.get("messages"), list) and messages:
            messages[-1] = {"role": "assistant", "content": "x"}
    allowed = jsonschema.Draft202012Validator(SCHEMAS[path]).is_valid(body)
    assert (refusal(body, SCHEMAS[path]) is None) == allowed, body
    status, error = sent(http, path, json.dumps(body).encode())
    assert allowed or status == 400
    if published(path, body):
        # what no field shows, but the request as a whole
        whole = error.get("code") == "context_length_exceeded"
        assert status == 200 or whole or "no tokens" in error.get("message", ""), (body, error)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@given(data=st.data())
@settings(max_examples=examples(60))
def test_bytes_that_are_nearly_json(http, path, data):
    raw = bytearray(json.dumps(data.draw(bodies(path))).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    sent(http, path, bytes(raw))


REQUESTS = [
    b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n",
    posted({"prompt": [1, 2], "max_tokens": 3}),
    b"POST /tokenize HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
    b'12\r\n{"content": "waits\r\n2\r\n"}\r\n0\r\n\r\n',
]


def answers_to(server: Live, data: bytes, cuts: list[int], quiet_s: float = 0.1) -> list[int]:
    """Statuses that come back for bytes sent in pieces, until no more comes for a moment."""
    said = b""
    with connected(server.url) as sock, contextlib.suppress(OSError):
        for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
            sock.sendall(data[begin:end])
        sock.settimeout(quiet_s)  # an error: no more came, or it was closed with bytes unread
        while part := sock.recv(1 << 16):
            said += part
    return [int(found) for found in re.findall(rb"HTTP/1\.1 (\d{3}) ", said)]


@given(data=st.data())
@settings(max_examples=examples(60))
def test_bytes_that_are_nearly_http(server, http, data):
    some = st.lists(st.sampled_from(REQUESTS), min_size=1, max_size=3)
    raw = bytearray(b"".join(data.draw(some)))
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=4)))
    assert all(200 <= status < 500 for status in answers_to(server, bytes(raw), cuts)), raw
    assert http.get("/health").json() == {"status": "ok"}


@pytest.mark.parametrize("raw", REQUESTS)
def test_the_requests_that_are_spoiled_are_good_ones(server, raw):
    assert answers_to(server, raw, [], 0.5) == [200]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (NATIVE, {"prompt": [N_VOCAB]}),
        (COMPLETIONS, {"prompt": [[1], [5, N_VOCAB]]}),
        ("/detokenize", {"tokens": [N_VOCAB]}),
        (CHAT, CHATTED | {"top_logprobs": 3, "logprobs": False}),
    ],
)
def test_what_is_out_of_range_the_schema_does_not_allow(http, texts, path, body):
    assert texts.tokenizer.n_vocab == N_VOCAB
    assert not published(path, body)
    assert sent(http, path, json.dumps(body).encode())[0] == 400


OPEN = {"add_generation_prompt": True, "continue_final_message": True}


@pytest.mark.parametrize(
    ("path", "body", "words", "param"),
    [
        (COMPLETIONS, {}, "prompt is missing", "prompt"),
        (COMPLETIONS, {"prompt": "a", "n": "2"}, "n must be a whole number or null", "n"),
        (COMPLETIONS, {"prompt": "a", "n": 0}, "n must be at least 1, and is 0", "n"),
        (COMPLETIONS, {"prompt": {}}, "a list of token ids, or", "prompt"),
        (COMPLETIONS, {"prompt": "a", "echo": 2}, "echo must be true or false", "echo"),
        (CHAT, {"messages": [*USER, {"role": 3}]}, "a string, not 3", "messages[1].role"),
        (CHAT, CHATTED | {"chat_template_kwargs": {"bos_token": "x"}}, "cannot be set here",
         "chat_template_kwargs.bos_token"),
        (CHAT, CHATTED | {"top_logprobs": 2}, "needs logprobs=true", "top_logprobs"),
        ("/apply-template", CHATTED | OPEN, "cannot be, with", "continue_final_message"),
        (NATIVE, {"prompt": "a", "n_predict": -2}, "at least 0, or -1", "n_predict"),
        ("/detokenize", {"tokens": [1, 2, "3"]}, "must be a whole", "tokens[2]"),
        ("/detokenize", {"tokens": [1, -2, 3]}, "must be at least 0", "tokens[1]"),
    ],
)  # fmt: skip
def test_an_error_says_which_field_and_why(path, body, words, param):
    error = refusal(body, SCHEMAS[path])
    assert error is not None and words in error.message and error.param == param
    assert json.loads(error.body)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b'{"a": -Infinity}', "Infinity"),
        (b'{"a": "\xff"}', "no UTF-8 at byte 7"),
        (b'{"a": 1', "no JSON"),
        (b"[" * 100_000, "nests too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "no JSON"),
    ],
)
def test_what_is_no_json_is_refused_with_the_reason(raw, words):
    with pytest.raises(ApiError, match=words):
        parse(raw)


def test_schemas_and_the_description_are_right_themselves():
    assert parse(b'{"a": 1, "a": 2}') == {"a": 2}  # the last of equal keys counts
    document = described(N_VOCAB)
    posts = [document["paths"][path]["post"] for path in SCHEMAS]
    assert all(post["requestBody"]["required"] for post in posts)
    ref = posts[0]["responses"]["default"]["content"]["application/json"]["schema"]["$ref"]
    for schema in (document["components"]["schemas"][ref.rpartition("/")[2]], *SCHEMAS.values()):
        jsonschema.Draft202012Validator.check_schema(schema)
