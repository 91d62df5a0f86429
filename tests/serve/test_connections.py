"""HTTP as it is written: clients that close their half, old ones, limits to the byte, origins."""

from __future__ import annotations

import itertools
import json
import socket
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from tests.serve.fake_worker import FakeWorker
from tests.serve.live import Live, live
from tests.serve.test_hostile_clients import raw, wait_for
from workbench.server.wire import protocol
from workbench.server.wire.front import FrontSettings
from workbench.server.wire.protocol import MAX_HEADERS


def posted(body: dict, version: str = "1.1", path: str = "/v1/completions") -> bytes:
    content = json.dumps(body).encode()
    return (
        f"POST {path} HTTP/{version}\r\nhost: a\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\n\r\n"
    ).encode() + content


def connected(server: Live) -> socket.socket:
    at = urlsplit(server.url)
    return socket.create_connection((at.hostname, at.port), timeout=20)


def everything(sock: socket.socket) -> bytes:
    return b"".join(iter(lambda: sock.recv(65536), b""))


def answers(data: bytes) -> Iterator[bytes]:
    """What stands behind interim answers."""
    while data.startswith(protocol.PROBE):
        data = data[len(protocol.PROBE) :]
    yield from data.partition(b"\r\n\r\n")[::2]


# a client that closes its half ------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_client_that_closes_its_half_behind_its_request_is_answered(texts, stream, version):
    worker = FakeWorker(texts.tokenizer.n_vocab, step_s=0.005)
    with live(texts, worker) as server, connected(server) as sock:
        sock.sendall(posted({"prompt": [1], "max_tokens": 40, "stream": stream}, version))
        sock.shutdown(socket.SHUT_WR)
        head, body = answers(everything(sock))
    assert head.startswith(b"HTTP/1.1 200") and not worker.cancelled
    if stream:
        assert body.count(b"data: ") == 42 and b"data: [DONE]\n\n" in body
    else:
        assert json.loads(body)["usage"]["completion_tokens"] == 40


def test_two_requests_and_then_an_end_have_two_answers(texts):
    worker = FakeWorker(texts.tokenizer.n_vocab, step_s=0.005)
    with live(texts, worker) as server, connected(server) as sock:
        sock.sendall(2 * posted({"prompt": [1], "max_tokens": 20}))
        sock.shutdown(socket.SHUT_WR)
        found = everything(sock)
    assert found.count(b'"completion_tokens": 20') == 2 and not worker.cancelled


def test_a_client_that_closes_both_halves_is_told_from_one_that_closes_its_own(texts, monkeypatch):
    monkeypatch.setattr(protocol, "PROBE_S", 0.05)
    worker = FakeWorker(texts.tokenizer.n_vocab, step_s=0.01)
    with live(texts, worker) as server:
        with connected(server) as sock:
            sock.sendall(posted({"prompt": [1], "max_tokens": 400}))
            wait_for(lambda: worker.asked)
        wait_for(lambda: worker.cancelled == [worker.asked[0].number], 2)


def test_an_end_in_the_middle_of_a_request_has_no_answer(texts):
    worker = FakeWorker(texts.tokenizer.n_vocab)
    with live(texts, worker) as server, connected(server) as sock:
        sock.sendall(posted({"prompt": [1], "max_tokens": 4})[:-1])
        sock.shutdown(socket.SHUT_WR)
        assert everything(sock) == b"" and not worker.asked


# HTTP/1.0 and 1.1 -------------------------------------------------------------------------------


def test_a_client_of_http_1_0_gets_no_chunks(server):
    body = {"prompt": [1], "max_tokens": 5, "stream": True}
    new, events = (raw(server, posted(body, v)).partition(b"\r\n\r\n") for v in ("1.1", "1.0"))
    assert b"transfer-encoding: chunked" in new[0] and new[2].endswith(b"\r\n0\r\n\r\n")
    head, _, text = events
    assert b"chunked" not in head and b"content-length" not in head
    assert b"connection: close" in head and text.endswith(b"}\n\ndata: [DONE]\n\n")
    assert text.count(b"data: ") == 7 and all(
        not part or part.startswith(b"data: ") for part in text.split(b"\n\n")
    )
    whole = raw(server, posted(body | {"stream": False}, "1.0")).partition(b"\r\n\r\n")
    assert b"content-length: %d" % len(whole[2]) in whole[0] and json.loads(whole[2])


def test_a_long_answer_to_http_1_0_is_whole(server):
    text = "the engine waits for the end " * 4000
    asked = posted({"content": text, "with_pieces": True}, "1.0", "/tokenize")
    with connected(server) as sock:
        sock.sendall(asked)
        head, body = answers(everything(sock))
    assert head.startswith(b"HTTP/1.1 200") and b"chunked" not in head
    assert "".join(one["piece"] for one in json.loads(body)["tokens"]) == text


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        ("GET /health HTTP/1.1\r\n", 400),
        ("GET /health HTTP/1.1\r\nhost: a\r\nHost: a\r\n", 400),
        ("GET /health HTTP/1.1\r\nhost: a\r\n", 200),
        ("GET /health HTTP/1.1\r\nhost:\r\n", 200),
        ("GET /health HTTP/1.0\r\n", 200),
    ],
)
def test_http_1_1_needs_one_host(server, lines, status):
    answer = raw(server, f"{lines}connection: close\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 %d" % status) and answer.count(b"HTTP/1.1") == 1
    if status == 400:
        assert "Host" in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]


