"""The interface, fuzzed from its schemas and in its bytes: whatever comes, never a 5xx, and the
server goes on."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from urllib.parse import urlsplit

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.profiles import examples
from tests.serve.fake_worker import FakeWorker
from tests.serve.live import Live, in_process
from tests.serve.test_hostile_clients import wait_for
from tests.serve.test_schema import VALUES, bodies
from workbench.server.api.fields import SCHEMAS

QUIET = settings(
    max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow], deadline=None
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


def answers_to(server: Live, data: bytes, cuts: list[int]) -> bytes:
    """What comes back for bytes that are sent in pieces, until no more comes for a moment."""
    at = urlsplit(server.url)
    with socket.create_connection((at.hostname, at.port), timeout=20) as sock:
        parts = []
        try:
            for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
                sock.sendall(data[begin:end])
            sock.settimeout(0.1)
            while part := sock.recv(1 << 16):
                parts.append(part)
        except OSError:  # no more came, or it was closed with bytes unread
            pass
    return b"".join(parts)


def request(path: bytes, *headers: bytes, body: bytes = b"") -> bytes:
    """A request with a JSON body."""
    lines = [b"POST %b HTTP/1.1" % path, b"host: a", b"content-type: application/json", *headers]
    return b"\r\n".join([*lines, b"", body])


ASKED = b'{"prompt": [1, 2], "max_tokens": 3}'
REQUESTS = [
    b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n",
    request(b"/v1/completions", b"content-length: %d" % len(ASKED), body=ASKED),
    request(
        b"/tokenize", b"transfer-encoding: chunked",
        body=b'12\r\n{"content": "waits\r\n2\r\n"}\r\n0\r\n\r\n',
    ),
]  # fmt: skip


@given(data=st.data())
@settings(max_examples=examples(60), suppress_health_check=list(HealthCheck), deadline=None)
def test_bytes_that_are_nearly_http(server, data):
    raw = bytearray(
        b"".join(data.draw(st.lists(st.sampled_from(REQUESTS), min_size=1, max_size=3)))
    )
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=4)))
    said = answers_to(server, bytes(raw), cuts)
    statuses = [int(found) for found in re.findall(rb"HTTP/1\.1 (\d{3}) ", said)]
    assert all(200 <= status < 500 for status in statuses), (raw, said)
    with server.http() as http:
        assert http.get("/health").json() == {"status": "ok"}


def test_the_requests_that_are_spoiled_are_good_ones(server):
    for raw in REQUESTS:
        wait_for(lambda raw=raw: answers_to(server, raw, []).startswith(b"HTTP/1.1 200 "))
