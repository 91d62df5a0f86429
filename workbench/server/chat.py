"""Makes a prompt of messages, by the template of the model file (`render.py` runs the template)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from workbench.model.tokenizer.tokenizer import Tokenizer
from workbench.server.api.faults import ApiError, bad
from workbench.server.child import Child

KEY = "tokenizer.chat_template"
MOST_LINE = 128 << 20  # bytes of an answer
# llama.cpp's template for files without a template (common/chat.cpp: CHATML_TEMPLATE_SRC)
CHATML = """\
{%- for message in messages -%}
  {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
NO_TEMPLATE = (
    f"the model file has no chat template ({KEY}): chats are written in ChatML; give the server "
    "the model's own with --chat-template-file"
)


class ChatTemplate(Child):
    """A chat template, and the process that renders it. source: None for CHATML.

    A rendering has limit_s seconds. A rendering that takes longer is ended with its process, and
    the next rendering gets a new process.
    """

    def __init__(self, source: str | None, tokenizer: Tokenizer, limit_s: float = 5.0):
        self.source, self._limit_s = CHATML if source is None else source, limit_s
        super().__init__(
            "workbench.server.render", json.dumps(self.source).encode(), most=MOST_LINE
        )
        self._tokens = {
            name: "" if token is None else tokenizer.piece(token, special=True).decode()
            for name, token in (("bos_token", tokenizer.bos_id), ("eos_token", tokenizer.eos_id))
        }
        first = tokenizer.encode("")[:1]
        self._adds_bos = first == [tokenizer.bos_id] and bool(self._tokens["bos_token"])

    def values(self, body: dict[str, Any]) -> bytes:
        """The renderer's question for a checked body: a line of JSON. Raises ApiError (400) where
        the body sets a variable that the template does not read."""
        effort, goes_on = body.get("reasoning_effort"), bool(body.get("continue_final_message"))
        said = body.get("add_generation_prompt")
        given = dict(body.get("chat_template_kwargs") or {})
        if effort is not None:
            if "reasoning_effort" not in self.source:
                raise bad(
                    "reasoning_effort is not read by the chat template; leave it out",
                    "reasoning_effort",
                )
            given["reasoning_effort"] = effort
        values = given | {
            "messages": [_plain(message) for message in body["messages"]],
            "add_generation_prompt": not goes_on if said is None else said,
            "tools": body.get("tools") or None,
            "documents": body.get("documents") or None,
            **self._tokens,
        }
        keeps_bos = not self._adds_bos or body.get("add_special_tokens") is False
        bos = "" if keeps_bos else self._tokens["bos_token"]
        return json.dumps({"values": values, "goes_on": goes_on, "bos": bos}).encode()

    async def rendered(self, values: Sequence[bytes]) -> Sequence[bytes]:
        """The renderer's answer to `values`, both in parts: a line for `text_of`. Raises ApiError
        (400) where the renderer takes too long, or dies."""
        try:
            return await self.ask(values, self._limit_s)
        except TimeoutError:
            raise _failed(f"it takes longer than {self._limit_s:g} s") from None
        except (OSError, EOFError):
            raise _failed("its process died; it may take too much memory") from None


def text_of(line: bytes) -> str:
    """The prompt in the renderer's answer. Raises ApiError (400) for an error of the template."""
    answer = json.loads(line)
    if "broken" in answer:
        raise bad(
            f"the chat template is broken: {answer['error']}; give the server another one with "
            "--chat-template-file, or use /v1/completions"
        )
    if "unshown" in answer:
        raise bad(
            "the chat template does not show the last message as it is; ask for a whole answer",
            "continue_final_message",
        )
    if "error" in answer:
        raise _failed(answer["error"])
    return answer["text"]


def _failed(why: str) -> ApiError:
    return bad(f"the chat template refuses these messages: {why}", "messages")


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """A message with all of its fields. A list of texts becomes one text, as in llama.cpp, so a
    template always gets a text."""
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(part["text"] for part in content)
    return message | {"content": "" if content is None else content}
