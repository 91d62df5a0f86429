"""The `openai` package, pointed at the server; and what benchmarks of others ask."""

from __future__ import annotations

import itertools
import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import openai
import pytest
import requests

from tests.profiles import share
from tests.server.live import USER, events_of, live
from workbench.engine.slots.asks import REASONS, foremost
from workbench.model.sampler import Sampling
from workbench.server.api.echo import Echo
from workbench.server.api.fields import CHAT, COMPLETIONS, NATIVE
from workbench.server.app import AT_ONCE


def said(chunks: list[Any]) -> str:
    return "".join(c.choices[0].text for c in chunks if c.choices)


@pytest.mark.parametrize("usage", [False, True])
def test_a_stream_has_one_event_for_each_token(server, texts, usage):
    options = {"include_usage": True, "continuous_usage_stats": True}
    options = {"stream_options": options} if usage else {}
    made = server.complete(prompt=[5, 6, 100], max_tokens=40)
    chunks = server.complete(prompt=[5, 6, 100], max_tokens=40, stream=True, **options)
    assert made.choices[0].text == said(chunks) == texts.text(range(101, 141))
    assert len(chunks) == 40 + 1 + usage and made.choices[0].finish_reason == "length"
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (3, 40)
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert reasons == [None] * 40 + ["length"] and all(c.usage is None for c in chunks[:-1])
    assert not usage or (chunks[-1].usage.completion_tokens == 40 and not chunks[-1].choices)
    for timings in (chunks[-1].timings, made.timings):
        assert (timings["prompt_n"], timings["predicted_n"]) == (3, 40)


def test_a_chat_is_prompted_by_the_template(server, texts):
    create = server.client().chat.completions.create
    messages = [{"role": "user", "content": "The engine waits"}]
    made = create(model="tiny", messages=messages, max_completion_tokens=5)
    ask = server.worker.asked[-1]
    assert texts.tokenizer.decode(ask.tokens.tolist()) == "<user>The engine waits\n<assistant>"
    assert ask.tokens[0] == texts.tokenizer.bos_id and ask.tokens[1] != ask.tokens[0]
    answer = texts.text((ask.tokens[-1] + np.arange(1, 6)) % texts.tokenizer.n_vocab)
    message = made.choices[0].message
    assert (message.role, message.content) == ("assistant", answer)
    # streamed, it has its role once for each choice, also where nothing is made
    for n in (3, 0):
        chunks = list(create(model="tiny", messages=USER, max_tokens=n, n=2, stream=True))
        for index in (0, 1):
            of = [c.choices[0] for c in chunks if c.choices[0].index == index]
            assert [c.delta.role for c in of] == ["assistant"] + [None] * (n + 1)
            assert of[-1].finish_reason == "length"


def test_several_prompts_and_answers_come_in_order(server, texts):
    made = server.complete(prompt=[[10], [20, 30]], n=2, max_tokens=3, seed=7)
    assert [c.index for c in made.choices] == [0, 1, 2, 3]
    wanted = [texts.text([t + 1, t + 2, t + 3]) for t in (10, 10, 30, 30)]
    assert [c.text for c in made.choices] == wanted
    assert [ask.seed for ask in server.worker.asked[-4:]] == [7, 8, 7, 8]
    assert made.usage.prompt_tokens == 3 and made.usage.completion_tokens == 12
    timings = made.timings  # of all answers
    assert (timings["predicted_n"], timings["prompt_n"]) == (12, 6)
    assert timings["predicted_per_second"] * timings["predicted_ms"] == pytest.approx(8e3)


@pytest.mark.parametrize("stop", share(["ends", None, "aits f", " 🙂 w", "\ufffd"], every=4))
def test_streamed_logprobs_are_those_of_the_whole(texts, stop):
    """Also of a character that nobody goes on with, and of a token without text behind it."""
    tokens = texts.tokenizer.encode("the engine 🙂", False)[:-1] + [texts.tokenizer.eos_id]
    tokens += texts.tokenizer.encode(" waits for the end", False)
    more = {"max_tokens": len(tokens), "stop": stop, "extra_body": {"ignore_eos": True}}
    native = {"prompt": [1], "n_predict": len(tokens), "n_probs": 2, "stop": stop,
              "ignore_eos": True}  # fmt: skip
    with live(texts, script=tokens) as server:
        create, ask = server.client().chat.completions.create, more | {"model": "tiny"}
        ask |= {"messages": USER, "logprobs": True, "top_logprobs": 2}
        (made,), heard = create(**ask).choices, list(create(**ask, stream=True))
        whole = server.post(NATIVE, **native)
        events = events_of(server.answer(NATIVE, native | {"stream": True}))
    parts = [k for e in events for k in e.get("completion_probabilities", [])]
    assert parts == whole["completion_probabilities"] and parts
    content = [c for e in heard if e.choices[0].logprobs for c in e.choices[0].logprobs.content]
    assert content == made.logprobs.content and len(content) == len(parts)
    assert all(len(c.top_logprobs) == 2 and c.logprob == -0.5 for c in content)
    text, told = texts.text(tokens), "".join(e.choices[0].delta.content or "" for e in heard)
    assert told == made.message.content == (text.partition(stop)[0] if stop else text)
    # an event for each token, also where its text is held back
    assert (stop or "none") in text or len(heard) == 1 + len(tokens) + 1


