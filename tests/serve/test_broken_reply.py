"""A reply that cannot be worded ends with an error, and no other one knows of it."""

from __future__ import annotations

import json

import pytest

from tests.serve.fake_worker import FakeWorker
from tests.serve.live import live
from workbench.server.text import TokenTexts

GOOD = {"prompt": [1], "max_tokens": 30}


def broken(texts: TokenTexts, first: int, monkeypatch) -> None:
    """No token from `first` on has a text, as of a model with more rows than tokens."""
    monkeypatch.setattr(texts, "bytes", texts.bytes[:first])


@pytest.mark.parametrize(
    "more",
    [
        {"stream": True},
        {"stop": ["never"]},
        {},
        {"stream": True, "logprobs": 2},
        {"stream": True, "n": 3},
    ],
    ids=str,
)
def test_a_token_without_a_text_is_an_error_of_its_reply_alone(texts, monkeypatch, capfd, more):
    broken(texts, 700, monkeypatch)
    worker = FakeWorker(texts.tokenizer.n_vocab, step_s=0.001)
    with live(texts, worker) as server, server.http() as http:
        with http.stream("POST", "/v1/completions", json=GOOD | {"stream": True}) as other:
            lines = other.iter_lines()
            next(lines)
            body = {"prompt": [690], "max_tokens": 30} | more
            answer = http.post("/v1/completions", json=body)
            events = [line for line in lines if line]
        assert events[-1] == "data: [DONE]" and len(events) == 29 + 1 + 1
        if more.get("stream"):
            last = json.loads(answer.text.strip().split("\n\n")[-1][6:])
        else:
            assert answer.status_code == 500
            last = answer.json()
        assert last["error"]["type"] == "server_error" and "log" in last["error"]["message"]
        assert http.post("/v1/completions", json=GOOD).status_code == 200
        assert http.get("/health").status_code == 200
        told = http.get("/metrics").text
        assert "requests_pending 0.0" in told
        # a text that is made at the end breaks when the engine has ended well
        assert f'outcome="length"}} {2 if more else 3}.0' in told
        if more:
            assert f'outcome="failed"}} {more.get("n", 1)}.0' in told
    assert capfd.readouterr().err.count("IndexError: ") == 1


def test_an_end_that_cannot_be_worded_is_an_error_of_its_reply_alone(texts, monkeypatch, capfd):
    from workbench.server.api import forms

    real = forms.Completions.end

    def fails(self, part, text, last):
        if part.n_prompt == 2:
            raise KeyError("no such reason")
        return real(self, part, text, last)

    monkeypatch.setattr(forms.Completions, "end", fails)
    worker = FakeWorker(texts.tokenizer.n_vocab, step_s=0.01)
    with live(texts, worker) as server, server.http() as http:
        good, bad = (
            http.post("/v1/completions", json={"prompt": ids, "max_tokens": 3, "stream": True})
            for ids in ([1], [1, 2])
        )
        assert good.text.endswith("data: [DONE]\n\n")
        assert json.loads(bad.text.strip().split("\n\n")[-1][6:])["error"]["code"] is None
        assert http.post("/v1/completions", json=GOOD).status_code == 200
    assert "no such reason" in capfd.readouterr().err
