"""The interface, fuzzed from its schemas and in its bytes: whatever comes, never a 5xx, and the
server goes on."""

from __future__ import annotations

import json
import re

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.profiles import examples
from tests.server.from_schema import VALUES, bodies, bounded
from tests.server.live import Live, connected, events_of, posted
from workbench.server.api.fields import SCHEMAS

QUIET = settings(max_examples=examples(60))


@pytest.fixture(scope="module")
def http(server):
    with server.http() as client:
        yield client


def sent(http: httpx.Client, path: str, raw: bytes) -> None:
    answer = http.post(path, content=raw, headers={"content-type": "application/json"})
    assert answer.status_code < 500, (raw, answer.text)
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert error["message"] and set(error) == {"message", "type", "param", "code"}
    elif not answer.headers["content-type"].startswith("text/event-stream"):
        answer.json()
    else:
        events_of(answer)
    assert "workbench:requests_pending 0.0" in http.get("/metrics").text


@pytest.mark.parametrize("path", SCHEMAS)
@given(data=st.data())
@QUIET
def test_bodies_of_the_schema_and_spoiled_ones(http, path, data):
    sent(http, path, json.dumps(bounded(data.draw(bodies(path)))).encode())
    sent(http, path, json.dumps(data.draw(VALUES)).encode())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@given(data=st.data())
@QUIET
def test_bytes_that_are_nearly_json(http, path, data):
    raw = bytearray(json.dumps(bounded(data.draw(bodies(path)))).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    sent(http, path, bytes(raw))


CHUNKED = b'12\r\n{"content": "waits\r\n2\r\n"}\r\n0\r\n\r\n'
REQUESTS = [
    b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n",
    posted({"prompt": [1, 2], "max_tokens": 3}),
    b"POST /tokenize HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n" + CHUNKED,
]


def answers_to(server: Live, data: bytes, cuts: list[int], quiet_s: float = 0.1) -> bytes:
    """What comes back for bytes that are sent in pieces, until no more comes for a moment."""
    with connected(server.url) as sock:
        parts = []
        try:
            for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
                sock.sendall(data[begin:end])
            sock.settimeout(quiet_s)
            while part := sock.recv(1 << 16):
                parts.append(part)
        except OSError:  # no more came, or it was closed with bytes unread
            return b"".join(parts)
    return b"".join(parts)


@given(data=st.data())
@QUIET
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
    with server.http() as client:
        assert client.get("/health").json() == {"status": "ok"}


@pytest.mark.parametrize("raw", REQUESTS)
def test_the_requests_that_are_spoiled_are_good_ones(server, raw):
    assert answers_to(server, raw, [], 0.5).startswith(b"HTTP/1.1 200 ")