@pytest.mark.long
def test_what_a_request_says_reaches_the_engine(server, texts):
    more = {"top_k": 3, "min_p": 0.05, "ignore_eos": True, "timeout": 50}
    server.complete(prompt=[9], max_tokens=2, temperature=0.25, top_p=0.5, seed=11, extra_body=more)
    ask = server.worker.asked[-1]
    assert ask.sampling == Sampling(0.25, 3, 0.5, 0.05)
    assert (ask.seed, ask.max_tokens, ask.ends, ask.timeout_s) == (11, 2, frozenset(), 50.0)
    for route in (COMPLETIONS, CHAT, NATIVE):
        body = {"messages": USER} if route == CHAT else {"prompt": [5]}
        for more, field, wanted in (
            ({"stop_token_ids": [7, 9]}, "ends", texts.tokenizer.eog_ids | {7, 9}),
            ({"stop_token_ids": [7, 9], "ignore_eos": True}, "ends", {7, 9}),
            ({"cache_prompt": False}, "cache_prompt", False),
            ({"cache_prompt": None}, "cache_prompt", True),
            ({"max_completion_tokens": 4}, "max_tokens", 4),
            ({"max_completion_tokens": 4, "n_predict": 5}, "max_tokens", 5),
            ({"max_tokens": -1}, "max_tokens", None),
        ):
            server.post(route, **body | {"max_tokens": 3} | more)
            ask = server.worker.asked[-1]
            most = 512 - len(ask.tokens)
            assert getattr(ask, field) == (most if wanted is None else wanted), (route, more)
    for wanted in (True, False):
        server.post(NATIVE, prompt="engine", max_tokens=1, add_special_tokens=wanted)
        ids = [texts.tokenizer.bos_id] * wanted + texts.tokenizer.encode("engine", False)
        assert server.worker.asked[-1].tokens.tolist() == ids


def test_one_rule_orders_all_reasons():
    told = ("stop_text", "stop", "cancelled", "timeout", "length")
    assert [reason for reason in REASONS if reason in told] == list(told)
    for first, second in itertools.combinations(told, 2):
        assert foremost([second, first]) == foremost([first, second]) == first


def test_an_end_token_ends_with_stop_and_is_no_text(server, texts):
    asked = {"prompt": "a", "max_tokens": 50}
    tokens = [*texts.tokenizer.encode("engine", add_bos=False), texts.tokenizer.eos_id]
    with live(texts, script=tokens) as scripted:
        (whole,) = scripted.complete(**asked).choices
        assert (whole.text, whole.finish_reason) == ("engine", "stop")
        assert said(scripted.complete(**asked, stream=True)) == "engine"
    more = {"stop_token_ids": [104]}
    (choice,) = server.complete(prompt=[100], max_tokens=50, extra_body=more).choices
    assert (choice.text, choice.finish_reason) == (texts.text([101, 102, 103]), "stop")


@pytest.mark.parametrize("n_behind", [0, 1, 2, 100])
def test_a_stop_text_ends_the_request_in_the_engine(texts, n_behind):
    """Unless that has ended by itself before it hears of the stop text."""
    tokens = texts.tokenizer.encode("the engine waits for the end", add_bos=False)
    n_found = next(n for n in range(len(tokens)) if "aits f" in texts.text(tokens[:n]))
    ask = {"prompt": "a", "max_tokens": n_found + n_behind, "stop": ["aits f", "zzz"]}
    with live(texts, script=tokens, step_s=0.002) as server:
        chunks, made = server.complete(**ask, stream=True), server.complete(**ask)
    (whole,) = made.choices
    assert said(chunks) == whole.text == "the engine w"
    # tokens that come until it hears of it count for nothing
    assert made.usage.completion_tokens == n_found
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason == "stop"
    assert n_behind < 100 or server.worker.cancelled == [a.number for a in server.worker.asked]


