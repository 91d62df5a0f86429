"""Who is let in, clients that go away or ask for too much, an engine process that dies, and the end
of a server: what runs is finished, what is new is refused."""

from __future__ import annotations

import hmac
import json
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from tests.profiles import share
from tests.server.fake_worker import FakeWorker
from tests.server.live import TEMPLATE, events_of, live, wait_for
from workbench.cli.serve import DEFAULT_SERVER
from workbench.common.errors import DeviceError, UsageError
from workbench.server import streams
from workbench.server.api.faults import ApiError
from workbench.server.api.fields import COMPLETIONS, NATIVE
from workbench.server.api.reading import Defaults, Reader, ReaderSpec
from workbench.server.server import Listening, is_loopback, listen, serve
from workbench.server.wire.front import FrontSettings


def test_only_this_machine_reaches_a_server_by_default():
    assert Listening().host == DEFAULT_SERVER.host == "127.0.0.1"
    for host, alone in (("127.0.0.1", True), ("0.0.0.0", False)):
        with listen(host, 0) as sock:
            assert sock.getsockname()[0] == host and is_loopback(sock) == alone
            with pytest.raises(UsageError, match=f"port {sock.getsockname()[1]}"):
                listen(*sock.getsockname())


def test_who_has_no_key_is_not_let_in(texts, monkeypatch):
    """Every key is compared, in constant time, also behind one that matches: how long it takes says
    nothing of which it was."""
    compared: list[tuple[bytes, bytes]] = []
    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((a, b)) or real(a, b))
    keys = (b"first", b"second")
    with live(texts, settings=FrontSettings("tiny", keys=keys)) as server, server.http() as http:
        for given in ("first", "second", "none", "firs", "first1"):
            compared.clear()
            answer = http.get("/v1/models", headers={"authorization": f"Bearer {given}"})
            assert answer.status_code == (200 if given.encode() in keys else 401)
            assert compared == [(given.encode(), key) for key in keys]
        with pytest.raises(openai.AuthenticationError, match="API key"):
            server.client("wrong").models.list()
        for path in ("/props", "/slots", "/metrics", "/openapi.json", "/nowhere"):
            refused = http.get(path)
            assert refused.status_code == 401 and "tiny" not in refused.text
            assert refused.json()["error"]["code"] == "invalid_api_key"
        assert http.get("/metrics", headers={"x-api-key": "second"}).status_code == 200
        assert http.get("/health").status_code == 200


def test_more_requests_than_may_wait_here_are_503(texts):
    settings, few = FrontSettings("tiny", max_pending=3), {"prompt": [1], "max_tokens": 60, "n": 2}
    with live(texts, settings=settings, step_s=0.005) as server, ThreadPoolExecutor(1) as pool:
        first = pool.submit(server.post, COMPLETIONS, **few)
        wait_for(lambda: len(server.worker.asked) == 2)
        refused = server.answer(COMPLETIONS, few)
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        assert "too many requests" in refused.json()["error"]["message"]
        assert server.post(COMPLETIONS, prompt=[1], max_tokens=1)
        assert first.result() and len(server.worker.asked) == 3


