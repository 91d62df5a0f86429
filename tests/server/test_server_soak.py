"""The whole server for a long time: the command, its engine process, HTTP over loopback.

Requests that do what clients do (read to the end, stream, leave midway, hang up, wait too little,
ask too much) at 16 slots, and more clients than may wait, so that some are refused and come again.
In the end every request has one answer, no cell is in use that no slot keeps, and both processes
have the memory that they had 1,000 requests before; of the exhaustive tests, 2,000.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
import sys
from collections import Counter
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from tests.profiles import tiers
from tests.served import ids
from tests.server.command import served
from tests.server.live import wait_for

MOST = 48  # tokens that a request makes
# what a client does: its share of a hundred, and what it asks for
KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "whole": (34, {}), "stream": (30, {"stream": True}), "leaves": (14, {"stream": True}),
    "hangs up": (8, {}), "stops": (4, {"stop": ["e", "zz"]}), "several": (4, {"n": 2}),
    "late": (3, {"timeout": 0.001}), "too long": (3, {"prompt": [5] * 129}),
}  # fmt: skip
N_SLOTS, ROOM, N_WAITING, N_CLIENTS = 16, 128, 4, 32
# How much a process may grow from the first to the last quarter of the requests that count. Others
# come before: a new process grows until every shape of a step has its program, and a leak grows on.
MOST_GROWTH_MB = 3.0
SIZES = (1, 2, 3, 5, 8, 13, 20, 33, 34, 50, 60, 70)  # of prompts, some of which begin alike
URL = "/v1/completions"


class Soak:
    """Requests from a number of clients at once. came: by kind and what came of it; and how many
    were opened, perhaps were, and what they made."""

    def __init__(self, processes: list[psutil.Process], seed: int):
        self.processes, self.draw = processes, random.Random(seed)
        self.came: Counter[tuple[str, str]] = Counter()
        self.memory: list[list[int]] = []  # bytes of each process, each time a request is over
        self.n_refused = self.n_opened = self.n_maybe = self.n_made = 0

    async def run(self, url: str, n: int) -> None:
        left = iter(range(n))
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=N_CLIENTS)
        async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as http:

            async def client() -> None:
                for number in left:
                    await self._one(http, number)
                    self.memory.append([one.memory_info().rss for one in self.processes])

            await asyncio.gather(*(client() for _ in range(N_CLIENTS)))

    async def _one(self, http: httpx.AsyncClient, number: int) -> None:
        draw = self.draw
        (kind,) = draw.choices([*KINDS], [share for share, _ in KINDS.values()])
        tokens = ids(draw.choice(SIZES), draw.randrange(3)).tolist()
        body: dict[str, Any] = {
            "prompt": tokens, "max_tokens": draw.randint(1, MOST), "ignore_eos": True,
            "seed": number, "temperature": 0.9 if draw.random() < 0.3 else 0.0,
            "stream": False, "stream_options": {"include_usage": True}, "n": 1,
        } | KINDS[kind][1]  # fmt: skip
        while (came := await self._tried(http, kind, body)) == "refused":
            self.n_refused += 1
            await asyncio.sleep(draw.uniform(0.002, 0.03))
        self.came[kind, came] += 1

    async def _tried(self, http: httpx.AsyncClient, kind: str, body: dict[str, Any]) -> str:
        if kind == "hangs up":
            self.n_maybe += 1
            post = asyncio.ensure_future(http.post(URL, json=body))
            done, _ = await asyncio.wait([post], timeout=self.draw.uniform(0, 0.1))
            post.cancel()
            await asyncio.wait([post])
            return "refused" if done and post.result().status_code == 503 else "hung up"
        leave_at = self.draw.randint(1, 16) if kind == "leaves" else None
        events: list[str] = []
        async with http.stream("POST", URL, json=body) as answer:
            self.n_opened += body["n"] * (kind != "too long")
            if answer.status_code == 503:
                assert float(answer.headers["retry-after"]) >= 1
                return "refused"
            async for line in answer.aiter_lines():
                events += [line.removeprefix("data: ")] if line else []
                if len(events) == leave_at:
                    return "left"
        if kind in ("late", "too long"):
            return str(answer.status_code)
        assert answer.status_code == 200, events
        assert not body["stream"] or (events.pop() == "[DONE]" and "[DONE]" not in events)
        # as many ends and tokens as were asked for
        told = [json.loads(event) for event in events]
        choices = [choice for part in told for choice in part.get("choices", ())]
        reasons = [c["finish_reason"] for c in choices if c["finish_reason"]]
        made = next(part["usage"] for part in told[::-1] if part.get("usage"))["completion_tokens"]
        self.n_made += made
        if kind == "stops":
            assert reasons in (["stop"], ["length"]) and 0 < made <= body["max_tokens"]
        else:
            assert reasons == ["length"] * body["n"] and made == body["n"] * body["max_tokens"]
        return "done"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the memory as Linux has it")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("n", "warm_up"), tiers((1000, 500), (8000, 6000)))
def test_none_is_lost_or_answered_twice_and_nothing_leaks(tmp_path, tiny_model, n, warm_up):
    flags = ["-m", tiny_model("tiny-llama", "F32"), "--slots", N_SLOTS, "-c", N_SLOTS * ROOM]
    flags += ["-ub", 64, "--threads", 1, "--device", "embedded", "--n-kv-pad", 32]
    with (
        served(
            tmp_path, *flags, "--max-waiting", N_WAITING, module=("workbench", "serve")
        ) as found,
        httpx.Client(base_url=found[1], timeout=20) as http,
    ):
        process, url, log = found
        front = psutil.Process(process.pid)
        engine = max(front.children(), key=lambda child: child.memory_info().rss)
        soak = Soak([front, engine], seed=n)
        asyncio.run(soak.run(url, n))

        def now() -> Counter[str]:
            """The metrics by name, and by outcome."""
            told = http.get("/metrics").text
            rows = re.findall(r'^workbench:(\w+)(?:{outcome="(\w+)"})? (\S+)$', told, re.M)
            return Counter({of or name.removesuffix("_total"): float(v) for name, of, v in rows})

        wait_for(lambda: now()["requests_pending"] == 0, 20)
        check(n, soak, now())
        # Once each slot has served a prompt of one token, each keeps that one cell, and no request
        # holds any. The slot that is longest idle is the next.
        for i in range(N_SLOTS):
            body = {"prompt": [7 + i], "max_tokens": 1, "ignore_eos": True}
            assert http.post(URL, json=body).status_code == 200
        ended = now()
        assert ended["kv_cache_cells"] == N_SLOTS * ROOM
        assert ended["kv_cache_cells_kept"] == N_SLOTS and ended["kv_cache_cells_used"] == 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM and "Traceback" not in log.read_text()
    assert ended["cancelled"] > 0 and soak.n_refused > 0 and ended["timeout"] > 0
    quarters = np.array_split(np.array(soak.memory[warm_up:]) / 1e6, 4)
    growth = np.median(quarters[-1], axis=0) - np.median(quarters[0], axis=0)
    assert (growth < MOST_GROWTH_MB).all(), growth


def check(n: int, soak: Soak, found: Counter[str]) -> None:
    assert soak.came.total() == n
    final = ("whole", "stream", "stops", "several")
    assert {came for kind, came in soak.came if kind in final} == {"done"}
    # every answer that was begun has ended once; who hangs up may do so before it was begun
    reasons = ("stop", "length", "cancelled", "timeout", "failed", "refused")
    ended = sum(found[reason] for reason in reasons)
    assert soak.n_opened <= ended <= soak.n_opened + soak.n_maybe + soak.n_refused
    assert not found["failed"]
    assert found["requests_processing"] == found["requests_deferred"] == 0
    assert found["engine_tokens"] == found["tokens_predicted"]
    assert soak.n_made < found["tokens_predicted"]  # who left has some, too
