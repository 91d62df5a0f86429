"""Chat templates: what they can do, and what happens to those that misbehave."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from workbench.server.api.faults import ApiError
from workbench.server.chat import ChatTemplate, text_of
from workbench.server.render import answer, compiled

USER = [{"role": "user", "content": "a < b"}]
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
THINK, TOOLS = (
    Path(__file__).with_name(f"{name}.jinja").read_text() for name in ("think", "tools")
)


async def prompt(template: ChatTemplate, **body: Any) -> str:
    return text_of(b"".join(await template.rendered([template.values(body)])))


def rendered(texts, source, messages=USER, **body) -> str:
    """In a process of the template."""

    async def one() -> str:
        template = ChatTemplate(source, texts.tokenizer, 10.0)
        try:
            return await prompt(template, messages=messages, **body)
        finally:
            await template.close()

    return asyncio.run(one())


def here(texts, source, messages=USER, **body) -> str:
    """The same in this process, which takes a fortieth of the time."""
    template = ChatTemplate(source, texts.tokenizer)
    asked = json.loads(template.values({"messages": messages} | body))
    return text_of(json.dumps(answer(compiled(template.source), **asked)).encode())


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "a < b"}'),
        ("{{ {'é': 1} | tojson(indent=1) }}", '{\n "é": 1\n}'),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% for m in messages %}\n  {% if true %}\nx\n  {% endif %}\n{% endfor %}", "x\n"),
        ("{% generation %}a{% endgeneration %}b", "ab"),
        ("{{ strftime_now('%Y-%m') }}", r"20\d\d-\d\d"),
        # what there is none of
        ("{{ tools is none }} {{ documents is none }}", "True True"),
        (TOOLS, "<user>a < b</user><assistant>"),
        (None, "<|im_start|>user\na < b<|im_end|>\n<|im_start|>assistant\n"),  # as in llama.cpp
    ],
)
def test_templates_have_what_hugging_faces_have(texts, source, wanted):
    said = here(texts, source, tools=[])
    assert said == wanted or re.fullmatch(wanted, said)


def test_a_template_is_given_tokens_and_what_is_said(texts):
    source = (
        "{{ eos_token }}|{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
        "{{ add_generation_prompt }}{{ enable_thinking }}"
    )
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "system", "content": parts}, {"role": "assistant", "content": None}]
    more = {"add_generation_prompt": False, "chat_template_kwargs": {"enable_thinking": 3}}
    eos = texts.tokenizer.piece(texts.tokenizer.eos_id, special=True).decode()
    wanted = f"{eos}|system:a\nb;assistant:;False3"
    assert rendered(texts, source, messages, **more) == wanted
    assert here(texts, source, messages, **more) == wanted


def test_every_field_of_a_message_reaches_the_template(texts):
    message = {
        "role": "assistant", "reasoning_content": "hm", "content": "a", "name": "bo",
        "tool_calls": [CALL], "tool_call_id": "7", "own": {"b": [None]},
    }  # fmt: skip
    found = json.loads(here(texts, "{{ messages[0] | tojson }}", [message]))
    assert found == message and list(found) == list(message)
    said = here(texts, THINK, [message, {"role": "tool", "content": "3"}])
    assert "<|im_start|>assistant\n<think>hm</think>a<|im_end|>" in said
    assert said.endswith("<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n")
    with_tools = here(texts, TOOLS, tools=[{"name": "f"}], add_generation_prompt=False)
    assert with_tools == '<tools>{"name": "f"}</tools><user>a < b</user>'


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ no.such }}", "undefined"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "nests too deeply"),
        ("{% set x = 'a' * 3000000000 %}{{ x }}", "too much memory"),
        ("{{ 'a' * 20000000 }}", "20000000 characters"),
        ("{% include 'file' %}", "no loader"),
        ("{% for %}", r"template is broken: Expected.*--chat-template-file"),
    ],
)
def test_a_template_that_does_not_do_is_400(texts, source, words):
    with pytest.raises(ApiError, match=words) as caught:
        rendered(texts, source)
    assert caught.value.status == 400
    assert caught.value.param == (None if "broken" in words else "messages")


def test_a_template_that_never_ends_is_ended(texts):
    forever = (
        "{% if messages[0].content == 'go' %}{% for i in range(99999) %}"
        "{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}done"
    )

    async def both() -> str:
        template = ChatTemplate(forever, texts.tokenizer, 0.2)
        await template.begin()
        with pytest.raises(ApiError, match="takes longer than"):
            await prompt(template, messages=[{"role": "user", "content": "go"}])
        template._limit_s = 10.0
        try:
            return await prompt(template, messages=USER)
        finally:
            await template.close()

    assert asyncio.run(both()) == "done"


@pytest.mark.parametrize(
    ("trimmed", "content", "shown"),
    [("", "It is ", "It is "), (" | trim", "It is ", "It is"), ("", "e", "e")],  # <end> has it, too
)
def test_the_last_message_can_be_left_open(texts, trimmed, content, shown):
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content" + trimmed + " }}<end>{% endfor %}"
    messages = [*USER, {"role": "assistant", "content": content}]
    said = here(texts, source, messages, continue_final_message=True)
    assert said == "<user>a < b<end><assistant>" + shown


def test_what_a_template_does_not_read_is_refused(texts):
    source = "{{ reasoning_effort }}{{ messages[0].content }}"
    assert here(texts, source, reasoning_effort="high") == "higha < b"
    for source, param, value, words in (
        ("a", "reasoning_effort", "high", "is not read by"),
        ("{{ messages[0].role }}", "continue_final_message", True, "not show the last message"),
    ):
        messages = [*USER, {"role": "assistant", "content": "x"}]
        with pytest.raises(ApiError, match=words) as caught:
            here(texts, source, messages, **{param: value})
        assert caught.value.param == param


def test_a_bos_that_the_tokenizer_adds_is_left_out(texts):
    bos = texts.tokenizer.piece(texts.tokenizer.bos_id, special=True).decode()
    source = "{{ bos_token }}a{{ bos_token }}"
    assert here(texts, source) == f"a{bos}"
    assert here(texts, source, add_special_tokens=False) == f"{bos}a{bos}"
