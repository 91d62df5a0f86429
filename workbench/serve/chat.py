"""Messages to a prompt, by the template of the model file (`render.py` runs it)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Sequence
from typing import Any

from workbench.model.tokenizer import Tokenizer
from workbench.serve.faults import ApiError, bad

KEY = "tokenizer.chat_template"
MOST_LINE = 128 << 20  # bytes of an answer
# what a request's `chat_template_kwargs` cannot set
OURS = ("messages", "add_generation_prompt", "bos_token", "eos_token", "tools", "documents")


class ChatTemplate:
    """A chat template, and the process that renders it. source: None where the file has none.

    A rendering has limit_s seconds. One that takes longer is ended with its process, and the next
    one gets a new process.
    """

    def __init__(self, source: str | None, tokenizer: Tokenizer, limit_s: float = 5.0):
        self.source, self._limit_s = source, limit_s
        self._tokens = {
            name: "" if token is None else tokenizer.piece(token, special=True).decode()
            for name, token in (("bos_token", tokenizer.bos_id), ("eos_token", tokenizer.eos_id))
        }
        first = tokenizer.encode("")[:1]
        self._adds_bos = first == [tokenizer.bos_id] and bool(self._tokens["bos_token"])
        self._process: asyncio.subprocess.Process | None = None
        self._alone = asyncio.Lock()

    async def prompt(self, body: dict[str, Any]) -> str:
        """The prompt of a checked body with `messages`. A BOS at its start is left out where
        `Tokenizer.encode` puts one there. Raises ApiError (400) where the template cannot do it."""
        return self.text_of(await self.rendered([self.values(body)]))

    def values(self, body: dict[str, Any]) -> bytes:
        """What the template is given for a checked body, as JSON. Raises ApiError (400) where there
        is no template, or the body wants what a template cannot have."""
        if self.source is None:
            raise bad(
                f"the model file has no chat template ({KEY}); give the server one with "
                "--chat-template-file, or use /v1/completions",
                "messages",
            )
        given = body.get("chat_template_kwargs") or {}
        if wrong := next((name for name in given if name in OURS), None):
            raise bad(f"chat_template_kwargs cannot set {wrong}", "chat_template_kwargs")
        wanted = body.get("add_generation_prompt")
        values = given | {
            "messages": [_plain(message) for message in body["messages"]],
            "add_generation_prompt": True if wanted is None else wanted,
            **self._tokens,
        }
        return json.dumps(values).encode()

    def text_of(self, line: bytes) -> str:
        """The prompt, of what the renderer has said. Raises ApiError (400) for an error of it."""
        answer = json.loads(line)
        if "broken" in answer:
            raise bad(
                f"the chat template is broken: {answer['error']}; give the server another one with "
                "--chat-template-file, or use /v1/completions"
            )
        if "error" in answer:
            raise self._failed(answer["error"])
        text: str = answer["text"]
        return text.removeprefix(self._tokens["bos_token"]) if self._adds_bos else text

    async def begin(self) -> None:
        """Starts the process, so that the first request need not wait for it."""
        if self.source is not None and self._process is None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "workbench.serve.render",
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=MOST_LINE,
            )  # fmt: skip
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(self.source).encode() + b"\n")

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def rendered(self, values: Sequence[bytes]) -> bytes:
        """What the renderer says of `values`, given in parts: a line for `text_of`. Raises ApiError
        (400) where it takes too long, or dies."""
        async with self._alone:
            try:
                async with asyncio.timeout(self._limit_s):
                    line = await self._asked(values)
            except TimeoutError:
                await self.close()
                raise self._failed(f"it takes longer than {self._limit_s:g} s") from None
            except (OSError, ValueError):  # ValueError: of a line above MOST_LINE
                line = b""
            except asyncio.CancelledError:  # its answer would be taken for the next one's
                await self.close()
                raise
            if not line:
                await self.close()
                raise self._failed("its process died; it may take too much memory")
        return line

    async def _asked(self, values: Sequence[bytes]) -> bytes:
        await self.begin()
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        for part in (*values, b"\n"):
            process.stdin.write(part)
            await process.stdin.drain()
        return await process.stdout.readline()

    def _failed(self, why: str) -> ApiError:
        return bad(f"the chat template refuses these messages: {why}", "messages")


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """What templates know of a message; a list of texts becomes one text, as in llama.cpp."""
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(part["text"] for part in content)
    made = {"role": message["role"], "content": "" if content is None else content}
    return made | ({"name": message["name"]} if message.get("name") else {})
