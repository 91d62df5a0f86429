"""Chat templates: what they can do, and what happens to those that misbehave."""

from __future__ import annotations

import asyncio
import re

import pytest

from workbench.serve.chat import ChatTemplate
from workbench.serve.faults import ApiError
from workbench.serve.render import answer, compiled

USER = [{"role": "user", "content": "a < b"}]


def rendered(texts, source, messages=USER, limit_s=10.0, **body) -> str:
    async def one() -> str:
        template = ChatTemplate(source, texts.tokenizer, limit_s)
        try:
            return await template.prompt({"messages": messages} | body)
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
        (None, "no chat template"),
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
            await template.prompt({"messages": [{"role": "user", "content": "go"}]})
        template._limit_s = 10.0
        try:
            return await template.prompt({"messages": USER})
        finally:
            await template.close()

    assert asyncio.run(both()) == "done"


def test_what_the_server_sets_a_request_cannot(texts):
    with pytest.raises(ApiError, match="cannot set bos_token"):
        rendered(texts, "a", chat_template_kwargs={"bos_token": "x"})
