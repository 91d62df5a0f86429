"""The `openai` package, pointed at the server."""

from __future__ import annotations

import itertools
from typing import Any

import openai
import pytest

from tests.server.fake_worker import FakeWorker
from tests.server.live import USER, live
from workbench.engine.slots.asks import REASONS, foremost
from workbench.model.sampler import Sampling
from workbench.server.text import TokenTexts

WAITS = "the engine waits for the end"


def of_script(texts: TokenTexts, tokens: list[int], **body: Any) -> tuple[Any, list[Any]]:
    """An answer that is made of these tokens, whole and streamed."""
    asked = {"prompt": "a", "max_tokens": len(tokens)} | body
    with live(texts, FakeWorker(texts.tokenizer.n_vocab, script=tokens)) as server:
        return server.complete(**asked).choices[0], server.complete(**asked, stream=True)


def said(chunks: list[Any]) -> str:
    return "".join(c.choices[0].text for c in chunks if c.choices)


def test_a_completion_has_the_engines_tokens(server, texts):
    made = server.complete(prompt=[5, 6, 100], max_tokens=7)
    (choice,) = made.choices
    assert choice.text == texts.text(range(101, 108)) and choice.finish_reason == "length"
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (3, 7)
    assert made.model == "tiny" and made.object == "text_completion"
    assert made.timings["predicted_n"] == 7 and made.timings["prompt_n"] == 3


@pytest.mark.parametrize("usage", [False, True])
def test_a_stream_has_one_event_for_each_token(server, texts, usage):
    options = {"stream_options": {"include_usage": True}} if usage else {}
    chunks = server.complete(prompt=[100], max_tokens=40, stream=True, **options)
    assert said(chunks) == texts.text(range(101, 141)) and len(chunks) == 40 + 1 + usage
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert reasons == [None] * 40 + ["length"] and all(c.usage is None for c in chunks[:-1])
    assert not usage or (chunks[-1].usage.completion_tokens == 40 and not chunks[-1].choices)
    assert (chunks[-1].timings["prompt_n"], chunks[-1].timings["predicted_n"]) == (1, 40)


def test_a_chat_is_prompted_by_the_template(server, texts):
    create = server.client().chat.completions.create
    messages = [{"role": "user", "content": "The engine waits"}]
    made = create(model="tiny", messages=messages, max_completion_tokens=5)
    ask = server.worker.asked[-1]
    assert texts.tokenizer.decode(ask.tokens.tolist()) == "<user>The engine waits\n<assistant>"
    assert ask.tokens[0] == texts.tokenizer.bos_id and ask.tokens[1] != ask.tokens[0]
    assert made.choices[0].message.role == "assistant"
    last = int(ask.tokens[-1])
    answer = texts.text([(last + i) % texts.tokenizer.n_vocab for i in range(1, 6)])
    assert made.choices[0].message.content == answer
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
    rate = 8 / timings["predicted_ms"] * 1e3
    assert timings["predicted_per_second"] == pytest.approx(rate)


def test_logprobs_are_in_openais_form(server):
    logprobs = server.complete(prompt=[100], max_tokens=4, logprobs=2).choices[0].logprobs
    assert logprobs.token_logprobs == [-0.5] * 4
    assert len(logprobs.tokens) == len(logprobs.top_logprobs) == len(logprobs.text_offset) == 4
    chat = server.client().chat.completions.create(
        model="tiny", messages=USER, max_tokens=4, logprobs=True, top_logprobs=3
    )
    content = chat.choices[0].logprobs.content
    assert len(content) == 4 and all(len(c.top_logprobs) == 3 for c in content)
    assert bytes(content[0].bytes).decode("utf-8", "replace") == content[0].token


@pytest.mark.parametrize("stop", [None, "aits f", "ends", " 🙂 w", "\ufffd"])
def test_streamed_logprobs_are_those_of_the_whole(texts, stop):
    """Also of a character that nobody goes on with, and of a token without text behind it."""
    first, rest = "the engine 🙂", " waits for the end"
    tokens = texts.tokenizer.encode(first, False)[:-1] + [texts.tokenizer.eos_id]
    tokens += texts.tokenizer.encode(rest, False)
    more = {"max_tokens": len(tokens), "stop": stop, "extra_body": {"ignore_eos": True}}
    with live(texts, FakeWorker(texts.tokenizer.n_vocab, script=tokens)) as server:
        create, ask = server.client().chat.completions.create, more | {"model": "tiny"}
        ask |= {"messages": USER, "logprobs": True, "top_logprobs": 2}
        (made,), heard = create(**ask).choices, list(create(**ask, stream=True))
    content = [c for e in heard if e.choices[0].logprobs for c in e.choices[0].logprobs.content]
    assert content == made.logprobs.content and content
    said, text = texts.text(tokens), "".join(e.choices[0].delta.content or "" for e in heard)
    assert text == made.message.content == (said.partition(stop)[0] if stop else said)
    # an event for each token, also where its text is held back
    assert (stop or "none") in said or len(heard) == 1 + len(tokens) + 1


