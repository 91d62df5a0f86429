"""Why an answer ended, where several reasons hold: one rule."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.serve.fake_worker import FakeWorker
from tests.serve.live import live
from workbench.engine.slots.asks import REASONS, Ended, Timings, foremost
from workbench.server.api.fields import COMPLETIONS
from workbench.server.api.forms import Completions
from workbench.server.api.reading import Defaults, Prompt, wanted_of
from workbench.server.reply import Reply

TEXT = "the engine waits for the end"


def test_one_rule_orders_all_reasons():
    told = ("stop_text", "stop", "cancelled", "timeout", "length")
    assert [reason for reason in REASONS if reason in told] == list(told)
    for first, second in itertools.combinations(told, 2):
        assert foremost([second, first]) == foremost([first, second]) == first


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n_behind", range(3))
def test_a_stop_text_in_the_last_tokens_of_the_budget_is_stop(texts, stream, n_behind):
    """The engine has ended by itself before it hears of the stop text."""
    tokens = texts.tokenizer.encode(TEXT, add_bos=False)
    n_found = next(n for n in range(len(tokens)) if "aits f" in texts.text(tokens[:n]))
    with live(texts, FakeWorker(texts.tokenizer.n_vocab, script=tokens)) as server:
        made = server.client().completions.create(
            model="tiny", prompt="a", max_tokens=n_found + n_behind, stop="aits f", stream=stream
        )
        chunks = list(made) if stream else [made]
    assert "".join(c.choices[0].text for c in chunks) == "the engine w"
    assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize("reason", [r for r in REASONS if r != "stop_text"])
@pytest.mark.parametrize("text", ["engine", "e"])
def test_a_stop_text_wins_over_all_that_the_engine_says(texts, reason, text):
    wanted = wanted_of({"stop": text}, COMPLETIONS, Defaults())
    form, prompt = Completions("tiny", texts, False), Prompt(np.array([5], np.int32), 9)
    reply = Reply(wanted, [prompt], form, texts, itertools.count(7), lambda number: None, [])
    (part,) = reply.parts
    for token in texts.tokenizer.encode("the engine", add_bos=False):
        part.take(token)
    part.end(Ended(7, reason, Timings(0, 1, 0, 0, 9, 0, 0)))
    assert part.reason == "stop" and part.text == "the engine".partition(text)[0]
    assert reply.error is None and reply.over


def test_a_stop_text_of_half_a_character_is_found_at_the_end(texts):
    tokens = texts.tokenizer.encode("a🙂", add_bos=False)[:-1]
    with live(texts, FakeWorker(texts.tokenizer.n_vocab, script=tokens)) as server:
        made = server.client().completions.create(
            model="tiny", prompt="a", max_tokens=len(tokens), stop="\ufffd"
        )
    assert (made.choices[0].text, made.choices[0].finish_reason) == ("a", "stop")


def test_llama_cpps_words_know_which_it_was(texts):
    tokens = texts.tokenizer.encode(TEXT, add_bos=False)
    worker = FakeWorker(texts.tokenizer.n_vocab, script=tokens)
    with live(texts, worker) as server, server.http() as http:
        body = {"prompt": "a", "n_predict": len(tokens), "stop": ["the end"]}
        made = http.post("/completion", json=body).json()
    assert (made["stop_type"], made["stopping_word"]) == ("word", "the end")
