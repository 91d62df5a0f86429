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
THINK = Path(__file__).with_name("think.jinja").read_text()
TOOLS = Path(__file__).with_name("tools.jinja").read_text()


async def prompt(template: ChatTemplate, body: dict[str, Any]) -> str:
    return text_of(b"".join(await template.rendered([template.values(body)])))


def rendered(texts, source, messages=USER, limit_s=10.0, **body) -> str:
    async def one() -> str:
        template = ChatTemplate(source, texts.tokenizer, limit_s)
        try:
            return await prompt(template, {"messages": messages} | body)
        finally:
            await template.close()

    return asyncio.run(one())


def here(source: str, **values: object) -> str:
    """Rendered in this process."""
    return answer(compiled(source), {"messages": USER} | values)["text"]


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("{{ messages[0].content }}", "a < b"),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "a < b"}'),
        ("{{ {'é': 1} | tojson(indent=1) }}", '{\n "é": 1\n}'),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% for m in messages %}\n  {% if true %}\nx\n  {% endif %}\n{% endfor %}", "x\n"),
        ("{% generation %}a{% endgeneration %}b", "ab"),
        ("{% set ns = namespace(n=1) %}{% set ns.n = 2 %}{{ ns.n }}", "2"),
        ("{{ ' a '.strip() ~ 'b'.upper() }}", "aB"),
    ],
)
def test_templates_have_what_hugging_faces_have(source, wanted):
    assert here(source) == wanted


def test_templates_know_the_date():
    assert re.fullmatch(r"20\d\d-\d\d", here("{{ strftime_now('%Y-%m') }}"))


def test_a_template_is_given_tokens_and_what_the_request_says(texts):
    source = (
        "{{ eos_token }}|{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
        "{{ add_generation_prompt }}{{ enable_thinking }}"
    )
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    text = rendered(
        texts, source,
        [{"role": "system", "content": parts}, {"role": "assistant", "content": None}],
        add_generation_prompt=False, chat_template_kwargs={"enable_thinking": 3},
    )  # fmt: skip
    eos = texts.tokenizer.piece(texts.tokenizer.eos_id, special=True).decode()
    assert text == f"{eos}|system:a\nb;assistant:;False3"


def test_a_bos_that_the_tokenizer_adds_is_left_out(texts):
    assert rendered(texts, "{{ bos_token }}a{{ bos_token }}").startswith("a<|")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ no.such }}", "undefined"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "nests too deeply"),
        ("{% set x = 'a' * 3000000000 %}{{ x }}", "too much memory"),
        ("{{ 'a' * 20000000 }}", "20000000 characters"),
        ("{% include 'file' %}", "no loader"),
    ],
)
def test_a_template_that_does_not_do_is_400_with_the_reason(texts, source, words):
    with pytest.raises(ApiError, match=words) as caught:
        rendered(texts, source)
    assert caught.value.status == 400 and caught.value.param == "messages"


def test_a_template_that_is_none_is_no_fault_of_the_messages(texts):
    with pytest.raises(
        ApiError, match=r"template is broken: Expected.*--chat-template-file"
    ) as found:
        rendered(texts, "{% for %}")
    assert found.value.status == 400 and found.value.param is None


def test_a_template_that_never_ends_is_ended(texts):
    forever = (
        "{% if messages[0].content == 'go' %}{% for i in range(99999) %}"
        "{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}done"
    )

    async def both() -> str:
        template = ChatTemplate(forever, texts.tokenizer, 0.5)
        await template.begin()
        with pytest.raises(ApiError, match="takes longer than"):
            await prompt(template, {"messages": [{"role": "user", "content": "go"}]})
        template._limit_s = 10.0
        try:
            return await prompt(template, {"messages": USER})
        finally:
            await template.close()

    assert asyncio.run(both()) == "done"


# what a request gives -----------------------------------------------------------------------------


def test_tools_and_documents_are_none_where_a_request_has_none(texts):
    seen = "{{ tools is none }} {{ documents is none }}"
    assert rendered(texts, seen) == "True True"
    assert rendered(texts, seen, tools=[], documents=None) == "True True"
    assert rendered(texts, seen, tools=[CALL], documents=[{"text": "t"}]) == "False False"
    assert rendered(texts, TOOLS) == "<user>a < b</user><assistant>"
    with_tools = rendered(texts, TOOLS, tools=[{"name": "f"}], add_generation_prompt=False)
    assert with_tools == '<tools>{"name": "f"}</tools><user>a < b</user>'


def test_every_field_of_a_message_reaches_the_template(texts):
    message = {
        "role": "assistant", "reasoning_content": "hm", "content": "a", "name": "bo",
        "tool_calls": [CALL], "tool_call_id": "7", "own": {"b": [None]},
    }  # fmt: skip
    assert json.loads(rendered(texts, "{{ messages[0] | tojson }}", [message])) == message
    assert list(json.loads(rendered(texts, "{{ messages[0] | tojson }}", [message]))) == [*message]
    said = rendered(texts, THINK, [message, {"role": "tool", "content": "3"}])
    assert "<|im_start|>assistant\n<think>hm</think>a<|im_end|>" in said
    assert said.endswith("<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n")


def test_no_template_is_chatml_as_in_llama_cpp(texts):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    wanted = "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n"
    assert rendered(texts, None, messages) == wanted + "<|im_start|>assistant\n"
    assert rendered(texts, None, messages, add_generation_prompt=False) == wanted


@pytest.mark.parametrize("trimmed", ["", " | trim"])
def test_the_last_message_can_be_left_open(texts, trimmed):
    source = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content" + trimmed + " }}<end>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    messages = [*USER, {"role": "assistant", "content": "It is "}]
    said = rendered(texts, source, messages, continue_final_message=True)
    assert said == "<user>a < b<end><assistant>It is" + ("" if trimmed else " ")
    messages[-1]["content"] = "e"  # stands behind the message, too
    said = rendered(texts, source, messages, continue_final_message=True)
    assert said == "<user>a < b<end><assistant>e"
    hidden = "{% for m in messages %}{{ m.role }}{% endfor %}"
    with pytest.raises(ApiError, match="does not show the last message") as caught:
        rendered(texts, hidden, messages, continue_final_message=True)
    assert caught.value.param == "continue_final_message"


def test_an_effort_reaches_a_template_that_knows_it(texts):
    source = "{{ reasoning_effort }}{{ messages[0].content }}"
    assert rendered(texts, source, reasoning_effort="high") == "higha < b"
    with pytest.raises(ApiError, match="reasoning_effort is not read by") as caught:
        rendered(texts, "a", reasoning_effort="high")
    assert caught.value.param == "reasoning_effort"


def test_without_special_tokens_the_templates_own_bos_is_the_only_one(texts):
    bos = texts.tokenizer.piece(texts.tokenizer.bos_id, special=True).decode()
    assert rendered(texts, "{{ bos_token }}a") == "a"  # the tokenizer adds it
    assert rendered(texts, "{{ bos_token }}a", add_special_tokens=False) == f"{bos}a"
