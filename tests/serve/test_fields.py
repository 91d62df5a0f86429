"""The fields of requests: a table without gaps, which the server and its page keep to."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import workbench.server
from tests.profiles import examples
from tests.serve.fake_worker import FakeWorker
from tests.serve.from_schema import from_schema
from tests.serve.live import Live, live
from workbench.server.api.faults import ApiError
from workbench.server.api.fields import (
    ANSWERS,
    CHAT,
    CHATS,
    FIELDS,
    REFUSED,
    SCHEMAS,
    WITHOUT_EFFECT,
)
from workbench.server.api.openapi import described
from workbench.server.api.schema import check

PAGE = Path(workbench.server.__file__).with_name("README.md")
BODIES = {
    "/v1/completions": {"prompt": [5], "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/completion": {"prompt": [5], "n_predict": 2},
}
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


@pytest.fixture(scope="module")
def http(server: Live) -> Iterator[httpx.Client]:
    with server.http() as client:
        yield client


def refusal(route: str, body: dict[str, Any]) -> ApiError | None:
    try:
        check(body, SCHEMAS[route])
    except ApiError as error:
        return error
    return None


def test_every_field_has_one_row_at_every_path_that_answers():
    counts = Counter((name, route) for name, route, _ in ROWS)
    assert max(counts.values()) == 1
    names = {name for name, route, _ in ROWS if route in ANSWERS}
    gaps = [(name, route) for name in names for route in ANSWERS if (name, route) not in counts]
    assert not gaps and len(names) > 150


@pytest.mark.parametrize("route", ANSWERS)
def test_a_refused_field_is_named_unless_it_asks_for_nothing(route):
    for name, of, field in ROWS:
        if of != route or field.treatment != REFUSED:
            continue
        allowed = jsonschema.Draft202012Validator(field.schema).is_valid
        assert allowed(None), name
        probe = next(value for value in PROBES if not allowed(value))
        error = refusal(route, BODIES[route] | {name: probe})
        assert error is not None and error.status == 400 and error.param == name
        assert error.message.startswith(f"{name} asks for ") and "\n" not in error.message
        for nothing in field.schema.get("enum", [None]):
            assert refusal(route, BODIES[route] | {name: nothing}) is None, (name, nothing)


@pytest.mark.parametrize("probe", [True, "x", [1, {"a": "b"}]])
@pytest.mark.parametrize("route", ANSWERS)
def test_what_changes_no_answer_passes(http, route, probe):
    idle = {name: probe for name, of, field in ROWS
            if of == route and field.treatment == WITHOUT_EFFECT}  # fmt: skip
    assert len(idle) > 30
    body = BODIES[route] | idle | {"no_engine_has_this": {"deep": [1]}}
    answer = http.post(route, json=body)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("route", ANSWERS)
def test_fields_that_change_an_answer_are_refused_by_name(server, route):
    with server.http() as http:
        for name, value in CHANGES.items():
            answer = http.post(route, json=BODIES[route] | {name: value})
            assert answer.status_code == 400, (name, answer.text)
            assert answer.json()["error"]["param"].partition(".")[0] == name


def test_what_llama_cpps_clients_send_by_default_passes(server):
    """As its own page does: everything, at the value that turns it off."""
    body = {
        "dynatemp_range": 0, "dynatemp_exponent": 1, "xtc_probability": 0, "xtc_threshold": 0.1,
        "typ_p": 1, "min_p": 0, "repeat_last_n": 64, "repeat_penalty": 1, "presence_penalty": 0,
        "dry_multiplier": 0, "dry_base": 1.75, "dry_allowed_length": 2, "dry_penalty_last_n": -1,
        "mirostat": 0, "mirostat_tau": 5, "mirostat_eta": 0.1, "n_keep": 0, "id_slot": -1,
        "samplers": ["dry", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
        "n_probs": 0, "min_keep": 0, "logit_bias": [], "grammar": "", "lora": [],
        "t_max_predict_ms": -1, "timings_per_token": True, "reasoning_format": "auto",
        "cache_prompt": True, "max_tokens": -1, "top_n_sigma": -1,
    }  # fmt: skip
    with server.http() as http:
        for route in ANSWERS:
            answer = http.post(route, json=BODIES[route] | body)
            assert answer.status_code == 200, answer.text


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


# what the schemas allow ---------------------------------------------------------------------------


N_VOCAB = 1024


def published(path: str) -> dict[str, Any]:
    post = described(N_VOCAB)["paths"][path]["post"]
    return post["requestBody"]["content"]["application/json"]["schema"]


def asked(http: httpx.Client, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """The status, and the error where there is one."""
    answer = http.post(path, json=body)
    return answer.status_code, {} if answer.status_code == 200 else answer.json()["error"]


def bounded(body: dict[str, Any]) -> dict[str, Any]:
    """The body, of the model that is served, with answers short and few enough for a test."""
    for name in ("max_tokens", "max_completion_tokens", "n_predict"):
        if isinstance(body.get(name), int | float) and body[name] > 5:
            body[name] = 5
    if "model" in body:
        body["model"] = "tiny"
    for name in ("n", "timeout"):
        if body.get(name):
            body[name] = min(body[name], 8)
    return body


@pytest.mark.parametrize("path", SCHEMAS)
@given(data=st.data())
@settings(max_examples=examples(60), suppress_health_check=list(HealthCheck), deadline=None)
def test_what_the_schema_allows_is_not_refused_for_its_range(http, path, data):
    body = bounded(data.draw(from_schema(published(path))))
    if path in CHATS:  # what the template of the tests does not do
        body.pop("reasoning_effort", None)
        body["messages"][-1] = {"role": "assistant", "content": "x"}
    status, error = asked(http, path, body)
    # what no field shows, but the request as a whole
    whole = error.get("code") == "context_length_exceeded" or "no tokens" in error.get(
        "message", ""
    )
    assert status == 200 or whole, (body, error)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/completion", BODIES["/completion"] | {"n_predict": -2}),
        ("/completion", {"prompt": [N_VOCAB]}),
        ("/v1/completions", {"prompt": [[1], [5, N_VOCAB]]}),
        ("/detokenize", {"tokens": [N_VOCAB]}),
        (CHAT, BODIES[CHAT] | {"top_logprobs": 3}),
        (CHAT, BODIES[CHAT] | {"top_logprobs": 3, "logprobs": False}),
    ],
)
def test_what_is_refused_for_its_range_the_schema_does_not_allow(http, texts, path, body):
    assert texts.tokenizer.n_vocab == N_VOCAB
    assert not jsonschema.Draft202012Validator(published(path)).is_valid(body)
    status, error = asked(http, path, body)
    assert status == 400 and error["message"]


# what is honoured ---------------------------------------------------------------------------------


def test_what_a_request_says_reaches_the_engine(server, texts):
    eog = texts.tokenizer.eog_ids
    more = {"stop_token_ids": [7, 9], "cache_prompt": False}
    with server.http() as http:
        for route in ANSWERS:
            for given, ends in (({}, eog | {7, 9}), ({"ignore_eos": True}, {7, 9})):
                http.post(route, json=BODIES[route] | more | given).raise_for_status()
                ask = server.worker.asked[-1]
                assert ask.ends == ends and ask.cache_prompt is False
            http.post(route, json=BODIES[route] | {"cache_prompt": None}).raise_for_status()
            assert server.worker.asked[-1].cache_prompt is True


def test_a_stop_token_of_the_request_ends_its_answer(server, texts):
    made = server.client().completions.create(
        model="tiny", prompt=[100], max_tokens=50, extra_body={"stop_token_ids": [104]}
    )
    assert (made.choices[0].text, made.choices[0].finish_reason) == (
        texts.text([101, 102, 103]), "stop")  # fmt: skip


def test_a_text_without_special_tokens_has_no_bos(server, texts):
    with server.http() as http:
        for route, length in (("/v1/completions", "max_tokens"), ("/completion", "n_predict")):
            for given in (True, False):
                body = {"prompt": "engine", length: 1, "add_special_tokens": given}
                http.post(route, json=body).raise_for_status()
                bos = [texts.tokenizer.bos_id] if given else []
                wanted = bos + texts.tokenizer.encode("engine", add_bos=False)
                assert server.worker.asked[-1].tokens.tolist() == wanted


@pytest.mark.parametrize("route", ANSWERS)
def test_every_name_of_a_length_is_honoured(server, route):
    body = {name: value for name, value in BODIES[route].items() if name in ("prompt", "messages")}
    with server.http() as http:
        for said, n in (
            ({"max_tokens": 3}, 3),
            ({"max_tokens": 3, "max_completion_tokens": 4}, 4),
            ({"max_tokens": 3, "max_completion_tokens": 4, "n_predict": 5}, 5),
        ):
            http.post(route, json=body | said).raise_for_status()
            assert server.worker.asked[-1].max_tokens == n
        http.post(route, json=body | {"max_tokens": -1}).raise_for_status()
        ask = server.worker.asked[-1]
        assert ask.max_tokens == 512 - len(ask.tokens)


def test_n_probs_is_the_same_at_every_path(server, texts):
    with server.http() as http:
        whole, native = (
            http.post(route, json={"prompt": [100], "max_tokens": 4, "n_probs": 2}).json()
            for route in ("/v1/completions", "/completion")
        )
        chat = http.post(CHAT, json=BODIES[CHAT] | {"n_probs": 2}).json()
        none = http.post("/completion", json={"prompt": [100], "max_tokens": 4}).json()
    logprobs, known = whole["choices"][0]["logprobs"], native["completion_probabilities"]
    assert [bytes(k["bytes"]) for k in known] == [texts.shown(t) for t in range(101, 105)]
    assert [k["logprob"] for k in known] == logprobs["token_logprobs"]
    assert [k["id"] for k in known] == native["tokens"] == [101, 102, 103, 104]
    assert all([t["id"] for t in k["top_logprobs"]] == [k["id"], k["id"] + 1] for k in known)
    assert all(len(c["top_logprobs"]) == 2 for c in chat["choices"][0]["logprobs"]["content"])
    assert "completion_probabilities" not in none


@pytest.mark.parametrize("stop", [None, "aits f"])
def test_streamed_probabilities_are_those_of_the_whole_answer(texts, stop):
    tokens = texts.tokenizer.encode("the engine 🙂 waits for the end", add_bos=False)
    body = {"prompt": [1], "n_predict": len(tokens), "n_probs": 2, "stop": stop}
    worker = FakeWorker(texts.tokenizer.n_vocab, script=tokens)
    with live(texts, worker) as server, server.http() as http:
        whole = http.post("/completion", json=body).json()
        with http.stream("POST", "/completion", json=body | {"stream": True}) as answer:
            events = [json.loads(line[6:]) for line in answer.iter_lines() if line]
    parts = [k for e in events for k in e.get("completion_probabilities", [])]
    assert parts == whole["completion_probabilities"] and parts
    assert len(parts) == len(tokens) if stop is None else len(parts) < len(tokens)
