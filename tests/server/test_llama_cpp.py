"""What benchmarks of others ask: llama.cpp's `scripts/server-bench.py`, in its order, and guidellm;
and llama.cpp's own endpoints."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests

from tests.server.fake_worker import FakeWorker
from tests.server.live import events_of, live
from workbench.server.app import AT_ONCE


class ServerBench:
    """The script's requests, by its own library and in its words.

    It counts events, so one token must be one event. It leaves the last one out, and the one
    before where that has `timings`.
    """

    def __init__(self, url: str):
        self.url = url
        self.session = requests.Session()
        adapter = requests.adapters.HTTPAdapter(pool_connections=8, pool_maxsize=8)
        self.session.mount("http://", adapter)

    def prompt_length(self, text: str) -> int:
        asked = {"messages": [{"role": "user", "content": text, "stream": True}]}
        response = self.session.post(f"{self.url}/apply-template", json=asked)
        response.raise_for_status()
        asked = {"content": json.loads(response.text)["prompt"], "add_special": True}
        response = self.session.post(f"{self.url}/tokenize", json=asked)
        response.raise_for_status()
        return len(json.loads(response.text)["tokens"])

    def n_counted(self, prompt: str | list[int], n_predict: int, seed: int) -> int:
        """Tokens that the script counts for a request."""
        asked = {
            "prompt": prompt, "ignore_eos": True, "seed": seed, "max_tokens": n_predict,
            "stream": True,
        }  # fmt: skip
        response = self.session.post(f"{self.url}/v1/completions", json=asked, stream=True)
        response.raise_for_status()
        lines = [
            line for line in response.iter_lines(decode_unicode=False) if line.startswith(b"data: ")
        ]
        n = len(lines) - 1
        return n - 1 if len(lines) > 1 and "timings" in json.loads(lines[-2][6:]) else n


@pytest.mark.parametrize("seeded", [True, False])
def test_server_bench_counts_every_token(texts, seeded):
    worker = FakeWorker(texts.tokenizer.n_vocab, n_ctx=4096, n_slots=4)
    most = texts.tokenizer.n_vocab - 1
    data: list[tuple[list[int], int, int]] = []
    for i in range(24):
        drawn = random.Random(3 * 1000 * i + 1)
        prompt = [drawn.randint(100, min(10_000, most)) for _ in range(drawn.randint(1, 300))]
        data.append((prompt, drawn.randint(1, 60), 3 * 1000 * i + 2 if seeded else -1))
    with live(texts, worker) as server, ThreadPoolExecutor(8) as pool:
        script = ServerBench(server.url)
        counted = list(pool.map(lambda one: script.n_counted(*one), data))
        text = "What waits for what, and why?\n(A) host (B) device"
        wanted = texts.tokenizer.encode(f"<user>{text}\n<assistant>")
        assert script.prompt_length(text) == len(wanted)
        assert script.n_counted(text, 9, 2) == 9
        assert worker.asked[-1].tokens.tolist() == texts.tokenizer.encode(text)
    assert counted == [n_predict for _, n_predict, _ in data]
    if seeded:
        seeds = sorted(ask.seed for ask in worker.asked[:-1])
        assert seeds == sorted(seed for *_, seed in data)


# what guidellm 0.8.1 sent, beside GET /health and GET /v1/models
QUESTION = "Question 0: what waits for what, 0 times?"
CONTENT = [{"type": "text", "text": QUESTION}]
GUIDELLM = {
    "/v1/completions": {"max_tokens": 24, "ignore_eos": True, "prompt": QUESTION},
    "/v1/chat/completions": {
        "max_completion_tokens": 24, "ignore_eos": True,
        "messages": [{"role": "user", "content": CONTENT}],
    },
}  # fmt: skip


@pytest.mark.parametrize("path", GUIDELLM)
def test_guidellm_is_told_text_and_usage(server, path):
    body = GUIDELLM[path] | {"model": "tiny"}
    usage = {"include_usage": True, "continuous_usage_stats": True}
    with server.http() as http:
        assert http.get("/health").status_code == 200
        assert http.get("/v1/models").json()["data"][0]["id"] == "tiny"
        assert server.post(path, **body)["usage"]["completion_tokens"] == 24
        answer = http.post(path, json=body | {"stream": True, "stream_options": usage})
    assert answer.text.endswith("data: [DONE]\n\n")
    events = events_of(answer)
    assert events[-1]["usage"]["completion_tokens"] == 24 and not events[-1]["choices"]
    texts = [
        choice.get("text") or choice.get("delta", {}).get("content")
        for event in events for choice in event["choices"]
    ]  # fmt: skip
    assert len([text for text in texts if text]) > 12


def test_the_native_endpoint_streams_as_llama_cpp_does(server, texts):
    body = {"prompt": [100], "n_predict": 8, "cache_prompt": False}
    with server.http() as http:
        events = events_of(http.post("/completion", json=body | {"stream": True}))
    text = texts.text(range(101, 109))
    assert "".join(e["content"] for e in events) == text
    assert [e["stop"] for e in events] == [False] * 8 + [True]
    assert [e["tokens"] for e in events[:-1]] == [[t] for t in range(101, 109)]
    last = events[-1]
    assert last["stop_type"] == "limit" and last["tokens_predicted"] == 8
    assert last["timings"]["predicted_n"] == 8
    whole = server.post("/completions", **body)
    assert whole["content"] == text and whole["stop"] and whole["stopping_word"] == ""
    word = texts.text([104])
    cut = server.post("/completion", **body, stop=["no", word])
    assert (cut["stop_type"], cut["stopping_word"]) == ("word", word)
    assert cut["content"] == text.partition(word)[0]
    # more than fits is cut
    assert server.post("/completion", prompt=[1] * 510, n_predict=100)["tokens_predicted"] == 2


def test_names_of_control_tokens_are_text_where_asked(server, texts):
    name = texts.shown(texts.tokenizer.eos_id).decode()
    for asked, is_one in (({}, True), ({"parse_special": False}, False)):
        tokens = server.post("/tokenize", content=name, **asked)["tokens"]
        assert (tokens == [texts.tokenizer.eos_id]) == is_one
        assert server.post("/detokenize", tokens=tokens) == {"content": name}
    assert server.post("/detokenize", tokens=[]) == {"content": ""}


@pytest.mark.parametrize("pieces", [False, True])
def test_long_lists_of_tokens_come_in_parts(server, texts, pieces):
    text = "the engine 🙂 ↔ waits " * 6000
    tokens = server.post("/tokenize", content=text, with_pieces=pieces)["tokens"]
    ids = [t["id"] for t in tokens] if pieces else tokens
    assert ids == texts.tokenizer.encode(text, False) and len(ids) > 3 * AT_ONCE
    assert server.post("/detokenize", tokens=ids) == {"content": text}


def test_properties_and_slots_are_in_llama_cpps_words(server):
    with server.http() as http:
        props, slots = http.get("/props").json(), http.get("/slots").json()
    assert props["total_slots"] == 8 and "{% for message" in props["chat_template"]
    assert props["default_generation_settings"]["n_ctx"] == 512
    assert [s["id"] for s in slots] == list(range(8))
    assert not any(s["is_processing"] for s in slots)
