"""HTTP as it is written: wrong requests, clients that close their half, old ones, limits to the
byte, and origins."""

from __future__ import annotations

import itertools
import json
import socket
import time
from urllib.parse import urlsplit

import httpx
import pytest

from tests.profiles import share
from tests.server.live import Live, connected, everything, live, posted, wait_for
from workbench.server import reply
from workbench.server.wire import protocol
from workbench.server.wire.front import FrontSettings
from workbench.server.wire.protocol import MAX_HEADERS

JSON = {"content-type": "application/json"}
TOKENIZE = b"POST /tokenize HTTP/1.1\r\nhost: a\r\n"


def raw(server: Live, *parts: bytes, shuts: bool = False) -> bytes:
    """What comes back until the server closes."""
    with connected(server.url) as sock:
        for part in parts:
            sock.sendall(part)
            if part is not parts[-1]:
                time.sleep(0.02)  # another segment
        if shuts:
            sock.shutdown(socket.SHUT_WR)
        return everything(sock)


def answer_in(data: bytes) -> tuple[bytes, bytes]:
    """Head and body of what stands after interim answers. None comes inside of it."""
    while data.startswith(protocol.PROBE):
        data = data.removeprefix(protocol.PROBE)
    assert protocol.PROBE not in data
    head, _, body = data.partition(b"\r\n\r\n")
    return head, body


@pytest.mark.parametrize(
    ("method", "path", "content", "headers", "status"),
    [
        ("GET", "/v1/models/", None, {}, 404),
        ("GET", "/v1/completions", None, {}, 405),
        ("DELETE", "/health", None, {}, 405),
        ("POST", "/v1/completions", b"a=1", {"content-type": "text/plain"}, 415),
        ("POST", "/v1/completions", b"{}", JSON | {"content-encoding": "gzip"}, 415),
        ("POST", "/v1/completions", b"[]", JSON, 400),
        ("POST", "/v1/completions", b'{"prompt": "a", "temperature": 1e999}', JSON, 400),
        ("POST", "/v1/completions", b'{"prompt": "a", "model": "\\ud800"}', JSON, 404),
        ("POST", "/v1/chat/completions", b'{"messages": []}', JSON, 400),
    ],
)
def test_a_wrong_request_has_its_status(server, method, path, content, headers, status):
    with server.http() as http:
        answer = http.request(method, path, content=content, headers=headers)
        assert answer.status_code == status and answer.json()["error"]["message"]
        if status == 405:
            assert {"GET": "POST", "DELETE": "GET"}[method] in answer.headers["allow"].split(", ")
        assert http.get("/health").json() == {"status": "ok"}


GET = "GET /health HTTP/1.%d\r\n"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        ([b"\x16\x03\x01\x00nonsense\r\n\r\n"], 400),
        ([TOKENIZE + b'transfer-encoding: chunked\r\n\r\n5\r\n{"con\r\n', b"no length\r\n"], 400),
        ([b"GET /health HTTP/1.1\r\n", b"".join(b"x-%d: %1000d\r\n" % (i, i) for i in range(100))],
         431),
        ([f"{GET % 1}connection: close\r\n\r\n".encode()], 400),  # HTTP/1.1 needs one host
        ([f"{GET % 1}host: a\r\nHost: a\r\nconnection: close\r\n\r\n".encode()], 400),
        ([f"{GET % 1}host:\r\nconnection: close\r\n\r\n".encode()], 200),
        ([f"{GET % 0}connection: close\r\n\r\n".encode()], 200),
    ],
)  # fmt: skip
def test_bytes_that_are_no_http_are_400_in_json(server, sent, status):
    head, _, body = raw(server, *sent).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d" % status) and b"HTTP/1.1" not in body
    assert status == 200 or json.loads(body)["error"]["message"]


