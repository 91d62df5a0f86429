"""The fields of requests: a table without gaps, the schemas that are made of it, and the checks of
requests, which keep to both."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench.server
from tests.profiles import examples
from tests.server.fake_worker import FakeWorker
from tests.server.from_schema import bodies, bounded, from_schema
from tests.server.live import USER, Live, events_of, live
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
ROWS = [
    (name, route, field)
    for field in FIELDS
    for route in field.routes
    for name in field.names.split()
]
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
        assert error.status == 400 and error.param in error.message
        return error
    return None


def status_and_error(server: Live, path: str, body: Any) -> tuple[int, dict[str, Any]]:
    with server.http() as http:
        answer = http.post(path, json=body)
    return answer.status_code, {} if answer.status_code == 200 else answer.json()["error"]


def published(path: str) -> dict[str, Any]:
    post = described(N_VOCAB)["paths"][path]["post"]
    return post["requestBody"]["content"]["application/json"]["schema"]


def test_every_field_has_one_row_at_every_path_that_answers():
    counts = Counter((name, route) for name, route, _ in ROWS)
    assert max(counts.values()) == 1
    names = {name for name, route, _ in ROWS if route in ANSWERS}
    gaps = [(name, route) for name in names for route in ANSWERS if (name, route) not in counts]
    assert not gaps and len(names) > 150


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


# the schemas --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SCHEMAS)
@given(data=st.data())
@settings(max_examples=examples(150))
def test_a_body_is_refused_where_json_schema_refuses_it(path, data):
    body = data.draw(bodies(path))
    allowed = jsonschema.Draft202012Validator(SCHEMAS[path]).is_valid(body)
    assert (refusal(body, SCHEMAS[path]) is None) == allowed, body


@pytest.mark.parametrize("path", SCHEMAS)
@given(data=st.data())
@settings(max_examples=examples(60))
def test_what_the_schema_allows_is_answered(server, path, data):
    body = bounded(data.draw(from_schema(published(path))))
    if path in CHATS:  # what the template of the tests does not do
        body.pop("reasoning_effort", None)
        body["messages"][-1] = {"role": "assistant", "content": "x"}
    status, error = status_and_error(server, path, body)
    # what no field shows, but the request as a whole
    whole = error.get("code") == "context_length_exceeded"
    assert status == 200 or whole or "no tokens" in error.get("message", ""), (body, error)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (NATIVE, BODIES[NATIVE] | {"n_predict": -2}),
        (NATIVE, {"prompt": [N_VOCAB]}),
        (COMPLETIONS, {"prompt": [[1], [5, N_VOCAB]]}),
        ("/detokenize", {"tokens": [N_VOCAB]}),
        (CHAT, CHATTED | {"top_logprobs": 3}),
        (CHAT, CHATTED | {"top_logprobs": 3, "logprobs": False}),
    ],
)
def test_what_is_out_of_range_the_schema_does_not_allow(server, texts, path, body):
    assert texts.tokenizer.n_vocab == N_VOCAB
    assert not jsonschema.Draft202012Validator(published(path)).is_valid(body)
    status, error = status_and_error(server, path, body)
    assert status == 400 and error["message"]


OPEN = {"add_generation_prompt": True, "continue_final_message": True}


@pytest.mark.parametrize(
    ("path", "body", "words", "param"),
    [
        (COMPLETIONS, {}, "prompt is missing", "prompt"),
        (COMPLETIONS, {"prompt": "a", "n": "2"}, "n must be a whole number or null", "n"),
        (COMPLETIONS, {"prompt": "a", "n": True}, "not true", "n"),
        (COMPLETIONS, {"prompt": "a", "n": 0}, "n must be at least 1, and is 0", "n"),
        (COMPLETIONS, {"prompt": {}}, "a list of token ids, or", "prompt"),
        (COMPLETIONS, {"prompt": "a", "echo": 2}, "echo must be true or false", "echo"),
        (NATIVE, {"prompt": "a", "min_p": 2}, "min_p must be at most 1", "min_p"),
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


def test_schemas_and_the_description_are_right_themselves():
    assert parse(b'{"a": 1, "a": 2}') == {"a": 2}  # the last of equal keys counts
    for schema in SCHEMAS.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    document = described(N_VOCAB)
    assert document["openapi"].startswith("3.1") and set(SCHEMAS) <= set(document["paths"])
    posts = [document["paths"][path]["post"] for path in SCHEMAS]
    assert all(post["requestBody"]["required"] for post in posts)
    ref = posts[0]["responses"]["default"]["content"]["application/json"]["schema"]["$ref"]
    schema = document["components"]["schemas"][ref.rpartition("/")[2]]
    jsonschema.Draft202012Validator.check_schema(schema)


# what is honoured ---------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ANSWERS)
def test_what_a_request_says_of_its_end_is_honoured(server, texts, route):
    def asked(**more: Any):
        server.post(route, **BODIES[route] | more)
        return server.worker.asked[-1]

    eog, more = texts.tokenizer.eog_ids, {"stop_token_ids": [7, 9], "cache_prompt": False}
    for more_ends, ends in (({}, eog | {7, 9}), ({"ignore_eos": True}, {7, 9})):
        ask = asked(**more, **more_ends)
        assert ask.ends == ends and ask.cache_prompt is False
    assert asked(cache_prompt=None).cache_prompt is True
    # every name of a length
    assert asked(max_tokens=3).max_tokens == 3
    assert asked(max_tokens=3, max_completion_tokens=4).max_tokens == 4
    assert asked(max_tokens=3, max_completion_tokens=4, n_predict=5).max_tokens == 5
    ask = asked(max_tokens=-1)
    assert ask.max_tokens == 512 - len(ask.tokens)


def test_a_stop_token_of_the_request_ends_its_answer(server, texts):
    more = {"stop_token_ids": [104]}
    (choice,) = server.complete(prompt=[100], max_tokens=50, extra_body=more).choices
    assert (choice.text, choice.finish_reason) == (texts.text([101, 102, 103]), "stop")


@pytest.mark.parametrize("route", [COMPLETIONS, NATIVE])
def test_a_text_without_special_tokens_has_no_bos(server, texts, route):
    for wanted in (True, False):
        server.post(route, prompt="engine", max_tokens=1, add_special_tokens=wanted)
        bos = [texts.tokenizer.bos_id] if wanted else []
        ids = bos + texts.tokenizer.encode("engine", add_bos=False)
        assert server.worker.asked[-1].tokens.tolist() == ids


def test_n_probs_is_the_same_at_every_path(server, texts):
    body = {"prompt": [100], "max_tokens": 4}
    logprobs = server.post(COMPLETIONS, **body, n_probs=2)["choices"][0]["logprobs"]
    native = server.post(NATIVE, **body, n_probs=2)
    known = native["completion_probabilities"]
    assert [bytes(k["bytes"]) for k in known] == [texts.shown(t) for t in range(101, 105)]
    assert [k["logprob"] for k in known] == logprobs["token_logprobs"]
    assert [k["id"] for k in known] == native["tokens"] == [101, 102, 103, 104]
    assert all([t["id"] for t in k["top_logprobs"]] == [k["id"], k["id"] + 1] for k in known)
    chat = server.post(CHAT, **BODIES[CHAT] | {"n_probs": 2})
    assert all(len(c["top_logprobs"]) == 2 for c in chat["choices"][0]["logprobs"]["content"])
    assert "completion_probabilities" not in server.post(NATIVE, **body)


@pytest.mark.parametrize("stop", [None, "aits f"])
def test_streamed_probabilities_are_those_of_the_whole(texts, stop):
    tokens = texts.tokenizer.encode("the engine 🙂 waits for the end", add_bos=False)
    body = {"prompt": [1], "n_predict": len(tokens), "n_probs": 2, "stop": stop}
    worker = FakeWorker(texts.tokenizer.n_vocab, script=tokens)
    with live(texts, worker) as server, server.http() as http:
        whole = server.post(NATIVE, **body)
        events = events_of(http.post(NATIVE, json=body | {"stream": True}))
    parts = [k for e in events for k in e.get("completion_probabilities", [])]
    assert parts == whole["completion_probabilities"] and parts
    assert len(parts) == len(tokens) if stop is None else len(parts) < len(tokens)
