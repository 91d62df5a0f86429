"""How a server ends: what runs is finished, what is new is refused, and nobody is forgotten."""

from __future__ import annotations

import threading
import time

import pytest

from tests.serve.fake_worker import FakeWorker
from tests.serve.live import live
from tests.serve.test_hostile_clients import wait_for
from workbench.common.errors import DeviceError, UsageError
from workbench.server.server import Listening, listen, serve
from workbench.server.wire.front import FrontSettings


def test_what_runs_is_finished_and_what_is_new_is_503(texts):
    worker = FakeWorker(texts.tokenizer.n_vocab, step_s=0.01)
    made = []
    with live(texts, worker) as server, server.http() as http:
        assert http.get("/health").status_code == 200
        running = threading.Thread(
            target=lambda: made.append(
                server.client().completions.create(model="tiny", prompt=[1], max_tokens=50)
            )
        )
        running.start()
        wait_for(lambda: len(worker.asked) == 1)
        server.server.finish()
        refused = http.post("/v1/completions", json={"prompt": "a"})
        assert refused.status_code == 503 and "shutting down" in refused.text
        assert http.get("/health").status_code == 503
        running.join(10)
    assert made[0].usage.completion_tokens == 50
    assert worker.finished.is_set() and not worker.killed and not worker.cancelled


def test_what_takes_longer_than_the_drain_is_503_and_cancelled(texts):
    worker = FakeWorker(texts.tokenizer.n_vocab, step_s=0.02)
    answers = []
    with live(texts, worker, drain_s=0.3) as server, server.http() as http:
        body = {"prompt": [1], "max_tokens": 400}
        running = threading.Thread(
            target=lambda: answers.append(http.post("/v1/completions", json=body))
        )
        running.start()
        wait_for(lambda: len(worker.asked) == 1)
        server.server.finish()
        running.join(10)
    assert answers[0].status_code == 503 and worker.cancelled == [worker.asked[0].number]
    assert worker.finished.is_set()


def test_while_the_model_loads_requests_are_503(texts):
    worker = FakeWorker(texts.tokenizer.n_vocab, load_s=20, prepare_s=20)
    said, servers = [], []
    thread = threading.Thread(
        target=lambda: serve(
            worker.start, texts, None, FrontSettings("tiny"), Listening(port=0), said.append,
            servers.append,
        ),
        daemon=True,
    )  # fmt: skip
    thread.start()
    wait_for(lambda: servers and servers[0].started)
    import httpx

    url = said[0].partition(" at ")[2].partition(";")[0]
    answer = httpx.get(f"{url}/health")
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "loading"
    assert answer.headers["retry-after"] == "1"
    worker.loaded.set()
    wait_for(lambda: httpx.get(f"{url}/health").json()["error"]["code"] == "preparing")
    answer = httpx.get(f"{url}/v1/models")
    assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
    assert "kernels are being compiled" in answer.json()["error"]["message"]
    worker.prepared.set()
    wait_for(lambda: httpx.get(f"{url}/health").status_code == 200)
    assert [line.partition(":")[0] for line in said[-2:]] == ["loaded", "ready"]
    servers[0].finish()
    thread.join(10)
    assert worker.finished.is_set()


def test_an_engine_that_cannot_load_ends_the_server(texts):
    worker = FakeWorker(texts.tokenizer.n_vocab)
    worker.kill()
    began = time.monotonic()
    with pytest.raises(DeviceError, match="before it had loaded"):
        serve(
            worker.start, texts, None, FrontSettings("tiny"), Listening(port=0), lambda line: None
        )
    assert time.monotonic() - began < 5


def test_an_address_in_use_is_a_usage_error(texts):
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"port {port}"):
            listen("127.0.0.1", port)
    with pytest.raises(UsageError, match="cannot listen"):
        listen("no.such.host.invalid", 0)
    with pytest.raises(UsageError, match="cannot listen"):
        listen("127.0.0.1", 99_999)