def test_nonsense_does_not_overtake_an_answer(texts):
    """The client takes what comes first for the answer to what it sent first."""
    asked = posted({"prompt": [1], "max_tokens": 20})
    with live(texts, step_s=0.01) as server:
        for sent in ((asked + b"nonsense\r\n\r\n",), (asked, b"nonsense\r\n\r\n")):
            head, _, answer = raw(server, *sent).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200") and b"connection: close" in head.lower()
            assert json.loads(answer)["usage"]["completion_tokens"] == 20
        # of two requests before it the first is answered; the close tells that the second was not
        answer = raw(server, asked + asked, b"nonsense\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200") and answer.count(b"HTTP/1.1") == 1
        wait_for(lambda: "requests_pending 0.0" in httpx.get(f"{server.url}/metrics").text)


def test_slow_headers_and_slow_bodies_are_408(texts, monkeypatch):
    monkeypatch.setattr(protocol, "HEADERS_S", 0.1)
    with live(texts, settings=FrontSettings("tiny", body_s=0.1)) as server:
        for sent in (b"GET /health HT", b"", posted(b'{"prompt"')[:-1]):
            assert raw(server, sent).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("version", share(["1.1", "1.0"], every=2))
def test_a_client_that_closes_its_half_is_answered(texts, monkeypatch, stream, version):
    monkeypatch.setattr(protocol, "PROBE_S", 0.02)
    with live(texts, step_s=0.005) as server:
        asked = posted({"prompt": [1], "max_tokens": 20, "stream": stream}, version=version)
        head, body = answer_in(raw(server, asked, shuts=True))
        assert head.startswith(b"HTTP/1.1 200")
        # a client of HTTP/1.0 gets no chunks
        assert (b"chunked" in head) == (stream and version == "1.1")
        assert (b"content-length" in head) == (not stream)
        if stream:
            assert body.count(b"data: ") == 22 and b"data: [DONE]\n\n" in body
        else:
            assert json.loads(body)["usage"]["completion_tokens"] == 20
            if version == "1.1":  # two requests, and then an end
                found = raw(server, asked + asked, shuts=True)
                assert found.count(b'"completion_tokens": 20') == 2
        assert not server.worker.cancelled
        n = len(server.worker.asked)
        assert raw(server, asked[:-1], shuts=True) == b"" and len(server.worker.asked) == n


def padded(n: int, space: str = " ", body: bytes = b"") -> bytes:
    """A request with n bytes before its body."""
    head = f"POST /tokenize HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\nx:{space}"
    return head.encode() + b"a" * (n - len(head) - 4) + b"\r\n\r\n" + body


@pytest.mark.parametrize("cut", [1 << 20, 5000, MAX_HEADERS])
@pytest.mark.parametrize("space", ["", " " * 1000], ids=len)
def test_the_limit_of_headers_is_exact(server, cut, space):
    """However they are cut, and behind another request in the same bytes. There the end of the
    connection says that the second one has no answer."""
    body = json.dumps({"content": "a b c"}).encode()
    for n, before in itertools.product(
        (MAX_HEADERS, MAX_HEADERS + 1), (b"", padded(500, " ", body))
    ):
        sent, fits = before + padded(n, space, body), n == MAX_HEADERS
        n_answers = bool(before) + fits
        with connected(server.url) as sock:
            for at in range(0, len(sent), cut):
                sock.sendall(sent[at : at + cut])
            found, part = b"", b"first"
            while part and not (fits and found.count(b'{"tokens"') == n_answers):
                found += (part := sock.recv(65536))
        assert found.count(b"HTTP/1.1 200") == n_answers, n
        assert fits or before or found.startswith(b"HTTP/1.1 431")


def test_a_body_that_is_too_long_is_413(texts):
    """Unread where its length is said: the client waits for the answer before it sends any."""
    with live(texts, settings=FrontSettings("tiny", max_body=1000)) as server:
        with connected(server.url) as sock:
            sock.sendall(TOKENIZE + b"content-length: %d\r\n\r\n" % (1 << 40))
            answer = sock.recv(4096)
            assert answer.startswith(b"HTTP/1.1 413") and b"connection: close" in answer
            sock.sendall(b"a" * 200_000)  # some of it was on its way: the answer is not lost
            assert sock.recv(4096) == b""
        with server.http() as http:
            unsaid = http.post("/tokenize", content=iter([b'"' + b"a" * 1001]), headers=JSON)
            assert unsaid.status_code == 413 and "1000 bytes" in unsaid.json()["error"]["message"]


