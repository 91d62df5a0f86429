"""Clients that go away, are slow, send too much or nonsense; an engine process that dies."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from tests.serve.fake_worker import FakeWorker
from tests.serve.live import TEMPLATE, Live, live
from workbench.server import reply, streams
from workbench.server.api import aside
from workbench.server.api.faults import ApiError
from workbench.server.api.fields import COMPLETIONS, NATIVE
from workbench.server.api.reading import Defaults, Reader, ReaderSpec
from workbench.server.wire import protocol
from workbench.server.wire.front import FrontSettings

JSON = {"content-type": "application/json"}
ASK = {"prompt": [1], "max_tokens": 400}


def raw(server: Live, data: bytes, *more: bytes) -> bytes:
    """What comes back until the server closes, or says no more for a second."""
    at = urlsplit(server.url)
    with socket.create_connection((at.hostname, at.port), timeout=5) as sock:
        sock.sendall(data)
        for part in more:
            time.sleep(0.05)
            sock.sendall(part)
        sock.settimeout(1)
        parts = []
        try:
            while part := sock.recv(65536):
                parts.append(part)
        except TimeoutError:
            pass
    return b"".join(parts)


def wait_for(condition, seconds: float = 5.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not come"
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("method", "path", "content", "headers", "status"),
    [
        ("GET", "/nowhere", None, {}, 404),
        ("GET", "/v1/models/", None, {}, 404),
        ("GET", "/v1/models/other", None, {}, 404),
        ("GET", "/v1/completions", None, {}, 405),
        ("DELETE", "/health", None, {}, 405),
        ("POST", "/v1/completions", b"a=1", {"content-type": "text/plain"}, 415),
        ("POST", "/v1/completions", b"{}", JSON | {"content-encoding": "gzip"}, 415),
        ("POST", "/v1/completions", b"{", JSON, 400),
        ("POST", "/v1/completions", b"[]", JSON, 400),
        ("POST", "/v1/completions", b'{"prompt": "\xff"}', JSON, 400),
        ("POST", "/v1/completions", b'{"prompt": "a", "temperature": NaN}', JSON, 400),
        ("POST", "/v1/completions", b'{"prompt": "a", "temperature": 1e999}', JSON, 400),
        ("POST", "/v1/completions", b'{"prompt": ' + b"[" * 50_000, JSON, 400),
        ("POST", "/v1/chat/completions", b'{"messages": []}', JSON, 400),
    ],
)
def test_what_is_wrong_has_its_status_and_json(server, method, path, content, headers, status):
    with server.http() as http:
        answer = http.request(method, path, content=content, headers=headers)
        assert answer.status_code == status
        assert answer.json()["error"]["message"]
        assert http.get("/health").json() == {"status": "ok"}


def test_a_method_that_a_path_does_not_take_is_told_which_it_takes(server):
    with server.http() as http:
        assert http.get("/v1/completions").headers["allow"] == "POST"
        assert "GET" in http.delete("/health").headers["allow"].split(", ")


def test_lone_surrogates_are_text(server):
    with server.http() as http:
        answer = http.post(
            "/v1/completions", content=b'{"prompt": "\\ud800 a", "max_tokens": 1}', headers=JSON
        )
        assert answer.status_code == 200
        wrong = http.post(
            "/v1/completions", content=b'{"prompt": "a", "model": "\\ud800"}', headers=JSON
        )
        assert wrong.status_code == 404 and wrong.json()["error"]["code"] == "model_not_found"


def test_bytes_that_are_no_http_are_400_in_json(server):
    head, _, body = raw(server, b"\x16\x03\x01\x00nonsense\r\n\r\n").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400") and json.loads(body)["error"]["message"]


def test_nonsense_behind_a_request_does_not_overtake_its_answer(texts):
    """The client takes what comes first for the answer to what it sent first."""
    worker = FakeWorker(texts.tokenizer.n_vocab, step_s=0.01)
    body = json.dumps({"prompt": [1], "max_tokens": 20}).encode()
    asked = (
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(body), body)
    )
    with live(texts, worker) as server:
        for sent in ((asked + b"nonsense\r\n\r\n",), (asked, b"nonsense\r\n\r\n")):
            head, _, answer = raw(server, *sent).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200") and b"connection: close" in head.lower()
            assert json.loads(answer)["usage"]["completion_tokens"] == 20
        # of two requests before it the first is answered; the close tells that the second was not
        answer = raw(server, asked + asked, b"nonsense\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200") and answer.count(b"HTTP/1.1") == 1
        with server.http() as http:
            wait_for(lambda: "requests_pending 0.0" in http.get("/metrics").text)


def test_a_body_that_breaks_off_in_nonsense_is_400(server):
    head = (
        b"POST /tokenize HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        b"transfer-encoding: chunked\r\n\r\n"
    )
    answer = raw(server, head + b'5\r\n{"con\r\n', b"no length\r\n")
    assert answer.startswith(b"HTTP/1.1 400") and answer.count(b"HTTP/1.1") == 1


def test_endless_headers_are_refused(server):
    lines = b"".join(b"x-%d: %s\r\n" % (i, b"a" * 1000) for i in range(100))
    assert raw(server, b"GET /health HTTP/1.1\r\n", lines).startswith(b"HTTP/1.1 431")


def test_a_huge_body_is_413_said_or_unsaid(texts):
    with live(texts, settings=FrontSettings("tiny", max_body=10_000)) as server:
        body = json.dumps({"prompt": "a" * 10_001}).encode()
        with server.http() as http:
            said = http.post("/v1/completions", content=body, headers=JSON)
            assert said.status_code == 413 and "10000 bytes" in said.json()["error"]["message"]
            unsaid = http.post("/v1/completions", content=iter([body]), headers=JSON)
            assert unsaid.status_code == 413
            assert http.get("/health").status_code == 200


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(texts, monkeypatch):
    longest = max(len(texts.shown(token)) for token in range(texts.tokenizer.n_vocab))
    assert texts.longest == longest
    reader = Reader(ReaderSpec(texts.tokenizer, longest, "tiny", Defaults(), TEMPLATE))
    real, asked = type(texts.tokenizer).encode, []

    def encode(self, text, *rest):
        asked.append(len(text))
        return real(self, text, *rest)

    monkeypatch.setattr(type(texts.tokenizer), "encode", encode)
    for n in (512 * longest, 512 * longest + 1):
        for route, prompt in ((COMPLETIONS, ["ok", "a" * n]), (NATIVE, "a" * n)):
            with pytest.raises(ApiError) as refused:
                reader.request(json.dumps({"prompt": prompt}).encode(), route, 512)
            assert (refused.value.status, refused.value.param) == (400, "prompt")
            assert refused.value.code == "context_length_exceeded"
    assert max(asked) == 512 * longest


def test_a_chat_that_cannot_fit_is_refused(texts):
    with live(texts) as server, server.http() as http:
        chat = {"messages": [{"role": "user", "content": "a" * (512 * texts.longest)}]}
        refused = http.post("/v1/chat/completions", json=chat)
        assert refused.status_code == 400 and "512 tokens" in refused.json()["error"]["message"]


def test_a_slow_body_is_408(texts):
    with live(texts, settings=FrontSettings("tiny", body_s=0.2)) as server:
        head = (
            b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
            b"content-length: 100\r\n\r\n"
        )
        began = time.monotonic()
        answer = raw(server, head, b'{"prompt"')
        assert answer.startswith(b"HTTP/1.1 408") and time.monotonic() - began < 3
        with server.http() as http:
            assert http.get("/health").status_code == 200


def test_slow_headers_are_408(texts, monkeypatch):
    monkeypatch.setattr(protocol, "HEADERS_S", 0.1)
    with live(texts) as server:
        assert raw(server, b"GET /health HT").startswith(b"HTTP/1.1 408")
        assert raw(server, b"").startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_cancels_its_requests(texts, stream):
    worker = FakeWorker(texts.tokenizer.n_vocab, step_s=0.01)
    with live(texts, worker) as server, server.http() as http:
        body = ASK | {"stream": stream, "n": 3}
        if stream:
            with http.stream("POST", "/v1/completions", json=body) as answer:
                next(answer.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                http.post("/v1/completions", json=body, timeout=0.2)
        wait_for(lambda: len(worker.cancelled) == 3)
        assert sorted(worker.cancelled) == [ask.number for ask in worker.asked]
        wait_for(lambda: 'outcome="cancelled"} 3.0' in http.get("/metrics").text)


def test_a_client_that_does_not_read_costs_no_more_tokens_and_is_told(texts, monkeypatch):
    """What was made till then comes, in order, and behind it the reason."""
    monkeypatch.setattr(reply, "MOST_BUFFERED", 100_000)
    worker = FakeWorker(texts.tokenizer.n_vocab, n_ctx=100_000, n_slots=100, n_waiting=100)
    with live(texts, worker) as server:
        ask = {"prompt": [1], "max_tokens": 90_000, "stream": True, "n": 100}
        body = json.dumps(ask).encode()
        at = urlsplit(server.url)
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect((at.hostname, at.port))
            sock.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
                b"connection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
            )
            wait_for(lambda: len(worker.cancelled) == 100, 20)
            answer = http.client.HTTPResponse(sock)
            answer.begin()
            *events, last = [line[6:] for line in answer.read().split(b"\n\n") if line]
        assert json.loads(last)["error"]["code"] == "slow_client"
        said = [json.loads(event)["choices"][0] for event in events]
        assert len(said) > 300 and not any(choice["finish_reason"] for choice in said)
        tokens = texts.text([i % texts.tokenizer.n_vocab for i in range(2, 2 + len(said))])
        for index in range(100):
            own = "".join(choice["text"] for choice in said if choice["index"] == index)
            assert own and tokens.startswith(own)
        with server.http() as client:
            assert client.get("/health").status_code == 200


def test_a_stream_that_is_stuck_is_dropped():
    """Stuck is a client that takes nothing, not one that takes little."""
    worker = type("Reply", (), {"over": True, "drop": lambda self: setattr(self, "gone", 1)})()
    stream = streams.EventStream(worker, None, found := streams.OpenStreams())  # type: ignore[arg-type]
    found.open.add(stream)
    waits, now = 1000, 0.0
    stream._backlog = lambda: waits
    found.drop_stuck(streams.STUCK_S + 1)  # nothing is to be sent
    stream.sending_since = now
    for _ in range(20):
        now, waits = now + streams.STUCK_S - 1, waits - 1
        found.drop_stuck(now)
    assert "gone" not in vars(worker)
    found.drop_stuck(now + streams.STUCK_S + 1)
    assert vars(worker)["gone"]


@pytest.mark.slow
def test_all_others_are_served_while_a_huge_text_is_tokenised(texts):
    """Of 2 MB, which take most of a second; of the same in ids; and of twenty prompts that do not
    fit, of which one is looked at."""
    text = "the engine waits for the end. " * 70_000
    ids = texts.tokenizer.encode(text[:3000], False) * 500
    with live(texts) as server, server.http() as client, ThreadPoolExecutor(4) as pool:
        for path, body, status in (
            ("/tokenize", {"content": text}, 200),
            ("/tokenize", {"content": text, "with_pieces": True}, 200),
            ("/detokenize", {"tokens": ids}, 200),
            ("/v1/completions", {"prompt": ids}, 400),
            ("/v1/completions", {"prompt": [text[:4000]] * 20}, 400),
        ):
            content = json.dumps(body).encode()

            def post(path: str = path, content: bytes = content) -> httpx.Response:
                with server.http() as other:
                    return other.post(path, content=content, headers=JSON, timeout=60)

            asked, n = pool.submit(post), 0
            while not asked.done():
                answer = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
                assert answer.status_code == 200
                n += 1
            assert asked.result().status_code == status
            assert status == 400 or n > 5, (path, n)


def test_huge_texts_wait_for_each_other_and_not_without_end(texts, monkeypatch):
    monkeypatch.setattr(aside, "MOST_HUGE", 2)
    text = json.dumps({"content": "the engine waits " * 60_000}).encode()
    with live(texts) as server, ThreadPoolExecutor(6) as pool:

        def post(_: int) -> httpx.Response:
            with server.http() as http:
                return http.post("/tokenize", content=text, headers=JSON, timeout=60)

        answers = list(pool.map(post, range(6)))
    late = [answer for answer in answers if answer.status_code == 503]
    assert late and len(late) < 5 and all(answer.headers["retry-after"] == "10" for answer in late)
    assert all(answer.status_code == 200 for answer in answers if answer not in late)


def test_a_key_is_asked_for(texts):
    with live(texts, settings=FrontSettings("tiny", keys=(b"first", b"second"))) as server:
        for key in ("none", "firs", "first1"):
            with pytest.raises(openai.AuthenticationError):
                server.client(key).models.list()
        for key in ("first", "second"):
            assert server.client(key).completions.create(model="tiny", prompt="a").choices
        with server.http() as http:
            assert http.get("/health").status_code == 200
            refused = http.post("/v1/completions", json=ASK)
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "invalid_api_key"
            assert http.get("/metrics", headers={"x-api-key": "second"}).status_code == 200


def test_no_other_origin_is_let_in(server):
    with server.http() as http:
        answer = http.get("/health", headers={"origin": "http://evil"})
        assert not [name for name in answer.headers if name.startswith("access-control")]


DIED = "the engine process has died; start the server again"


@pytest.mark.parametrize("stream", [False, True])
def test_a_dead_engine_ends_the_server_behind_what_was_pending(texts, stream):
    """`live` sees that it ends by itself, with one error; a line of its own the server has not."""
    worker = FakeWorker(texts.tokenizer.n_vocab, step_s=0.01)
    with live(texts, worker, dies=DIED) as server, server.http() as http:
        n_said = len(server.said)
        if stream:
            with http.stream("POST", "/v1/completions", json=ASK | {"stream": True}) as answer:
                lines = answer.iter_lines()
                next(lines)
                worker.kill()
                last = [line for line in lines if line][-1]
            assert json.loads(last[6:])["error"]["code"] == "dead"
        else:
            threading.Timer(0.2, worker.kill).start()
            answer = http.post("/v1/completions", json=ASK)
            assert answer.status_code == 503 and "died" in answer.json()["error"]["message"]
        assert len(server.said) == n_said


def test_a_request_that_waits_is_cancelled_too(texts):
    worker = FakeWorker(texts.tokenizer.n_vocab, n_slots=1, step_s=0.005)
    with (
        live(texts, worker) as server,
        server.http() as http,
        http.stream("POST", "/v1/completions", json=ASK | {"stream": True}) as first,
    ):
        lines = first.iter_lines()  # held: without it the response is closed
        next(lines)
        with pytest.raises(httpx.ReadTimeout):
            http.post("/v1/completions", json=ASK, timeout=0.1)
        wait_for(lambda: worker.cancelled == [1])
