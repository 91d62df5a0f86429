"""The `openai` package, pointed at the server."""

from __future__ import annotations

import itertools

import openai
import pytest

from tests.serve.fake_worker import FakeWorker
from tests.serve.live import live
from workbench.model.sampler import Sampling


def test_a_completion_has_the_engines_tokens(server, texts):
    made = server.client().completions.create(model="tiny", prompt=[5, 6, 100], max_tokens=7)
    (choice,) = made.choices
    assert choice.text == texts.text(range(101, 108))
    assert choice.finish_reason == "length"
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (3, 7)
    assert made.model == "tiny" and made.object == "text_completion"
    assert made.timings["predicted_n"] == 7 and made.timings["prompt_n"] == made.usage.prompt_tokens


def test_a_stream_is_the_same_text_in_one_event_for_each_token(server, texts):
    stream = server.client().completions.create(
        model="tiny", prompt=[100], max_tokens=40, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    text = "".join(c.choices[0].text for c in chunks if c.choices)
    assert text == texts.text(range(101, 141))
    assert len(chunks) == 40 + 1 + 1
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * 40 + ["length"]
    assert chunks[-1].usage.completion_tokens == 40 and not chunks[-1].choices
    assert all(c.usage is None for c in chunks[:-1])
    assert chunks[-1].timings["prompt_n"] == 1


def test_a_stream_without_usage_has_timings_in_its_last_chunk(server):
    chunks = list(
        server.client().completions.create(model="tiny", prompt="a", max_tokens=2, stream=True)
    )
    assert len(chunks) == 3 and chunks[-1].timings["predicted_n"] == 2
    assert chunks[-1].choices[0].finish_reason == "length"


def test_a_chat_is_prompted_by_the_template(server, texts):
    messages = [{"role": "user", "content": "The engine waits"}]
    made = server.client().chat.completions.create(
        model="tiny", messages=messages, max_completion_tokens=5
    )
    ask = server.worker.asked[-1]
    said = texts.tokenizer.decode(ask.tokens.tolist())
    assert said == "<user>The engine waits\n<assistant>"
    assert ask.tokens[0] == texts.tokenizer.bos_id and ask.tokens[1] != ask.tokens[0]
    assert made.choices[0].message.role == "assistant"
    assert made.choices[0].message.content == texts.text(
        [(int(ask.tokens[-1]) + i) % texts.tokenizer.n_vocab for i in range(1, 6)]
    )


def test_a_chat_streams_its_role_once_for_each_choice(server):
    stream = server.client().chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "a"}], max_tokens=3, n=2, stream=True
    )
    chunks = list(stream)
    roles = [c.choices[0].index for c in chunks if c.choices[0].delta.role]
    assert sorted(roles) == [0, 1]
    for index in (0, 1):
        of = [c.choices[0] for c in chunks if c.choices[0].index == index]
        assert len(of) == 1 + 3 + 1 and of[-1].finish_reason == "length"


def test_timings_of_several_answers_are_of_all(server):
    for ask in ({"n": 3, "prompt": [7]}, {"prompt": [[1, 2], [3], [5, 6, 7]]}):
        made = server.client().completions.create(model="tiny", max_tokens=5, **ask)
        assert made.timings["predicted_n"] == 15
        assert made.timings["prompt_n"] == (3 if "n" in ask else 6)
        rate = 12 / made.timings["predicted_ms"] * 1e3
        assert made.timings["predicted_per_second"] == pytest.approx(rate)


def test_several_prompts_and_answers_come_in_order(server, texts):
    made = server.client().completions.create(
        model="tiny", prompt=[[10], [20, 30]], n=2, max_tokens=3, seed=7
    )
    assert [c.index for c in made.choices] == [0, 1, 2, 3]
    wanted = [texts.text([t + 1, t + 2, t + 3]) for t in (10, 10, 30, 30)]
    assert [c.text for c in made.choices] == wanted
    assert [ask.seed for ask in server.worker.asked[-4:]] == [7, 8, 7, 8]
    assert made.usage.prompt_tokens == 3 and made.usage.completion_tokens == 12


def test_logprobs_are_in_openais_form(server, texts):
    made = server.client().completions.create(
        model="tiny", prompt=[100], max_tokens=4, logprobs=2, temperature=0
    )
    logprobs = made.choices[0].logprobs
    assert logprobs.token_logprobs == [-0.5] * 4
    assert len(logprobs.tokens) == len(logprobs.top_logprobs) == len(logprobs.text_offset) == 4
    assert logprobs.text_offset[0] == 0
    chat = server.client().chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "a"}], max_tokens=4, logprobs=True,
        top_logprobs=3,
    )  # fmt: skip
    content = chat.choices[0].logprobs.content
    assert len(content) == 4 and all(len(c.top_logprobs) == 3 for c in content)
    assert bytes(content[0].bytes).decode("utf-8", "replace") == content[0].token


