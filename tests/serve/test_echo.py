"""`echo`: answers that begin with their prompt, and the logprobs of its tokens."""

from __future__ import annotations

import pytest

from tests.serve.live import Live, live
from workbench.server.api.aside import LONG
from workbench.server.api.echo import Echo
from workbench.server.wire.front import FrontSettings

TEXT = "the engine 🙂 waits"
LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def answer(server: Live, **fields) -> dict:
    with server.http() as http:
        made = http.post("/v1/completions", json={"temperature": 0} | fields)
    assert made.status_code == 200, made.text
    return made.json()


def streamed(server: Live, **fields) -> list:
    return list(server.client().completions.create(model="tiny", stream=True, **fields))


@pytest.mark.parametrize("n", [0, 3])
def test_an_answer_begins_with_the_text_of_its_prompt(server, texts, n):
    asked = {"prompt": TEXT, "echo": True, "max_tokens": n}
    made = answer(server, **asked)
    last = texts.tokenizer.encode(TEXT)[-1]
    assert made["choices"][0]["text"] == TEXT + texts.text(range(last + 1, last + 1 + n))
    assert made["choices"][0]["finish_reason"] == "length"
    assert made["choices"][0]["logprobs"] is None and made["usage"]["completion_tokens"] == n
    assert not server.worker.asked[-1].scores_prompt  # nobody wants its logits
    chunks = streamed(server, **asked)
    assert "".join(c.choices[0].text for c in chunks) == made["choices"][0]["text"]
    assert chunks[0].choices[0].text == TEXT and len(chunks) == 1 + n + 1


def test_a_prompt_that_is_read_in_another_process_is_echoed_too(server):
    body = {"prompt": [TEXT, "a"], "echo": True, "max_tokens": 0, "no_field": "x" * LONG}
    assert [c["text"] for c in answer(server, **body)["choices"]] == [TEXT, "a"]


@pytest.mark.parametrize("n", [0, 2])
@pytest.mark.parametrize("k", [0, 2])
def test_logprobs_are_of_prompt_and_answer(server, texts, n, k):
    ids = texts.tokenizer.encode(TEXT)
    asked = {"prompt": ids, "echo": True, "max_tokens": n, "logprobs": k, "temperature": 0}
    (choice,) = answer(server, **asked)["choices"]
    logprobs = choice["logprobs"]
    assert {len(logprobs[name]) for name in LISTS} == {len(ids) + n}
    assert logprobs["token_logprobs"] == [None] + [-0.5] * (len(ids) + n - 1)
    assert logprobs["top_logprobs"][0] is None
    assert all(len(top) == max(k, 1) for top in logprobs["top_logprobs"][1:])
    assert TEXT.startswith("".join(logprobs["tokens"][1:4]))
    chunks = streamed(server, **asked)
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
        assert echo.text == echo._decoded[0] == text and len(echo.offsets) == len(ids)
        assert echo.offsets[0] == echo.offsets[texts.tokenizer.n_added(add_bos)[0]] == 0
        assert echo.offsets == sorted(echo.offsets) and echo.offsets[-1] < len(text)
    of_ids = Echo(texts, ids, None)
    assert of_ids.text == texts.tokenizer.decode(ids, special=True)
    assert len(of_ids.offsets) == len(ids)


def test_half_a_character_of_a_prompt_is_a_character_before_the_next_token(texts):
    half, rest = (
        texts.tokenizer.encode("🙂", add_bos=False)[:2],
        texts.tokenizer.encode("ab", False),
    )
    echo = Echo(texts, [*half, *rest], None)
    assert echo.text == "\ufffdab" and echo.offsets[: len(half) + 1] == [0] * len(half) + [1]


def test_a_prompt_without_a_bos_has_all_its_tokens_in_the_lists(server, texts):
    asked = {"prompt": TEXT, "echo": True, "logprobs": 0, "max_tokens": 0}
    for add, n in ((True, 1), (False, 0)):
        (choice,) = answer(server, **asked, add_special_tokens=add)["choices"]
        ids = texts.tokenizer.encode(TEXT, False)
        assert len(choice["logprobs"]["tokens"]) == n + len(ids) and choice["text"] == TEXT
        assert choice["logprobs"]["text_offset"][n:] == Echo(texts, ids, TEXT, False).offsets


def test_every_prompt_and_every_answer_has_its_own(server, texts):
    prompts = [[7, 8, 9], [100, 101], [5]]
    made = answer(server, prompt=prompts, n=2, echo=True, logprobs=1, max_tokens=1)
    for choice in made["choices"]:
        ids = prompts[choice["index"] // 2]
        assert choice["text"] == texts.text([*ids, ids[-1] + 1])
        assert choice["logprobs"]["token_logprobs"] == [None] + [-0.5] * len(ids)
        offsets = choice["logprobs"]["text_offset"]
        assert offsets == [len(texts.text(ids[:i])) for i in range(len(ids) + 1)]


def test_a_prompt_may_fill_the_context_where_nothing_is_made(server):
    made = answer(server, prompt=[5] * 512, echo=True, logprobs=0, max_tokens=0)
    assert len(made["choices"][0]["logprobs"]["tokens"]) == 512
    with server.http() as http:
        one = {"prompt": [5] * 512, "max_tokens": 1}
        assert http.post("/v1/completions", json=one).status_code == 400


def test_a_stop_text_is_looked_for_in_the_answer_alone(server):
    (choice,) = answer(server, prompt=TEXT, echo=True, max_tokens=2, stop="engine")["choices"]
    assert choice["text"].startswith(TEXT) and choice["finish_reason"] == "length"


# what lm-eval 0.4.13 sends for `local-completions`, and how it reads the answer


def payload(prompt: list[list[int]]) -> dict:
    return {
        "model": "", "prompt": prompt, "temperature": 0, "max_tokens": 1, "logprobs": 1,
        "seed": 1234, "echo": True,
    }  # fmt: skip


def parsed(outputs: dict, ctxlens: list[int]) -> list[tuple[float, bool]]:
    """Loglikelihood of each continuation, and whether it is the greedy one."""
    found = []
    for choice, n in zip(
        sorted(outputs["choices"], key=lambda c: c["index"]), ctxlens, strict=True
    ):
        logprobs = choice["logprobs"]
        own, tops = logprobs["token_logprobs"][n:-1], logprobs["top_logprobs"][n:-1]
        greedy = all(a == max(top.values()) for a, top in zip(own, tops, strict=True))
        found.append((sum(own), greedy))
    return found


def test_lm_evals_requests_are_answered(texts):
    with live(texts, settings=FrontSettings("tiny")) as server:
        made = answer(server, **payload([[1, 2, 3, 4], [9, 10, 11]]))
    assert parsed(made, [2, 1]) == [(-1.0, True), (-1.0, True)]
