"""A load that does what clients do: reads to the end, streams, leaves midway, hangs up, waits too
little, asks too much. What came of each request is counted, and so is the memory of the server."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np

PAGE = 4096
MOST = 48  # tokens that a request makes
RETRIES = 400
KINDS = {
    "whole": 34, "stream": 30, "leaves": 14, "hangs up": 8, "stops": 4, "several": 4, "late": 3,
    "too long": 3,
}  # fmt: skip
FINAL = ("whole", "stream", "stops", "several")  # these are answered to their end


class Prompt(NamedTuple):
    """texts: of its first n tokens alone, by n - 1."""

    tokens: list[int]
    texts: list[str]


class Memory:
    """The resident bytes of a server's processes, each time a request is over."""

    def __init__(self, front: int):
        self.pids = {"front": front, "engine": max(children(front), key=resident)}
        self.samples: dict[str, list[int]] = {name: [] for name in self.pids}

    def sample(self) -> None:
        for name, pid in self.pids.items():
            self.samples[name].append(resident(pid))

    def quarters(self, name: str, warm_up: int = 0) -> tuple[float, float]:
        """Megabytes in the first and in the last quarter behind so many requests: medians."""
        mb = np.array(self.samples[name][warm_up:]) / 1e6
        n = max(1, len(mb) // 4)
        return float(np.median(mb[:n])), float(np.median(mb[-n:]))


def resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
    except FileNotFoundError:  # it has ended
        return 0


def children(pid: int) -> list[int]:
    return [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]


class Soak:
    """n requests from a number of clients at once. outcomes: by kind and what came of it."""

    def __init__(self, url: str, prompts: list[Prompt], memory: Memory, n_ctx: int, seed: int):
        self.url, self.prompts, self.memory, self.n_ctx = url, prompts, memory, n_ctx
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.n_refused = self.n_opened = self.n_maybe = self.n_made = 0
        self.n_same = self.n_other = 0
        self.faults: list[str] = []
        self.seconds = 0.0
        self._random = random.Random(seed)

    async def run(self, n: int, n_clients: int) -> None:
        began = time.perf_counter()
        left = iter(range(n))
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=n_clients)
        async with httpx.AsyncClient(base_url=self.url, timeout=60, limits=limits) as http:

            async def client() -> None:
                for number in left:
                    await self._one(http, number)
                    self.memory.sample()

            async with asyncio.TaskGroup() as group:
                for _ in range(n_clients):
                    group.create_task(client())
        self.seconds = time.perf_counter() - began

    async def _one(self, http: httpx.AsyncClient, number: int) -> None:
        draw = self._random
        (kind,) = draw.choices([*KINDS], [*KINDS.values()])
        prompt = draw.choice(self.prompts)
        most, sampled = draw.randint(1, MOST), draw.random() < 0.3
        body: dict[str, Any] = {
            "prompt": prompt.tokens, "max_tokens": most, "ignore_eos": True, "seed": number,
            "temperature": 0.9 if sampled else 0.0,
        }  # fmt: skip
        if kind == "several":
            body |= {"n": 2}
        elif kind == "stops":
            body |= {"stop": [prompt.texts[-1][2:4] or "e", "zz"], "temperature": 0.0}
        elif kind == "late":
            body |= {"timeout": 0.001}
        elif kind == "too long":
            body |= {"prompt": [5] * (self.n_ctx + 1)}
        if kind in ("stream", "leaves"):
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        texts = None if body["temperature"] else prompt.texts
        for _ in range(RETRIES):
            came = await self._tried(http, kind, body, texts)
            if came != "refused":
                break
            await asyncio.sleep(draw.uniform(0.002, 0.03))
        self.outcomes[kind, came] += 1

    async def _tried(
        self, http: httpx.AsyncClient, kind: str, body: dict[str, Any], texts: list[str] | None
    ) -> str:
        n = body.get("n", 1)
        if kind == "hangs up":
            self.n_maybe += n
            post = asyncio.ensure_future(http.post("/v1/completions", json=body))
            done, _ = await asyncio.wait([post], timeout=self._random.uniform(0, 0.1))
            if not done:
                post.cancel()
                await asyncio.wait([post])
                return "hung up"
            return "refused" if post.result().status_code == 503 else "done"
        if body.get("stream"):
            return await self._streamed(http, kind, body, texts)
        answer = await http.post("/v1/completions", json=body)
        if kind == "too long":
            return str(answer.status_code)
        self.n_opened += n
        if answer.status_code == 503:
            return self._refusal(answer)
        if kind == "late":
            return f"late: {answer.status_code}"
        if answer.status_code != 200:
            self.faults.append(f"{kind}: {answer.status_code} {answer.text[:200]}")
            return "failed"
        told = answer.json()
        self._check(kind, told["usage"], [c["finish_reason"] for c in told["choices"]], body)
        for choice in told["choices"]:
            self._compare(kind, choice["text"], body, texts)
        return "done"

    def _refusal(self, answer: httpx.Response) -> str:
        self.n_refused += 1
        if float(answer.headers.get("retry-after", 0)) < 1:
            self.faults.append(f"503 without Retry-After: {answer.headers}")
        return "refused"

    async def _streamed(
        self, http: httpx.AsyncClient, kind: str, body: dict[str, Any], texts: list[str] | None
    ) -> str:
        leave_at = self._random.randint(1, 16) if kind == "leaves" else None
        events: list[str] = []
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            self.n_opened += 1
            if answer.status_code == 503:
                await answer.aread()
                return self._refusal(answer)
            async for line in answer.aiter_lines():
                if line:
                    events.append(line.removeprefix("data: "))
                if len(events) == leave_at:
                    return "left"
        if events[-1] != "[DONE]" or events.count("[DONE]") != 1:
            self.faults.append(f"a stream that ends with {events[-2:]}")
            return "failed"
        parts = [json.loads(event) for event in events[:-1]]
        choices = [choice for part in parts for choice in part.get("choices", ())]
        reasons = [c["finish_reason"] for c in choices if c["finish_reason"]]
        usage = next(part["usage"] for part in reversed(parts) if part.get("usage"))
        self._check(kind, usage, reasons, body)
        self._compare(kind, "".join(c["text"] for c in choices), body, texts)
        return "done"

    def _check(
        self, kind: str, usage: dict[str, Any], reasons: list[str], body: dict[str, Any]
    ) -> None:
        """As many ends and tokens as were asked for."""
        n, made = body.get("n", 1), usage["completion_tokens"]
        self.n_made += made
        right = len(reasons) == n and made == n * body["max_tokens"] and {*reasons} == {"length"}
        if kind == "stops":
            right = reasons in (["stop"], ["length"]) and 0 < made <= body["max_tokens"]
        if not right:
            self.faults.append(f"{kind}: {made} tokens, {reasons} of {body['max_tokens']}")

    def _compare(self, kind: str, text: str, body: dict[str, Any], texts: list[str] | None) -> None:
        if texts is None:
            return
        wanted = texts[body["max_tokens"] - 1]
        same = wanted.startswith(text) if kind == "stops" else text == wanted
        self.n_same += same
        self.n_other += not same


def figures(metrics: str) -> dict[str, float]:
    """/metrics by name, and by outcome."""
    found = re.findall(r'^workbench:(\w+)(?:{outcome="(\w+)"})? (\S+)$', metrics, re.M)
    return {outcome or name.removesuffix("_total"): float(value) for name, outcome, value in found}
