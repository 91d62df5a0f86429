"""Text of tokens, and stop texts: each fast way against a slow one."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.profiles import examples
from workbench.model.tokenizer.tokenizer import StreamDecoder
from workbench.server.api.fields import COMPLETIONS
from workbench.server.api.forms import Completions
from workbench.server.api.reading import Defaults, Prompt, wanted_of
from workbench.server.reply import Reply
from workbench.server.text import StopSearch, TokenTexts
from workbench.server.wire.messages import Ended, Logprobs, Timings


@pytest.mark.parametrize("which", ["texts", "spm_texts"])
@given(data=st.data())
@settings(max_examples=examples(400))
def test_text_is_that_of_the_stream_decoder(request, which, data):
    texts = request.getfixturevalue(which)
    n_vocab = texts.tokenizer.n_vocab
    some = st.integers(0, n_vocab - 1) | st.sampled_from([0, 1, 2, n_vocab - 1])
    tokens = data.draw(st.lists(some, max_size=30))
    slow, fast = StreamDecoder(texts.tokenizer), texts.decoder()
    wanted = [slow.feed(t) for t in tokens] + [slow.flush()]
    assert [fast.feed(t) for t in tokens] + [fast.flush()] == wanted
    assert texts.text(tokens) == "".join(wanted)


STOPS = ["a", "ab", "\ufffd", "é", "b🙂"]


def some_tokens(texts: TokenTexts) -> st.SearchStrategy[int]:
    """Letters, bytes of longer characters, and tokens without text."""
    whole = texts.tokenizer.encode("ab é🙂b", add_bos=False)
    return st.sampled_from([*whole, *whole, texts.tokenizer.eos_id])


@given(data=st.data())
@settings(max_examples=examples(800))
def test_a_token_begins_where_its_first_byte_does(texts, data):
    tokens = data.draw(st.lists(some_tokens(texts), max_size=12))
    decoder, before = texts.measuring(), b""
    for token in tokens:
        decoder.feed(token)
        piece = texts.bytes[token]
        if piece:  # the slow twin: all bytes until then, as a text of their own
            wanted = len((before + piece[:1]).decode("utf-8", "replace")) - 1
            assert decoder.offsets[-1] == wanted
        before += piece
    assert len(decoder.offsets) == len(tokens) and decoder.offsets == sorted(decoder.offsets)


@given(data=st.data())
@settings(max_examples=examples(800))
def test_a_stream_has_the_logprobs_of_the_whole_answer(texts, data):
    runs = [texts.tokenizer.encode(stop, add_bos=False) for stop in STOPS]
    some = some_tokens(texts).map(lambda token: [token]) | st.sampled_from(runs)
    tokens = [token for run in data.draw(st.lists(some, max_size=9)) for token in run]
    stops = data.draw(st.lists(st.sampled_from(STOPS), max_size=2))
    body = {"logprobs": 1, "stop": stops}
    answers = []
    for stream in (False, True):
        cut: list[int] = []
        wanted = wanted_of(body | {"stream": stream}, COMPLETIONS, Defaults())
        form, prompt = Completions("tiny", texts, False), Prompt(np.array([5], np.int32), 16)
        reply = Reply(wanted, [prompt], form, texts, itertools.count(), cut.append, [])
        (part,) = reply.parts
        for token in tokens:
            if not cut:
                part.logprobs.append(Logprobs(-0.5, np.array([token]), np.array([-0.5])))
                part.take(token)
        part.end(Ended(0, "length", Timings(0, 1, 0, 0, len(tokens), 0, 0)))
        raw = reply.taken() if stream else b"data: " + form.whole(reply)
        events = [json.loads(line[6:]) for line in raw.split(b"\n\n") if line]
        told = [event["choices"][0] for event in events]
        known = [choice["logprobs"] for choice in told if choice["logprobs"]]
        lists = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        answers.append((
            "".join(choice["text"] for choice in told), told[-1]["finish_reason"],
            [[value for part in known for value in part[name]] for name in lists],
        ))  # fmt: skip
    assert answers[0] == answers[1]


@given(
    parts=st.lists(st.text("ab", max_size=4), max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
)
@settings(max_examples=examples(2000))
def test_a_stop_text_is_found_across_parts(parts, stops):
    search = StopSearch(stops)
    given_out, seen = "", ""
    for part in parts:
        given_out += search.feed(part)
        seen += part
        starts = [seen.find(stop) for stop in stops if stop in seen]
        assert bool(starts) == (search.found_at is not None)
        if starts:
            assert given_out == seen[: min(starts)] and search.found_at == len(given_out)
            assert search.feed("more") == ""
            return
        # nothing is held that could not become a stop text
        held = seen[len(given_out) :]
        assert not held or any(stop.startswith(held) for stop in stops)
    assert given_out + search.flush() == seen
