"""The whole server for a long time: the command, its engine process, HTTP over loopback.

Thousands of requests that do what clients do (read to the end, stream, leave midway, hang up, wait
too little, ask too much) at 16 slots, and more clients than may wait, so that some are refused and
come again. In the end every request has one answer, no cell is in use that no slot keeps, and both
processes have the memory that they had 1,000 requests before; of the exhaustive tests, after 8,000
requests, 2,000 before.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest

import workbench as wb
from tests.profiles import tiers
from tests.served import Ask, alone, ids
from tests.server.command import served
from workbench.config import Toggles
from workbench.model.gguf.file import open_gguf
from workbench.model.tokenizer.tokenizer import load_tokenizer

PAGE = 4096
MOST = 48  # tokens that a request makes
RETRIES = 400
KINDS = {
    "whole": 34, "stream": 30, "leaves": 14, "hangs up": 8, "stops": 4, "several": 4, "late": 3,
    "too long": 3,
}  # fmt: skip
FINAL = ("whole", "stream", "stops", "several")  # these are answered to their end
N_SLOTS, ROOM, N_WAITING, N_CLIENTS = 16, 128, 4, 32
# How much a process may grow from the first to the last quarter of the requests that count. Others
# come before: a new process grows until every shape of a step has its program, and a leak grows on.
MOST_GROWTH_MB = 3.0
SIZES = (1, 2, 3, 5, 8, 13, 20, 33, 34, 50, 60, 70)
DRAIN_S = 60.0


class Prompt(NamedTuple):
    """texts: of its first n tokens alone, by n - 1."""

    tokens: list[int]
    texts: list[str]


class Memory:
    """The resident bytes of a server's processes, each time a request is over."""

    def __init__(self, front: int):
        kept = [int(c) for task in Path(f"/proc/{front}/task").iterdir()
                for c in (task / "children").read_text().split()]  # fmt: skip
        self.pids = {"front": front, "engine": max(kept, key=resident)}
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
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE


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


def prompts_of(path: Path) -> list[Prompt]:
    """Some begin alike. With each is what it is continued with alone."""
    with open_gguf(path) as file:
        decode = load_tokenizer(file).decode
    found = []
    with wb.Engine.load(
        path, device="embedded", n_ctx=ROOM, n_seqs=1, n_ubatch=ROOM, threads=1, toggles=Toggles()
    ) as engine:
        for i, n in enumerate(SIZES):
            tokens = ids(n, i % 3)
            made = alone(engine, Ask(0, tokens, MOST)).tokens
            found.append(Prompt(tokens.tolist(), [decode(made[: n + 1]) for n in range(len(made))]))
    return found


def wait_until(condition, seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not come"
        time.sleep(0.05)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("n", "warm_up"), [(40, 0), *tiers((2000, 1000), (8000, 6000))])
def test_none_is_lost_or_answered_twice_and_nothing_leaks(
    tmp_path, tiny_model, n, warm_up, record_property
):
    path = tiny_model("tiny-llama", "F32")
    flags = ["-m", path, "--slots", N_SLOTS, "-c", N_SLOTS * ROOM, "-ub", 64, "--threads", 1]
    flags += ["--device", "embedded", "--max-waiting", N_WAITING, "--n-kv-pad", 32]
    prompts = prompts_of(path)
    with served(tmp_path, *flags, module=("workbench", "serve")) as (process, url, log):
        memory = Memory(process.pid)
        soak = Soak(url, prompts, memory, ROOM, seed=n)
        asyncio.run(soak.run(n, N_CLIENTS))
        with httpx.Client(base_url=url, timeout=20) as http:

            def now() -> dict[str, float]:
                return figures(http.get("/metrics").text)

            wait_until(lambda: now()["requests_pending"] == 0)
            found = now()
            for name, value in {
                "seconds": soak.seconds, "tokens": soak.n_made, "outcomes": soak.outcomes,
                "memory": {name: memory.quarters(name, warm_up) for name in memory.pids},
                "same": soak.n_same, "other": soak.n_other, "metrics": found,
            }.items():  # fmt: skip
                record_property(name, str(value))
            check(n, soak, found)
            check_cells(http, now)
        process.send_signal(signal.SIGTERM)
        assert process.wait(DRAIN_S) == 128 + signal.SIGTERM
        assert "Traceback" not in log.read_text()
    if warm_up:
        assert found["cancelled"] > 0 and soak.n_refused > 0 and found["timeout"] > 0
        for name in memory.pids:
            first, last = memory.quarters(name, warm_up)
            assert last - first < MOST_GROWTH_MB, (name, first, last)


def check(n: int, soak: Soak, found: dict[str, float]) -> None:
    assert not soak.faults, soak.faults[:5]
    assert soak.outcomes.total() == n
    assert {came for (kind, came) in soak.outcomes if kind in FINAL} == {"done"}
    assert not [key for key in soak.outcomes if key[1] in ("refused", "failed")]
    # every answer that was begun has ended once; who hangs up may do so before it was begun
    reasons = ("stop", "length", "cancelled", "timeout", "failed", "refused")
    ended = sum(found.get(reason, 0) for reason in reasons)
    assert soak.n_opened <= ended <= soak.n_opened + soak.n_maybe
    assert not found.get("failed") and found.get("refused", 0) >= soak.n_refused
    assert found["requests_processing"] == found["requests_deferred"] == 0
    assert found["engine_tokens"] == found["tokens_predicted"]
    assert soak.n_made < found["tokens_predicted"]  # who left has some, too
    assert soak.n_same > 50 * soak.n_other  # rounding decides few


def check_cells(http: httpx.Client, now) -> None:
    """Once each slot has served a prompt of one token, each keeps that one cell, and no request
    holds any. The slot that is longest idle is the next."""
    for i in range(N_SLOTS):
        body = {"prompt": [7 + i], "max_tokens": 1, "ignore_eos": True}
        assert http.post("/v1/completions", json=body).status_code == 200
    found = now()
    assert found["kv_cache_cells"] == N_SLOTS * ROOM
    assert found["kv_cache_cells_kept"] == N_SLOTS and found["kv_cache_cells_used"] == 0