@pytest.mark.parametrize(
    "stop", [None, "aits f", "ends", "zz", "or the e", "d", "🙂", " 🙂 w", "\ufffd"]
)
@pytest.mark.parametrize("half", [False, True])
def test_streamed_logprobs_are_those_of_the_whole_answer(texts, stop, half):
    """Offsets of a stream are counted as tokens come, those of a whole answer at its end."""
    parts = ("the engine 🙂", " waits for the end")
    tokens = [token for part in parts for token in texts.tokenizer.encode(part, add_bos=False)]
    if half:  # of a character that nobody goes on with, and a token without text behind it
        at = len(texts.tokenizer.encode(parts[0], add_bos=False))
        tokens[at - 1 : at] = [texts.tokenizer.eos_id]
    said = texts.text(tokens)
    ask = {
        "model": "tiny", "max_tokens": len(tokens), "stop": stop, "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    worker = FakeWorker(texts.tokenizer.n_vocab, script=tokens, step_s=0.001)
    with live(texts, worker) as server:
        create = server.client().completions.create
        whole = create(prompt="a", logprobs=2, **ask).choices[0].logprobs.to_dict()
        chunks = list(create(prompt="a", logprobs=2, stream=True, **ask))
        parts = [c.choices[0].logprobs.to_dict() for c in chunks if c.choices[0].logprobs]
        chat = server.client().chat.completions.create
        messages = [{"role": "user", "content": "a"}]
        made = chat(messages=messages, logprobs=True, top_logprobs=2, **ask).choices[0].logprobs
        heard = list(chat(messages=messages, logprobs=True, top_logprobs=2, stream=True, **ask))
    n = len(whole["tokens"])
    found = stop is not None and stop in said
    assert 0 < n <= len(tokens) if found else n == len(tokens)
    for name, values in whole.items():
        assert [v for part in parts for v in part[name]] == values
    assert whole["text_offset"][0] == 0 and len(set(whole["text_offset"])) > 3
    content = [c for e in heard if e.choices[0].logprobs for c in e.choices[0].logprobs.content]
    assert content == made.content and made.content
    # an event for each token, also where its text is held back
    assert len(chunks) == len(tokens) + 1 or found


def test_a_token_begins_where_the_character_of_its_first_byte_does(texts):
    """Half a character that nothing goes on with is flushed, and is a character."""
    smile, a = texts.tokenizer.encode("🙂", add_bos=False), texts.tokenizer.encode("a", False)
    assert len(smile) > 2 and len(a) == 1
    tokens = [*smile, *a, *smile[:2], *a, smile[0], *smile, *a]
    n = len(smile)
    wanted = [0] * n + [1] + [2, 2] + [3] + [4] + [5] * n + [6]
    worker = FakeWorker(texts.tokenizer.n_vocab, script=tokens)
    with live(texts, worker) as server:
        create = server.client().completions.create
        whole = create(model="tiny", prompt="a", max_tokens=len(tokens), logprobs=0).choices[0]
        chunks = list(
            create(model="tiny", prompt="a", max_tokens=len(tokens), logprobs=0, stream=True)
        )
    assert whole.text == "🙂a\ufffda\ufffd🙂a" and whole.logprobs.text_offset == wanted
    streamed = [c.choices[0].logprobs for c in chunks if c.choices[0].logprobs]
    assert [offset for part in streamed for offset in part.text_offset] == wanted


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_text_ends_the_request_in_the_engine(texts, stream):
    tokens = texts.tokenizer.encode("the engine waits for the end", add_bos=False)
    worker = FakeWorker(texts.tokenizer.n_vocab, script=tokens, step_s=0.002)
    with live(texts, worker) as server:
        made = server.client().completions.create(
            model="tiny", prompt="a", max_tokens=200, stop=["aits f", "zzz"], stream=stream
        )
        if stream:
            chunks = list(made)
            text = "".join(c.choices[0].text for c in chunks)
            reason = chunks[-1].choices[0].finish_reason
        else:
            text, reason = made.choices[0].text, made.choices[0].finish_reason
        assert (text, reason) == ("the engine w", "stop")
        assert worker.cancelled == [worker.asked[0].number]


def test_what_a_request_says_reaches_the_engine(server, texts):
    client = server.client()
    client.completions.create(
        model="tiny", prompt=[9], max_tokens=2, temperature=0.25, top_p=0.5, seed=11,
        extra_body={"top_k": 3, "min_p": 0.05, "ignore_eos": True, "timeout": 50},
    )  # fmt: skip
    ask = server.worker.asked[-1]
    assert ask.sampling == Sampling(0.25, 3, 0.5, 0.05)
    assert (ask.seed, ask.max_tokens, ask.ends, ask.timeout_s) == (11, 2, frozenset(), 50.0)
    client.completions.create(model="tiny", prompt=[9], max_tokens=2)
    assert server.worker.asked[-1].ends == texts.tokenizer.eog_ids


def test_an_end_token_ends_with_stop_and_is_no_text(texts):
    tokens = [*texts.tokenizer.encode("engine", add_bos=False), texts.tokenizer.eos_id]
    with live(texts, FakeWorker(texts.tokenizer.n_vocab, script=tokens)) as server:
        made = server.client().completions.create(model="tiny", prompt="a", max_tokens=50)
        assert (made.choices[0].text, made.choices[0].finish_reason) == ("engine", "stop")
        assert made.usage.completion_tokens == len(tokens) - 1


def test_characters_of_several_tokens_are_never_broken(texts):
    text = "Brücke ↔ 橋 🙂 end"
    tokens = texts.tokenizer.encode(text, add_bos=False)
    assert len(tokens) > len(text)
    with live(texts, FakeWorker(texts.tokenizer.n_vocab, script=tokens)) as server:
        chunks = list(
            server.client().completions.create(
                model="tiny", prompt="a", max_tokens=len(tokens), stream=True
            )
        )
    parts = [c.choices[0].text for c in chunks]
    assert "".join(parts) == text and len(parts) == len(tokens) + 1
    assert not any("�" in part for part in parts)


def test_half_a_character_at_the_end_is_a_replacement_character(texts):
    tokens = texts.tokenizer.encode("🙂", add_bos=False)[:-1]
    with live(texts, FakeWorker(texts.tokenizer.n_vocab, script=tokens)) as server:
        client = server.client()
        whole = client.completions.create(model="tiny", prompt="a", max_tokens=len(tokens))
        parts = client.completions.create(
            model="tiny", prompt="a", max_tokens=len(tokens), stream=True
        )
        assert whole.choices[0].text == "".join(c.choices[0].text for c in parts) == "�"


def test_models_are_listed(server):
    client = server.client()
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "workbench"
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.models.retrieve("other")


@pytest.mark.parametrize(
    ("wrong", "kind", "param"),
    [
        ({"model": "other"}, openai.NotFoundError, "model"),
        ({"max_tokens": -2}, openai.BadRequestError, "max_tokens"),
        ({"max_tokens": 10_000}, openai.BadRequestError, "prompt"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"echo": 1}, openai.BadRequestError, "echo"),
        ({"extra_body": {"min_p": 1.5}}, openai.BadRequestError, "min_p"),
        ({"best_of": 2}, openai.BadRequestError, "best_of"),
        ({"n": 129}, openai.BadRequestError, "n"),
        ({"stop": ["a"] * 17}, openai.BadRequestError, "stop"),
        ({"logit_bias": {"5": 1}}, openai.BadRequestError, "logit_bias"),
        ({"prompt": [10**6]}, openai.BadRequestError, "prompt"),
        ({"prompt": [-1]}, openai.BadRequestError, "prompt"),
        ({"presence_penalty": 0.5}, openai.BadRequestError, "presence_penalty"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else None,
)
def test_errors_name_the_field(server, wrong, kind, param):
    given = {"model": "tiny", "prompt": "a", "max_tokens": 4} | wrong
    with pytest.raises(kind) as caught:
        server.client().completions.create(**given)
    assert caught.value.param == param and caught.value.body["message"]


def test_too_long_a_prompt_says_how_many_tokens(server):
    with pytest.raises(openai.BadRequestError, match=r"512 tokens.*context has 512") as caught:
        server.client().completions.create(model="tiny", prompt=[5] * 512, max_tokens=1)
    assert caught.value.code == "context_length_exceeded"


def test_chats_say_what_is_not_supported(server):
    for extra, words in (
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "given form"),
        ({"top_logprobs": 3}, "logprobs=true"),
    ):
        with pytest.raises(openai.BadRequestError, match=words):
            server.client().chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "a"}], extra_body=extra
            )