# limits -----------------------------------------------------------------------------------------


def padded(n: int, space: str = " ", body: bytes = b"") -> bytes:
    """A request with n bytes before its body."""
    head = f"POST /tokenize HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\nx:{space}"
    return head.encode() + b"a" * (n - len(head) - 4) + b"\r\n\r\n" + body


@pytest.mark.parametrize("cut", [1 << 20, 5000, MAX_HEADERS], ids="cut{}".format)
@pytest.mark.parametrize("space", ["", " ", " " * 1000], ids=lambda s: f"{len(s)}spaces")
def test_the_limit_of_headers_is_exact(server, cut, space):
    """However they are cut, and behind another request in the same bytes. There the end of the
    connection says that the second one has no answer."""
    body = json.dumps({"content": "a b c"}).encode()
    for n, before in itertools.product(
        (MAX_HEADERS, MAX_HEADERS + 1), (b"", padded(500, " ", body))
    ):
        sent, fits = before + padded(n, space, body), n == MAX_HEADERS
        n_answers = bool(before) + fits
        with connected(server) as sock:
            for at in range(0, len(sent), cut):
                sock.sendall(sent[at : at + cut])
            found = b""
            while not (fits and found.count(b'{"tokens"') == n_answers):
                if not (part := sock.recv(65536)):
                    break
                found += part
        assert found.count(b"HTTP/1.1 200") == n_answers, n
        assert fits or before or found.startswith(b"HTTP/1.1 431")


def test_a_body_that_says_it_is_too_long_is_413_unread(texts):
    """Nothing of it has come; the client waits for the answer before it sends any."""
    with live(texts, settings=FrontSettings("tiny", max_body=1000)) as server:
        head = b"POST /tokenize HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n"
        began = time.monotonic()
        with connected(server) as sock:
            sock.sendall(head % (1 << 40))
            answer = sock.recv(4096)
            took = time.monotonic() - began
            assert answer.startswith(b"HTTP/1.1 413") and b"connection: close" in answer
            assert took < 1, "it waits for a body"
            sock.sendall(b"a" * 200_000)  # some of it was on its way: the answer is not lost
            assert sock.recv(4096) == b""
        told = raw(server, b"GET /metrics HTTP/1.0\r\n\r\n")
        assert b'requests_total{outcome="invalid"} 1.0' in told


def test_a_body_in_chunks_of_a_byte_holds_nobody_up(texts):
    """16,000 of them are a call each: between some thousand bytes others have their turn."""
    worker = FakeWorker(texts.tokenizer.n_vocab)
    body = json.dumps({"content": "a" * 16_000}).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    head = b"POST /tokenize HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
    second = b"GET /health HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
    fed: list[int] = []
    real = protocol.HttpToolsProtocol.data_received

    def noted(self, data: bytes) -> None:
        fed.append(len(data))
        real(self, data)

    with pytest.MonkeyPatch.context() as patch, live(texts, worker) as server:
        patch.setattr(protocol.HttpToolsProtocol, "data_received", noted)
        with connected(server) as sock:
            sock.sendall(head + chunks + second)
            answer = everything(sock)
    assert answer.count(b"HTTP/1.1 200") == 2 and b'{"status":"ok"}' in answer
    assert max(fed) <= protocol.CHUNKED_BYTES and sum(fed) == len(head + chunks + second)


# origins ----------------------------------------------------------------------------------------

PAGE = "https://chat.example"


@pytest.mark.parametrize("keys", [(), (b"k",)], ids=["open", "keyed"])
def test_a_page_of_an_origin_that_is_let_in_may_ask(texts, keys):
    settings = FrontSettings("tiny", keys=keys, origins=(PAGE, "http://localhost:3000"))
    with live(texts, settings=settings) as server, server.http() as http:
        asks = {
            "origin": PAGE, "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type,x-stainless-os",
        }  # fmt: skip
        may = http.options("/v1/completions", headers=asks)
        assert may.status_code == 200 and may.headers["access-control-allow-origin"] == PAGE
        assert "x-stainless-os" in may.headers["access-control-allow-headers"]
        key = {"authorization": "Bearer k"}
        for stream in (False, True):
            body = {"prompt": [1], "max_tokens": 3, "stream": stream}
            done = http.post("/v1/completions", json=body, headers={"origin": PAGE} | key)
            assert done.status_code == 200 and "origin" in done.headers["vary"].lower()
            assert done.headers["access-control-allow-origin"] == PAGE
        wrong = http.post("/v1/completions", json={}, headers={"origin": PAGE})
        assert wrong.status_code == (401 if keys else 400)
        assert wrong.headers["access-control-allow-origin"] == PAGE
        for other in ("https://evil.example", "http://chat.example", f"{PAGE}:8443"):
            refused = http.options("/v1/completions", headers=asks | {"origin": other})
            assert refused.status_code == 400
            assert "access-control-allow-origin" not in refused.headers


def test_all_origins_may_be_let_in(texts):
    settings = FrontSettings("tiny", origins=("*",))
    with live(texts, settings=settings) as server, server.http() as http:
        answer = http.get("/v1/models", headers={"origin": PAGE})
        assert answer.headers["access-control-allow-origin"] == "*"
