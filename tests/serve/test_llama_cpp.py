"""What llama.cpp's `scripts/server-bench.py` asks, in its order, and its other endpoints."""

from __future__ import annotations

import json
import random

import pytest

from tests.serve.fake_worker import FakeWorker
from tests.serve.live import live


def lines_of(answer) -> list[bytes]:
    return [line.encode() for line in answer.iter_lines() if line.startswith("data: ")]


def test_server_bench_with_random_prompts_counts_every_token(texts):
    rng = random.Random(0)
    worker = FakeWorker(texts.tokenizer.n_vocab, n_ctx=4096)
    with live(texts, worker) as server, server.http() as http:
        for n_predict in (1, 7, 60):
            body = {
                "prompt": [rng.randint(0, texts.tokenizer.n_vocab - 1) for _ in range(100)],
                "ignore_eos": True, "seed": -1, "max_tokens": n_predict, "stream": True,
            }  # fmt: skip
            with http.stream("POST", "/v1/completions", json=body) as answer:
                answer.raise_for_status()
                lines = lines_of(answer)
            # as the script counts: all but the last line, and but one with timings
            arrivals = lines[:-1]
            if len(lines) > 1 and "timings" in json.loads(lines[-2][6:]):
                arrivals = arrivals[:-1]
            assert len(arrivals) == n_predict


def test_server_bench_with_texts_asks_for_template_and_length(server, texts):
    with server.http() as http:
        messages = [{"role": "user", "content": "What waits?", "stream": True}]
        prompt = http.post("/apply-template", json={"messages": messages}).json()["prompt"]
        assert prompt == "<user>What waits?\n<assistant>"
        tokens = http.post("/tokenize", json={"content": prompt, "add_special": True}).json()
        assert tokens["tokens"] == texts.tokenizer.encode(prompt)
        body = {"prompt": prompt, "ignore_eos": True, "seed": 2, "max_tokens": 9, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as answer:
            assert len(lines_of(answer)) == 9 + 2


def test_the_native_endpoint_streams_as_llama_cpp_does(server, texts):
    with server.http() as http:
        body = {"prompt": [100], "n_predict": 8, "cache_prompt": False, "stream": True}
        with http.stream("POST", "/completion", json=body) as answer:
            events = [json.loads(line[6:]) for line in lines_of(answer)]
        assert "".join(e["content"] for e in events) == texts.text(range(101, 109))
        assert [e["stop"] for e in events] == [False] * 8 + [True]
        assert [e["tokens"] for e in events[:-1]] == [[t] for t in range(101, 109)]
        last = events[-1]
        assert last["stop_type"] == "limit" and last["tokens_predicted"] == 8
        assert last["timings"]["predicted_n"] == 8
        whole = http.post("/completions", json=body | {"stream": False}).json()
        assert whole["content"] == texts.text(range(101, 109)) and whole["stop"]


def test_more_than_fits_is_cut_at_the_native_endpoint(server):
    with server.http() as http:
        body = {"prompt": [1] * 510, "n_predict": 100}
        assert http.post("/completion", json=body).json()["tokens_predicted"] == 2


@pytest.mark.parametrize("text", ["The engine waits", "🙂 ↔", ""])
def test_text_goes_to_tokens_and_back(server, text):
    with server.http() as http:
        pieces = http.post("/tokenize", json={"content": text, "with_pieces": True}).json()
        ids = [p["id"] for p in pieces["tokens"]]
        assert http.post("/detokenize", json={"tokens": ids}).json() == {"content": text}
        wrong = http.post("/detokenize", json={"tokens": [10**9]})
        assert wrong.status_code == 400 and "vocabulary" in wrong.text


def test_properties_and_slots_are_in_llama_cpps_words(server):
    with server.http() as http:
        props = http.get("/props").json()
        assert props["total_slots"] == 8 and "{% for message" in props["chat_template"]
        assert props["default_generation_settings"]["n_ctx"] == 512
        slots = http.get("/slots").json()
        assert [s["id"] for s in slots] == list(range(8))
        assert not any(s["is_processing"] for s in slots)
