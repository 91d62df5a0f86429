"""`echo`: answers that begin with their prompt, and the logprobs of its tokens."""

from __future__ import annotations

import pytest

from tests.server.live import Live
from workbench.server.api.aside import LONG
from workbench.server.api.echo import Echo

TEXT = "the engine 🙂 waits"
LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def echoed(server: Live, **fields) -> dict:
    return server.post("/v1/completions", temperature=0, echo=True, **fields)


@pytest.mark.parametrize("n", [0, 3])
def test_an_answer_begins_with_the_text_of_its_prompt(server, texts, n):
    made = echoed(server, prompt=TEXT, max_tokens=n)
    last = texts.tokenizer.encode(TEXT)[-1]
    assert made["choices"][0]["text"] == TEXT + texts.text(range(last + 1, last + 1 + n))
    assert made["choices"][0]["finish_reason"] == "length"
    assert made["choices"][0]["logprobs"] is None and made["usage"]["completion_tokens"] == n
    assert not server.worker.asked[-1].scores_prompt  # nobody wants its logits
    chunks = server.complete(prompt=TEXT, max_tokens=n, echo=True, stream=True)
    assert "".join(c.choices[0].text for c in chunks) == made["choices"][0]["text"]
    assert chunks[0].choices[0].text == TEXT and len(chunks) == 1 + n + 1
    # a stop text is looked for in the answer alone; long bodies are read in another process
    (stopped,) = echoed(server, prompt=TEXT, max_tokens=n, stop="engine")["choices"]
    assert stopped["text"].startswith(TEXT) and stopped["finish_reason"] == "length"
    long = {"prompt": [TEXT, "a"], "max_tokens": 0, "no_field": "x" * LONG}
    assert [c["text"] for c in echoed(server, **long)["choices"]] == [TEXT, "a"]


@pytest.mark.parametrize("n", [0, 2])
@pytest.mark.parametrize("k", [0, 2])
def test_logprobs_are_of_prompt_and_answer(server, texts, n, k):
    ids = texts.tokenizer.encode(TEXT)
    asked = {"prompt": ids, "max_tokens": n, "logprobs": k}
    logprobs = echoed(server, **asked)["choices"][0]["logprobs"]
    assert {len(logprobs[name]) for name in LISTS} == {len(ids) + n}
    assert logprobs["token_logprobs"] == [None] + [-0.5] * (len(ids) + n - 1)
    assert logprobs["top_logprobs"][0] is None
    assert all(len(top) == max(k, 1) for top in logprobs["top_logprobs"][1:])
    assert TEXT.startswith("".join(logprobs["tokens"][1:4]))
    chunks = server.complete(**asked, echo=True, stream=True)
    parts = [c.choices[0].logprobs.to_dict() for c in chunks if c.choices[0].logprobs]
    for name in LISTS:
        assert [v for part in parts for v in part[name]] == logprobs[name]


@pytest.mark.parametrize("which", ["texts", "spm_texts"])
@pytest.mark.parametrize("text", [TEXT, " a  b", "é🙂", "x"])
def test_offsets_count_the_characters_before_a_token(request, which, text):
    """What the tokenizer adds to a text is none of it; ids say what they are."""
    texts = request.getfixturevalue(which)
    for add_bos in (None, False):
        ids = texts.tokenizer.encode(text, add_bos)
        echo = Echo(texts, ids, text, add_bos)
        assert echo.text == text and len(echo.offsets) == len(ids)
        assert echo.offsets[0] == echo.offsets[texts.tokenizer.n_added(add_bos)[0]] == 0
        assert echo.offsets == sorted(echo.offsets) and echo.offsets[-1] < len(text)
        of_ids = Echo(texts, ids, None)
        assert of_ids.text == texts.tokenizer.decode(ids, special=True)
        assert len(of_ids.offsets) == len(ids)


def test_half_a_character_of_a_prompt_is_a_character(texts):
    half = texts.tokenizer.encode("🙂", add_bos=False)[:2]
    echo = Echo(texts, [*half, *texts.tokenizer.encode("ab", False)], None)
    assert echo.text == "\ufffdab" and echo.offsets[: len(half) + 1] == [0] * len(half) + [1]


def test_a_prompt_without_a_bos_has_all_its_tokens(server, texts):
    asked = {"prompt": TEXT, "logprobs": 0, "max_tokens": 0}
    for add, n in ((True, 1), (False, 0)):
        (choice,) = echoed(server, **asked, add_special_tokens=add)["choices"]
        ids = texts.tokenizer.encode(TEXT, False)
        assert len(choice["logprobs"]["tokens"]) == n + len(ids) and choice["text"] == TEXT
        assert choice["logprobs"]["text_offset"][n:] == Echo(texts, ids, TEXT, False).offsets


def test_every_prompt_and_every_answer_has_its_own(server, texts):
    prompts = [[7, 8, 9], [100, 101], [5]]
    made = echoed(server, prompt=prompts, n=2, logprobs=1, max_tokens=1)
    for choice in made["choices"]:
        ids = prompts[choice["index"] // 2]
        assert choice["text"] == texts.text([*ids, ids[-1] + 1])
        assert choice["logprobs"]["token_logprobs"] == [None] + [-0.5] * len(ids)
        offsets = choice["logprobs"]["text_offset"]
        assert offsets == [len(texts.text(ids[:i])) for i in range(len(ids) + 1)]


def test_a_prompt_may_fill_the_context_without_an_answer(server):
    made = echoed(server, prompt=[5] * 512, logprobs=0, max_tokens=0)
    assert len(made["choices"][0]["logprobs"]["tokens"]) == 512
    with server.http() as http:
        one = {"prompt": [5] * 512, "max_tokens": 1}
        assert http.post("/v1/completions", json=one).status_code == 400