def test_a_time_limit_ends_a_request_with_what_it_has(texts):
    with live(texts, step_s=0.01) as server:
        made = server.complete(prompt=[1], max_tokens=400, extra_body={"timeout": 0.05})
    assert made.choices[0].finish_reason == "timeout"
    assert 0 < made.usage.completion_tokens < 400


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"model": "other"}, "not served here"),
        ({"prompt": [5] * 512}, "512 tokens.*context has 512"),
        ({"extra_body": {"min_p": 1.5}}, "min_p"),
        ({"n": 129}, "n must be"),
        ({"prompt": [10**6]}, "vocabulary"),
    ],
    ids=str,
)
def test_errors_name_the_field(server, wrong, words):
    client = server.client()
    assert [m.id for m in client.models.list()] == [client.models.retrieve("tiny").id] == ["tiny"]
    kind = openai.NotFoundError if "model" in wrong else openai.BadRequestError
    with pytest.raises(kind, match=words) as caught:
        client.completions.create(**{"model": "tiny", "prompt": "a"} | wrong)
    assert caught.value.param == next(iter(wrong.get("extra_body", wrong)))
    assert (caught.value.code == "context_length_exceeded") == ("512" in words)


TEXT = "the engine 🙂 waits"
LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


@pytest.mark.parametrize("n", [0, 2])
@pytest.mark.parametrize("k", [None, 0, 2])
def test_an_echo_has_text_and_logprobs_of_its_prompt(server, texts, n, k):
    ids = texts.tokenizer.encode(TEXT)
    asked = {"prompt": TEXT, "max_tokens": n, "logprobs": k, "temperature": 0, "echo": True}
    made = server.post(COMPLETIONS, **asked)
    (choice,) = made["choices"]
    assert choice["text"] == TEXT + texts.text(range(ids[-1] + 1, ids[-1] + 1 + n))
    assert choice["finish_reason"] == "length" and made["usage"]["completion_tokens"] == n
    assert server.worker.asked[-1].scores_prompt == (k is not None)  # or nobody wants its logits
    chunks = server.complete(**asked, stream=True)
    assert said(chunks) == choice["text"] and len(chunks) == 1 + n + 1
    # a stop text is looked for in the answer alone
    (stopped,) = server.post(COMPLETIONS, **asked, stop="engine")["choices"]
    assert stopped["text"].startswith(TEXT) and stopped["finish_reason"] == "length"
    full = {"prompt": [5] * 512, "max_tokens": 0, "echo": True, "logprobs": k}  # has no room
    (found,) = server.post(COMPLETIONS, **full)["choices"]
    if (logprobs := choice["logprobs"]) is None:
        assert k is None is found["logprobs"]
        return
    assert len(found["logprobs"]["tokens"]) == 512
    assert {len(logprobs[name]) for name in LISTS} == {len(ids) + n}
    assert logprobs["token_logprobs"] == [None] + [-0.5] * (len(ids) + n - 1)
    assert all(len(top) == max(k, 1) for top in logprobs["top_logprobs"][1:])
    assert logprobs["text_offset"][: len(ids)] == Echo(texts, ids, TEXT).offsets
    parts = [c.choices[0].logprobs.to_dict() for c in chunks if c.choices[0].logprobs]
    for name in LISTS:
        assert [v for part in parts for v in part[name]] == logprobs[name]


@pytest.mark.parametrize("which", ["texts", "spm_texts"])
@pytest.mark.parametrize("text", [TEXT, " a  b", "é🙂", "x"])
def test_offsets_count_the_characters_before_a_token(request, which, text):
    """What the tokenizer adds to a text is none of it; ids say what they are. Half a character is
    one."""
    texts = request.getfixturevalue(which)
    for add_bos in (None, False):
        ids = texts.tokenizer.encode(text, add_bos)
        echo = Echo(texts, ids, text, add_bos)
        assert echo.text == text and len(echo.offsets) == len(ids)
        assert echo.offsets[0] == echo.offsets[texts.tokenizer.n_added(add_bos)[0]] == 0
        assert echo.offsets == sorted(echo.offsets) and echo.offsets[-1] < len(text)
        of_ids = Echo(texts, ids, None)
        assert of_ids.text == texts.tokenizer.decode(ids, special=True)
    half = texts.tokenizer.encode("🙂", add_bos=False)[:-2]
    echo = Echo(texts, [*half, *texts.tokenizer.encode("ab", False)], None)
    assert echo.text.lstrip(" ")[0] == "\ufffd" and echo.offsets[: len(half)] == [0] * len(half)