def test_characters_of_several_tokens_are_never_broken(texts):
    text = "Brücke ↔ 橋 🙂"
    tokens = texts.tokenizer.encode(text, add_bos=False)
    _, chunks = of_script(texts, tokens)
    parts = [c.choices[0].text for c in chunks]
    assert "".join(parts) == text and len(parts) == len(tokens) + 1 > len(text)
    assert not any("\ufffd" in part for part in parts)
    whole, chunks = of_script(texts, tokens[:-1])  # but half a one at the end
    assert whole.text == said(chunks) == text[:-1] + "\ufffd"


def test_what_a_request_says_reaches_the_engine(server, texts):
    more = {"top_k": 3, "min_p": 0.05, "ignore_eos": True, "timeout": 50}
    server.complete(prompt=[9], max_tokens=2, temperature=0.25, top_p=0.5, seed=11, extra_body=more)
    ask = server.worker.asked[-1]
    assert ask.sampling == Sampling(0.25, 3, 0.5, 0.05)
    assert (ask.seed, ask.max_tokens, ask.ends, ask.timeout_s) == (11, 2, frozenset(), 50.0)
    server.complete(prompt=[9], max_tokens=2)
    assert server.worker.asked[-1].ends == texts.tokenizer.eog_ids


# how an answer ends -------------------------------------------------------------------------------


def test_one_rule_orders_all_reasons():
    told = ("stop_text", "stop", "cancelled", "timeout", "length")
    assert [reason for reason in REASONS if reason in told] == list(told)
    for first, second in itertools.combinations(told, 2):
        assert foremost([second, first]) == foremost([first, second]) == first


def test_an_end_token_ends_with_stop_and_is_no_text(texts):
    tokens = [*texts.tokenizer.encode("engine", add_bos=False), texts.tokenizer.eos_id]
    whole, chunks = of_script(texts, tokens, max_tokens=50)
    assert (whole.text, whole.finish_reason) == ("engine", "stop") and said(chunks) == "engine"


@pytest.mark.parametrize("n_behind", [0, 1, 2, 150])
def test_a_stop_text_ends_the_request_in_the_engine(texts, n_behind):
    """Unless that has ended by itself before it hears of the stop text."""
    tokens = texts.tokenizer.encode(WAITS, add_bos=False)
    n_found = next(n for n in range(len(tokens)) if "aits f" in texts.text(tokens[:n]))
    ask = {"prompt": "a", "max_tokens": n_found + n_behind, "stop": ["aits f", "zzz"]}
    worker = FakeWorker(texts.tokenizer.n_vocab, script=tokens, step_s=0.002)
    with live(texts, worker) as server:
        chunks = server.complete(**ask, stream=True)
        (whole,) = server.complete(**ask).choices
    assert said(chunks) == whole.text == "the engine w"
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason == "stop"
    assert n_behind < 100 or worker.cancelled == [ask.number for ask in worker.asked]


def test_a_stop_text_of_half_a_character_is_found(texts):
    tokens = texts.tokenizer.encode("a🙂", add_bos=False)[:-1]
    whole, chunks = of_script(texts, tokens, stop="\ufffd")
    assert (whole.text, whole.finish_reason) == ("a", "stop") and said(chunks) == "a"


def test_a_time_limit_ends_a_request_with_what_it_has(texts):
    worker = FakeWorker(texts.tokenizer.n_vocab, step_s=0.01)
    with live(texts, worker) as server:
        made = server.complete(prompt=[1], max_tokens=400, extra_body={"timeout": 0.05})
    assert made.choices[0].finish_reason == "timeout"
    assert 0 < made.usage.completion_tokens < 400


# what is wrong ------------------------------------------------------------------------------------


def test_models_are_listed(server):
    models = server.client().models
    assert [m.id for m in models.list()] == ["tiny"]
    assert models.retrieve("tiny").owned_by == "workbench"
    with pytest.raises(openai.NotFoundError, match="not served here"):
        models.retrieve("other")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"model": "other"}, "model"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"prompt": [5] * 512}, "512 tokens.*context has 512"),
        ({"temperature": -1}, "temperature"),
        ({"extra_body": {"min_p": 1.5}}, "min_p"),
        ({"n": 129}, "n must be"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"prompt": [10**6]}, "vocabulary"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
    ],
    ids=str,
)
def test_errors_name_the_field(server, wrong, words):
    kind = openai.NotFoundError if "model" in wrong else openai.BadRequestError
    with pytest.raises(kind, match=words) as caught:
        server.client().completions.create(**{"model": "tiny", "prompt": "a"} | wrong)
    assert caught.value.param == next(iter(wrong.get("extra_body", wrong)))
    assert caught.value.body["message"]
    assert (caught.value.code == "context_length_exceeded") == ("512" in words)
