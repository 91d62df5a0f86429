"""The whole server for a long time: the command, its engine process, HTTP over loopback.

Thousands of requests of random kinds and lengths (`tests/soak.py`) at 16 slots, and more clients
than may wait, so that some are refused and come again. In the end every request has one answer, no
cell is in use that no slot keeps, and both processes have the memory that they had 1,000 requests
before; of the exhaustive tests, after 8,000 requests, 2,000 before.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from pathlib import Path

import httpx
import pytest

import workbench as wb
from tests.profiles import tiers
from tests.server.command import served
from tests.served import Ask, alone, ids
from tests.soak import FINAL, MOST, Memory, Prompt, Soak, figures
from workbench.config import Toggles
from workbench.model.gguf.file import open_gguf
from workbench.model.tokenizer.tokenizer import load_tokenizer

N_SLOTS, ROOM, N_WAITING, N_CLIENTS = 16, 128, 4, 32
# How much a process may grow from the first to the last quarter of the requests that count. Others
# come before: a new process grows until every shape of a step has its program, and a leak grows on.
MOST_GROWTH_MB = 3.0
SIZES = (1, 2, 3, 5, 8, 13, 20, 33, 34, 50, 60, 70)
DRAIN_S = 60.0


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
@pytest.mark.parametrize(("n", "warm_up"), [(60, 0), *tiers((2000, 1000), (8000, 6000))])
def test_none_is_lost_none_is_answered_twice_and_nothing_leaks(
    tmp_path, tiny_model, n, warm_up, record
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
            report(n, warm_up, soak, memory, found, record)
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


@pytest.fixture
def record(record_property):
    return record_property


def report(
    n: int, warm_up: int, soak: Soak, memory: Memory, found: dict[str, float], record
) -> None:
    """What is worth knowing of a run: `pytest -s` prints it."""
    mb = {
        name: "{:.1f} -> {:.1f} MB".format(*memory.quarters(name, warm_up)) for name in memory.pids
    }
    for name, value in {
        "requests": n, "seconds": round(soak.seconds, 1), "memory": mb, "tokens": soak.n_made,
        "outcomes": {" ".join(key): value for key, value in sorted(soak.outcomes.items())},
        "refused": soak.n_refused, "same": soak.n_same, "other": soak.n_other,
        "metrics": {k: v for k, v in found.items() if not k.endswith("created")},
    }.items():  # fmt: skip
        record(name, value)
        print(f"{name}: {value}")


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
