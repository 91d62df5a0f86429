"""Renders a chat template, in a process of its own (`child.py`).

A template comes with the model file, so it is not trusted. It runs in Jinja's sandbox, in a process
whose memory the system bounds and whose time the caller bounds. The process is set up with the
template. A question has the arguments of `answer`. The answer has `text` or `error`; `broken` says
that the template itself is invalid. All of them are JSON.
"""

from __future__ import annotations

import json
import resource
import secrets
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from workbench.server.child import Answer, cut, serve

MOST_BYTES = 1 << 30  # of memory, the interpreter's included
MOST_TEXT = 16 << 20  # characters of a prompt


class GenerationTag(Extension):
    """`{% generation %}` marks the text that training should learn. Here the tag has no effect."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without Jinja's escapes for HTML. Arguments are in Hugging Face's order."""
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def compiled(template: str) -> Callable[[dict[str, Any]], str]:
    """Compiles a template with the names that Hugging Face's templates expect. Raises
    TemplateError."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template).render


def answer(
    render: Callable[[dict[str, Any]], str],
    values: dict[str, Any],
    goes_on: bool = False,
    bos: str = "",
) -> dict[str, Any]:
    """The text, or the error. Whatever a template raises counts as the template's error.

    goes_on: the text ends with the last message, as with `continue_final_message` of Hugging Face's
        `apply_chat_template`; the answer is `unshown` where the text does not show that message.
    bos: left out at the start of the text.
    """
    last, mark = "", secrets.token_hex(16)
    if goes_on:
        *before, message = values["messages"]
        last = message["content"]
        values = values | {"messages": [*before, message | {"content": f"{last}{mark} "}]}
    try:
        text = render(values)
    except MemoryError:
        return {"error": "it takes too much memory"}
    except RecursionError:
        return {"error": "it nests too deeply"}
    except Exception as error:
        return {"error": f"{error or type(error).__name__}"}
    if len(text) > MOST_TEXT:
        return {"error": f"it makes {len(text)} characters; {MOST_TEXT} are the most"}
    if goes_on:
        text, found, after = text.rpartition(mark)
        if not found or last.strip() not in text:
            return {"error": "the last message is not shown as it is", "unshown": True}
        text = text if after.startswith(" ") else text.rstrip()  # else the template trims messages
    return {"text": text.removeprefix(bos)}


def main() -> None:
    serve(_begin)


def _begin(template: bytes) -> Answer:
    if sys.platform == "linux":  # macOS has no such bound
        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    failed: dict[str, Any] = {}
    try:
        render = compiled(json.loads(template))
    except (TemplateError, RecursionError, MemoryError) as error:
        failed = {"error": f"{error or type(error).__name__}", "broken": True}

    def answered(question: Sequence[bytes]) -> Sequence[bytes]:
        return cut(json.dumps(failed or answer(render, **json.loads(b"".join(question)))).encode())

    return answered
