"""What benchmarks of others ask: llama.cpp's `scripts/server-bench.py`, in its order, and guidellm;
and llama.cpp's own endpoints."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests

from tests.serve.fake_worker import FakeWorker
from tests.serve.live import live
from workbench.server.app import AT_ONCE

RNG = random.Random(0)


def lines_of(answer) -> list[bytes]:
    return [line.encode() for line in answer.iter_lines() if line.startswith("data: ")]


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


@pytest.mark.parametrize("seed_offset", [-1, 0, 7])
def test_server_bench_with_random_prompts_counts_every_token(texts, seed_offset):
    worker = FakeWorker(texts.tokenizer.n_vocab, n_ctx=4096, n_slots=4)
    most = texts.tokenizer.n_vocab - 1
    data: list[tuple[list[int], int, int]] = []
    for i in range(24):
        drawn = random.Random(3 * (seed_offset + 1000 * i) + 1) if seed_offset >= 0 else RNG
        prompt = [drawn.randint(100, min(10_000, most)) for _ in range(drawn.randint(1, 300))]
        seed = 3 * (seed_offset + 1000 * i) + 2 if seed_offset >= 0 else -1
        data.append((prompt, drawn.randint(1, 60), seed))
    with live(texts, worker) as server, ThreadPoolExecutor(8) as pool:
        script = ServerBench(server.url)
        counted = list(pool.map(lambda one: script.n_counted(*one), data))
    assert counted == [n_predict for _, n_predict, _ in data]
    if seed_offset >= 0:
        assert sorted(ask.seed for ask in worker.asked) == sorted(seed for *_, seed in data)


def test_server_bench_with_texts_asks_for_template_and_length(server, texts):
    script = ServerBench(server.url)
    text = "What waits for what, and why?\n(A) host (B) device"
    wanted = texts.tokenizer.encode(f"<user>{text}\n<assistant>")
    assert script.prompt_length(text) == len(wanted)
    assert script.n_counted(text, 9, 2) == 9
    assert server.worker.asked[-1].tokens.tolist() == texts.tokenizer.encode(text)


def test_server_bench_begins_when_health_is_200(server):
    assert requests.get(f"{server.url}/health").status_code == 200


# what guidellm 0.8.1 sent, beside GET /health and GET /v1/models
GUIDELLM = {
    "/v1/completions": {
        "max_tokens": 24, "ignore_eos": True,
        "prompt": "Question 0: what waits for what, 0 times?",
    },
    "/v1/chat/completions": {
        "max_completion_tokens": 24, "ignore_eos": True,
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "Question 0: what waits for what, 0 times?"}],
            }
        ],
    },
}  # fmt: skip


@pytest.mark.parametrize("path", GUIDELLM)
@pytest.mark.parametrize("stream", [True, False])
def test_guidellm_is_told_text_and_usage(server, path, stream):
    body = GUIDELLM[path] | {"model": "tiny"}
    if stream:
        usage = {"include_usage": True, "continuous_usage_stats": True}
        body |= {"stream": True, "stream_options": usage}
    with server.http() as http:
        assert http.get("/v1/models").json()["data"][0]["id"] == "tiny"
        if not stream:
            made = http.post(path, json=body).json()
            assert made["usage"]["completion_tokens"] == 24
            return
        with http.stream("POST", path, json=body) as answer:
            lines = lines_of(answer)
    assert lines[-1] == b"data: [DONE]"
    events = [json.loads(line[6:]) for line in lines[:-1]]
    assert events[-1]["usage"]["completion_tokens"] == 24 and not events[-1]["choices"]
    texts = [
        choice.get("text") or choice.get("delta", {}).get("content")
        for event in events for choice in event["choices"]
    ]  # fmt: skip
    assert len([text for text in texts if text]) > 12


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
        assert whole["stopping_word"] == ""
        word = texts.text([104])
        cut = http.post("/completion", json=body | {"stream": False, "stop": ["no", word]}).json()
        assert (cut["stop_type"], cut["stopping_word"]) == ("word", word)
        assert cut["content"] == texts.text(range(101, 109)).partition(word)[0]


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


def test_names_of_control_tokens_are_text_where_asked(server, texts):
    name = texts.shown(texts.tokenizer.eos_id).decode()
    for asked, is_one in (({}, True), ({"parse_special": False}, False)):
        with server.http() as http:
            tokens = http.post("/tokenize", json={"content": name} | asked).json()["tokens"]
            assert (tokens == [texts.tokenizer.eos_id]) == is_one
            assert http.post("/detokenize", json={"tokens": tokens}).json() == {"content": name}


@pytest.mark.parametrize("pieces", [False, True])
def test_long_lists_of_tokens_come_in_parts(server, texts, pieces):
    text = "the engine waits " * 8000
    with server.http() as http:
        asked = {"content": text, "with_pieces": pieces}
        tokens = http.post("/tokenize", json=asked).json()["tokens"]
        ids = [t["id"] for t in tokens] if pieces else tokens
        assert ids == texts.tokenizer.encode(text, False) and len(ids) > 3 * AT_ONCE
        assert http.post("/detokenize", json={"tokens": ids}).json()["content"] == text


def test_max_tokens_is_another_word_for_n_predict(server):
    with server.http() as http:
        asked = (
            ({"max_tokens": 3}, 3),
            ({"max_tokens": 3, "n_predict": 2}, 2),
            ({"n_predict": 0}, 0),
        )
        for more, n in asked:
            answer = http.post("/completion", json={"prompt": [1]} | more).json()
            assert answer["tokens_predicted"] == n and answer["stop_type"] == "limit"
        refused = http.post("/completion", json={"prompt": [1], "max_tokens": -2})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "max_tokens"


def test_properties_and_slots_are_in_llama_cpps_words(server):
    with server.http() as http:
        props = http.get("/props").json()
        assert props["total_slots"] == 8 and "{% for message" in props["chat_template"]
        assert props["default_generation_settings"]["n_ctx"] == 512
        slots = http.get("/slots").json()
        assert [s["id"] for s in slots] == list(range(8))
        assert not any(s["is_processing"] for s in slots)
