"""The interface, fuzzed from its schemas: whatever comes, never a 5xx, and the server goes on."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.profiles import examples
from tests.serve.fake_worker import FakeWorker
from tests.serve.live import in_process
from tests.serve.test_schema import VALUES, bodies
from workbench.serve.api import SCHEMAS

QUIET = settings(
    max_examples=examples(120), suppress_health_check=[HealthCheck.too_slow], deadline=None
)


async def sent(texts, path: str, raw: bytes) -> None:
    worker = FakeWorker(texts.tokenizer.n_vocab, n_slots=64, n_waiting=2000)
    async with in_process(texts, worker) as (client, front):
        headers = {"content-type": "application/json"}
        answer = await client.post(path, content=raw, headers=headers)
        assert answer.status_code < 500, (raw, answer.text)
        if answer.status_code != 200:
            error = answer.json()["error"]
            assert error["message"] and set(error) == {"message", "type", "param", "code"}
        elif not answer.headers["content-type"].startswith("text/event-stream"):
            answer.json()
        else:
            lines = [line for line in answer.text.split("\n\n") if line]
            assert all(line.startswith("data: ") for line in lines)
            for line in lines:
                assert line == "data: [DONE]" or json.loads(line[6:])
        assert (await client.get("/health")).status_code == 200
        assert front.n_pending == 0


def quick(body: dict) -> dict:
    """The body, with answers short enough for a test."""
    for name in ("max_tokens", "max_completion_tokens", "n_predict"):
        if isinstance(body.get(name), int) and body[name] > 5:
            body[name] = 5
    if body.get("n") in range(6, 200):
        body["n"] = 5
    return body


@pytest.mark.parametrize("path", SCHEMAS)
@given(data=st.data())
@QUIET
def test_bodies_of_the_schema_and_spoiled_ones(texts, path, data):
    body = quick(data.draw(bodies(path)))
    asyncio.run(sent(texts, path, json.dumps(body).encode()))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@given(data=st.data())
@QUIET
def test_bytes_that_are_nearly_json(texts, path, data):
    raw = bytearray(json.dumps(quick(data.draw(bodies(path)))).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at] = data.draw(st.integers(0, 255))
    asyncio.run(sent(texts, path, bytes(raw)))


@pytest.mark.parametrize("path", SCHEMAS)
@given(value=VALUES)
@QUIET
def test_values_of_any_kind(texts, path, value):
    asyncio.run(sent(texts, path, json.dumps(value).encode()))