def test_a_body_in_chunks_of_a_byte_holds_nobody_up(server, monkeypatch):
    """16,000 of them are a call each: between some thousand bytes others have their turn."""
    body = json.dumps({"content": "a" * 16_000}).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    sent = TOKENIZE + b"transfer-encoding: chunked\r\n\r\n" + chunks
    sent += b"GET /health HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
    fed, kind = list[int](), protocol.HttpToolsProtocol
    real = kind.data_received
    monkeypatch.setattr(kind, "data_received", lambda *a: fed.append(len(a[1])) or real(*a))
    answer = raw(server, sent)
    assert answer.count(b"HTTP/1.1 200") == 2 and b'{"status":"ok"}' in answer
    assert max(fed) <= protocol.CHUNKED_BYTES and sum(fed) == len(sent)


def test_more_connections_than_there_may_be_are_503(texts, monkeypatch):
    monkeypatch.setattr(protocol, "MAX_CONNECTIONS", 3)
    with live(texts) as server:
        held = [connected(server.url) for _ in range(6)]
        late = held[-1].recv(4096)
        assert late.startswith(b"HTTP/1.1 503") and b"too many connections" in late
        for sock in held:
            sock.close()
        wait_for(lambda: httpx.get(f"{server.url}/health").status_code == 200)


@pytest.mark.long
def test_a_client_that_does_not_read_is_told(texts, monkeypatch):
    """It costs no more tokens. What was made till then comes, in order, and behind it the
    reason."""
    monkeypatch.setattr(reply, "MOST_BUFFERED", 100_000)
    n = 20
    with live(texts, n_ctx=100_000, n_slots=n) as server, socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        at = urlsplit(server.url)
        sock.connect((at.hostname, at.port))
        ask = {"prompt": [1], "max_tokens": 90_000, "stream": True, "n": n}
        sock.sendall(posted(ask, version="1.0"))
        wait_for(lambda: len(server.worker.cancelled) == n, 20)
        _, text = answer_in(everything(sock))
    *events, last = [json.loads(line[6:]) for line in text.split(b"\n\n") if line]
    assert last["error"]["code"] == "slow_client"
    said = [event["choices"][0] for event in events]
    assert len(said) > 300 and not any(choice["finish_reason"] for choice in said)
    tokens = texts.text([i % texts.tokenizer.n_vocab for i in range(2, 2 + len(said))])
    for index in range(n):
        own = "".join(choice["text"] for choice in said if choice["index"] == index)
        assert own and tokens.startswith(own)


PAGE = "https://chat.example"
ASKS = {
    "origin": PAGE, "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
}  # fmt: skip


@pytest.mark.parametrize("keys", [(), (b"k",)], ids=["open", "keyed"])
@pytest.mark.parametrize("origins", [(), (PAGE, "http://localhost:3000"), ("*",)])
def test_a_page_of_an_origin_that_is_let_in_may_ask(texts, keys, origins):
    settings, body = FrontSettings("tiny", keys=keys, origins=origins), {"prompt": [1], "n": 1}
    told = {"*": "*"}.get(*origins[:1], PAGE) if origins else None
    with live(texts, settings=settings) as server, server.http(headers={"origin": PAGE}) as http:
        for stream, key in ((False, "k"), (True, "k"), (False, "wrong")):
            more = {"authorization": f"Bearer {key}"}
            done = http.post("/v1/completions", json=body | {"stream": stream}, headers=more)
            assert done.status_code == (401 if keys and key != "k" else 200)
            assert done.headers.get("access-control-allow-origin") == told
        if told == PAGE:
            assert "origin" in done.headers["vary"].lower()
            may = http.options("/v1/completions", headers=ASKS)
            assert may.status_code == 200 and may.headers["access-control-allow-origin"] == PAGE
            assert "x-stainless-os" in may.headers["access-control-allow-headers"]
            for other in ("https://evil.example", "http://chat.example", f"{PAGE}:8443"):
                refused = http.options("/v1/completions", headers=ASKS | {"origin": other})
                assert refused.status_code == 400
                assert "access-control-allow-origin" not in refused.headers