def counted(session: requests.Session, url: str, prompt: Any, n_predict: int, seed: int) -> int:
    """Tokens that llama.cpp's `scripts/server-bench.py` counts for a request, by its own library
    and in its words. It counts events, so one token must be one event. It leaves the last one out,
    and the one before where that has `timings`."""
    asked = {"prompt": prompt, "ignore_eos": True, "seed": seed, "max_tokens": n_predict}
    response = session.post(f"{url}/v1/completions", json=asked | {"stream": True}, stream=True)
    response.raise_for_status()
    lines = [line for line in response.iter_lines() if line.startswith(b"data: ")]
    n = len(lines) - 1
    return n - 1 if len(lines) > 1 and "timings" in json.loads(lines[-2][6:]) else n


def test_server_bench_counts_every_token(texts):
    most = texts.tokenizer.n_vocab - 1
    data: list[tuple[Any, int, int]] = [("What waits for what?", 9, 2)]
    for i in range(23):
        drawn = random.Random(3 * 1000 * i + 1)
        prompt = [drawn.randint(100, most) for _ in range(drawn.randint(1, 300))]
        data.append((prompt, drawn.randint(1, 60), -1 if i % 2 else 3000 * i + 2))
    with live(texts, n_ctx=4096, n_slots=4) as server, ThreadPoolExecutor(8) as pool:
        session = requests.Session()
        found = list(pool.map(lambda one: counted(session, server.url, *one), data))
        messages = [{"role": "user", "content": "a\n(A)", "stream": True}]
        text = server.post("/apply-template", messages=messages)["prompt"]
        told = server.post("/tokenize", content=text, add_special=True)["tokens"]
        assert told == texts.tokenizer.encode("<user>a\n(A)\n<assistant>")
    assert found == [n_predict for _, n_predict, _ in data]
    assert {seed for *_, seed in data if seed >= 0} < {ask.seed for ask in server.worker.asked}


def test_the_native_endpoint_streams_as_llama_cpp_does(server, texts):
    body = {"prompt": [100], "n_predict": 8, "cache_prompt": False}
    events = events_of(server.answer("/completion", body | {"stream": True}))
    text = texts.text(range(101, 109))
    assert "".join(e["content"] for e in events) == text
    assert [e["stop"] for e in events] == [False] * 8 + [True]
    assert [e["tokens"] for e in events[:-1]] == [[t] for t in range(101, 109)]
    assert events[-1]["stop_type"] == "limit" and events[-1]["tokens_predicted"] == 8
    assert events[-1]["timings"]["predicted_n"] == 8
    whole = server.post("/completions", **body, n_probs=2)
    assert whole["content"] == text and whole["stop"] and whole["stopping_word"] == ""
    known = whole["completion_probabilities"]
    assert [bytes(k["bytes"]) for k in known] == [texts.shown(t) for t in range(101, 109)]
    assert [k["id"] for k in known] == whole["tokens"] == list(range(101, 109))
    word = texts.text([104])
    cut = server.post("/completion", **body, stop=["no", word])
    assert (cut["stop_type"], cut["stopping_word"]) == ("word", word)
    assert cut["content"] == text.partition(word)[0]
    # more than fits is cut
    assert server.post("/completion", prompt=[1] * 510, n_predict=100)["tokens_predicted"] == 2


@pytest.mark.long
@pytest.mark.parametrize("pieces", [False, True])
def test_tokens_and_their_text_in_llama_cpps_words(server, texts, pieces):
    """Names of control tokens are text where asked; long lists come in parts."""
    name = texts.shown(texts.tokenizer.eos_id).decode()
    for asked, is_one in (({}, True), ({"parse_special": False}, False)):
        tokens = server.post("/tokenize", content=name, **asked)["tokens"]
        assert (tokens == [texts.tokenizer.eos_id]) == is_one
        assert server.post("/detokenize", tokens=tokens) == {"content": name}
    text = "the engine 🙂 ↔ waits " * 6000
    tokens = server.post("/tokenize", content=text, with_pieces=pieces)["tokens"]
    ids = [t["id"] for t in tokens] if pieces else tokens
    assert ids == texts.tokenizer.encode(text, False) and len(ids) > 3 * AT_ONCE
    assert server.post("/detokenize", tokens=ids) == {"content": text}


def test_what_a_server_is_in_llama_cpps_words(server):
    with server.http() as http:
        props, slots = http.get("/props").json(), http.get("/slots").json()
    assert props["total_slots"] == 8 and "{% for message" in props["chat_template"]
    assert props["default_generation_settings"]["n_ctx"] == 512
    assert [(s["id"], s["is_processing"]) for s in slots] == [(i, False) for i in range(8)]
