"""Who is let in, and how many: address, keys, connections and requests."""

from __future__ import annotations

import hmac
import re
import socket
import threading
import tomllib
from pathlib import Path
from urllib.parse import urlsplit

import openai
import pytest

from tests.serve.fake_worker import FakeWorker
from tests.serve.live import live
from tests.serve.test_hostile_clients import wait_for
from workbench.cli.serve import DEFAULT_SERVER
from workbench.server.server import Listening, is_loopback, listen
from workbench.server.wire import protocol
from workbench.server.wire.front import FrontSettings

ROOT = Path(__file__).resolve().parents[2]


def test_only_this_machine_reaches_a_server_that_is_told_nothing():
    assert Listening().host == DEFAULT_SERVER.host == "127.0.0.1"
    for host, alone in (("127.0.0.1", True), ("0.0.0.0", False)):
        with listen(host, 0) as sock:
            assert sock.getsockname()[0] == host and is_loopback(sock) == alone


@pytest.mark.parametrize("given", ["first", "third", "none", "firs", "sechstes"])
def test_every_key_is_compared_in_constant_time(texts, monkeypatch, given):
    """Also behind one that matches: how long it takes says nothing of which it was."""
    compared: list[tuple[bytes, bytes]] = []
    real = hmac.compare_digest

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return real(a, b)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    keys = (b"first", b"second", b"third")
    with live(texts, settings=FrontSettings("tiny", keys=keys)) as server, server.http() as http:
        answer = http.get("/v1/models", headers={"authorization": f"Bearer {given}"})
    assert answer.status_code == (200 if given.encode() in keys else 401)
    assert compared == [(given.encode(), key) for key in keys]


def test_more_requests_than_may_wait_here_are_503(texts):
    worker = FakeWorker(texts.tokenizer.n_vocab, step_s=0.01)
    settings = FrontSettings("tiny", max_pending=3)
    with live(texts, worker, settings=settings) as server, server.http() as http:
        ask = {"prompt": [1], "max_tokens": 60, "n": 2}
        first = threading.Thread(target=lambda: http.post("/v1/completions", json=ask))
        first.start()
        wait_for(lambda: len(worker.asked) == 2)
        with server.http() as other:
            refused = other.post("/v1/completions", json=ask)
            assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
            assert "too many requests" in refused.json()["error"]["message"]
            assert other.post("/v1/completions", json=ask | {"n": 1}).status_code == 200
        first.join(10)
    assert len(worker.asked) == 3


def test_more_answers_than_ever_fit_are_no_matter_of_when(texts):
    worker = FakeWorker(texts.tokenizer.n_vocab, n_slots=2, n_waiting=3)
    with live(texts, worker) as server, server.http() as http:
        refused = http.post("/v1/completions", json={"prompt": [[1], [2], [3]], "n": 2})
        assert refused.status_code == 400 and "retry-after" not in refused.headers
        assert "wants 6 answers; ask for 5 at most" in refused.json()["error"]["message"]
    assert not worker.asked


def test_more_connections_than_there_may_be_are_503(texts, monkeypatch):
    monkeypatch.setattr(protocol, "MAX_CONNECTIONS", 3)
    with live(texts) as server:
        at = urlsplit(server.url)
        with server.http() as http:
            assert http.get("/health").status_code == 200
        held = [socket.create_connection((at.hostname, at.port), timeout=5) for _ in range(6)]
        try:
            late = held[-1].recv(4096)
            assert late.startswith(b"HTTP/1.1 503") and b"too many connections" in late
        finally:
            for sock in held:
                sock.close()
        with server.http() as http:
            wait_for(lambda: http.get("/health").status_code == 200)


def test_a_client_that_has_no_key_learns_nothing_of_the_model(texts):
    with live(texts, settings=FrontSettings("tiny", keys=(b"k",))) as server:
        with server.http() as http:
            for path in ("/props", "/slots", "/metrics", "/openapi.json", "/nowhere"):
                answer = http.get(path)
                assert answer.status_code == 401 and "tiny" not in answer.text
        with pytest.raises(openai.AuthenticationError, match="API key"):
            server.client("wrong").models.list()


def test_make_setup_installs_the_extra_and_no_benchmark_is_in_one():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    names = {re.split(r"[^\w-]", one)[0] for one in extras["serve"]}
    assert {"starlette", "uvicorn"} <= names
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(
        r"^\.venv/\.lab:.*\n(?:\t.*\n)*?\t.*INSTALL,lab\$\(comma\)serve", makefile, re.M
    )
    assert re.search(r"^setup: \.venv/\.lab", makefile, re.M)
    everything = " ".join(one for extra in extras.values() for one in extra)
    assert "openai" in everything and "guidellm" not in everything