def test_more_answers_than_ever_fit_are_400(texts):
    """And what does not fit now is 503 with a time to come again."""
    with live(texts, n_slots=2, n_waiting=3, step_s=0.005) as server:
        refused = server.answer(COMPLETIONS, {"prompt": [[1], [2], [3]], "n": 2})
        assert refused.status_code == 400 and "retry-after" not in refused.headers
        assert "wants 6 answers; ask for 5 at most" in refused.json()["error"]["message"]
        assert not server.worker.asked
        many = {"prompt": [1], "max_tokens": 90, "n": 5}
        with server.http().stream("POST", COMPLETIONS, json=many | {"stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            full = server.answer(COMPLETIONS, {"prompt": [1]})
        assert full.status_code == 503 and full.headers["retry-after"] == "2"


def test_a_text_that_cannot_fit_is_not_tokenised(texts, monkeypatch):
    longest = max(len(texts.shown(token)) for token in range(texts.tokenizer.n_vocab))
    assert texts.longest == longest
    reader = Reader(ReaderSpec(texts.tokenizer, longest, "tiny", Defaults(), TEMPLATE))
    kind, asked = type(texts.tokenizer), []
    encode = kind.encode
    monkeypatch.setattr(kind, "encode", lambda *a: asked.append(len(a[1])) or encode(*a))
    for n in (512 * longest, 512 * longest + 1):
        for route, prompt in ((COMPLETIONS, ["ok", "a" * n]), (NATIVE, "a" * n)):
            with pytest.raises(ApiError) as refused:
                reader.request(json.dumps({"prompt": prompt}).encode(), route, 512)
            assert (refused.value.status, refused.value.param) == (400, "prompt")
            assert refused.value.code == "context_length_exceeded"
    assert max(asked) == 512 * longest


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_cancels_its_requests(texts, stream):
    """Also one that waits."""
    with live(texts, n_slots=2, step_s=0.01) as server, server.http() as http:
        body, worker = {"prompt": [1], "max_tokens": 400, "stream": stream, "n": 3}, server.worker
        if stream:
            with http.stream("POST", COMPLETIONS, json=body) as answer:
                next(answer.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                http.post(COMPLETIONS, json=body, timeout=0.1)
        wait_for(lambda: len(worker.cancelled) == 3)
        assert sorted(worker.cancelled) == [ask.number for ask in worker.asked]
        wait_for(lambda: 'outcome="cancelled"} 3.0' in http.get("/metrics").text)


def test_a_stream_that_is_stuck_is_dropped():
    """Stuck is a client that takes nothing, not one that takes little."""
    reply = type("Reply", (), {"over": True, "drop": lambda self: setattr(self, "gone", 1)})()
    stream = streams.EventStream(reply, None, found := streams.OpenStreams())  # type: ignore[arg-type]
    found.open.add(stream)
    waits, now = 1000, 0.0
    stream._backlog = lambda: waits
    found.drop_stuck(streams.STUCK_S + 1)  # nothing is to be sent
    stream.sending_since = now
    for _ in range(20):
        now, waits = now + streams.STUCK_S - 1, waits - 1
        found.drop_stuck(now)
    assert "gone" not in vars(reply)
    found.drop_stuck(now + streams.STUCK_S + 1)
    assert vars(reply)["gone"]


@pytest.mark.parametrize(
    "more",
    share([{"stream": True, "logprobs": 2, "n": 3}, {"stop": ["never"]}, {}, {"stream": True}], 4),
    ids=str,
)
def test_a_token_without_a_text_fails_its_reply_alone(texts, monkeypatch, capfd, more):
    """As of a model with more rows than tokens. A step that fails is the server's error, too."""
    good = {"prompt": [1], "max_tokens": 30}
    monkeypatch.setattr(texts, "bytes", texts.bytes[:700])
    fails = {"step_s": 0.001, "fails": lambda ask: ask.tokens[0] == 2}
    with live(texts, **fails) as server, server.http() as http:
        with pytest.raises(openai.InternalServerError, match="told to"):
            server.complete(prompt=[2], max_tokens=3)
        with http.stream("POST", COMPLETIONS, json=good | {"stream": True}) as other:
            lines = other.iter_lines()
            next(lines)
            answer = http.post(COMPLETIONS, json={"prompt": [690], "max_tokens": 30} | more)
            events = [line for line in lines if line]
        assert events[-1] == "data: [DONE]" and len(events) == 29 + 1 + 1
        assert answer.status_code == (200 if "stream" in more else 500)
        error = (events_of(answer)[-1] if "stream" in more else answer.json())["error"]
        assert error["type"] == "server_error" and "log" in error["message"]
        assert server.post(COMPLETIONS, **good)
        told = http.get("/metrics").text
        assert "requests_pending 0.0" in told
        # a text that is made at the end breaks when the engine has ended well
        assert f'outcome="length"}} {2 if more else 3}.0' in told
        assert f'outcome="failed"}} {1 + more.get("n", 1) * bool(more)}.0' in told
    assert capfd.readouterr().err.count("IndexError: ") == 1


def test_an_engine_that_cannot_load_ends_the_server(texts):
    worker = FakeWorker(texts.tokenizer.n_vocab)
    worker.kill()
    settings, listening = FrontSettings("tiny"), Listening(port=0)
    with pytest.raises(DeviceError, match="before it had loaded"):
        serve(worker.start, texts, None, settings, listening, lambda line: None)


def test_a_signal_to_the_whole_group_is_no_error(texts):
    """A supervisor may send SIGTERM to the engine process, too."""
    with live(texts, step_s=0.01) as server, ThreadPoolExecutor(1) as pool:
        body = {"prompt": [1], "max_tokens": 400}
        running = pool.submit(server.answer, COMPLETIONS, body)
        wait_for(lambda: len(server.worker.asked) == 1)
        server.server.handle_exit(signal.SIGTERM, None)
        server.worker.kill()
        assert running.result().status_code == 503
    assert server.said[-1].startswith("ended by SIGTERM; the engine process ended before it was")


def test_while_the_model_loads_requests_are_503(texts):
    slow = {"load_s": 20, "prepare_s": 20}
    with live(texts, until="listening", **slow) as server, server.http() as http:
        answer = http.get("/health")
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "loading"
        assert answer.headers["retry-after"] == "1"
        server.worker.loaded.set()
        wait_for(lambda: http.get("/health").json()["error"]["code"] == "preparing")
        answer = http.get("/v1/models")
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
        server.worker.prepared.set()
        wait_for(lambda: http.get("/health").status_code == 200)
        assert [line.partition(":")[0] for line in server.said[-2:]] == ["loaded", "ready"]


@pytest.mark.parametrize(("drain_s", "status"), [(20.0, 200), (0.05, 503)])
def test_what_runs_is_finished_and_what_is_new_is_503(texts, drain_s, status):
    """What takes longer than the drain is told so, and is cancelled."""
    with (
        live(texts, drain_s=drain_s, step_s=0.01) as server,
        server.http() as http,
        ThreadPoolExecutor(1) as pool,
    ):
        assert http.get("/health").status_code == 200
        body, worker = {"prompt": [1], "max_tokens": 30 if status == 200 else 400}, server.worker
        running = pool.submit(server.answer, COMPLETIONS, body)
        wait_for(lambda: len(worker.asked) == 1)
        server.server.handle_exit(signal.SIGTERM, None)
        if status == 200:
            refused = http.post(COMPLETIONS, json={"prompt": "a"})
            assert refused.status_code == 503 and "shutting down" in refused.text
            assert http.get("/health").status_code == 503
        assert running.result().status_code == status
    assert worker.finished.is_set() and not worker.killed
    assert worker.cancelled == [worker.asked[0].number] * (status == 503)
    how = "every answer was" if status == 200 else "1 answer not"
    assert server.said[-1].startswith(f"ended by SIGTERM; {how} finished")