def test_many_at_once_are_all_answered(texts):
    worker = FakeWorker(texts.tokenizer.n_vocab, n_slots=3, n_waiting=1000)
    with live(texts, worker) as server:
        made = server.client().completions.create(
            model="tiny", prompt=[[i] for i in range(100)], max_tokens=5
        )
        assert [c.text for c in made.choices] == [
            texts.text(range(i + 1, i + 6)) for i in range(100)
        ]


def test_a_full_engine_is_503_with_a_time_to_come_again(texts):
    worker = FakeWorker(texts.tokenizer.n_vocab, n_slots=1, n_waiting=0)
    with live(texts, worker) as server, pytest.raises(openai.InternalServerError) as caught:
        server.client().completions.create(model="tiny", prompt=[1], max_tokens=3)
    assert caught.value.status_code == 503
    assert caught.value.response.headers["retry-after"] == "2"


def test_a_failed_step_is_an_error_of_the_server(texts):
    numbers = itertools.count()
    worker = FakeWorker(texts.tokenizer.n_vocab, fails=lambda ask: next(numbers) == 0)
    with live(texts, worker) as server:
        with pytest.raises(openai.InternalServerError, match="told to"):
            server.client().completions.create(model="tiny", prompt=[1], max_tokens=3)
        assert server.client().completions.create(model="tiny", prompt=[1], max_tokens=3).choices


def test_a_time_limit_ends_a_request_with_what_it_has(texts):
    worker = FakeWorker(texts.tokenizer.n_vocab, step_s=0.01)
    with live(texts, worker) as server:
        made = server.client().completions.create(
            model="tiny", prompt=[1], max_tokens=400, extra_body={"timeout": 0.05}
        )
    assert made.choices[0].finish_reason == "timeout"
    assert 0 < made.usage.completion_tokens < 400
