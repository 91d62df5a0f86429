"""What a token costs the front: `python -m tests.bench.front_cost`.

Front, engine process and client are processes of their own. The engine makes tokens without a
model. Printed is the CPU time of the front's process, by token or event.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

from tests.server.command import ROOT, served
from tests.server.live import posted
from workbench.model.synth.models import write_named

N_TOKENS, SIZES = 1000, (1, 8, 32, 128)
SAME = {"prompt": list(range(1000)), "ignore_eos": True}
WAYS = {
    "whole": {}, "whole, stop texts": {"stop": ["never found", "nor this"]},
    "streamed": {"stream": True},
}  # fmt: skip


async def one(url: str, body: dict) -> None:
    """Sends a request, and reads all of its answer."""
    at = urlsplit(url)
    reader, writer = await asyncio.open_connection(at.hostname, at.port)
    writer.write(posted(body, "/v1/completions", "1.1", "connection: close"))
    assert (await reader.read(12)).startswith(b"HTTP/1.1 200")
    while await reader.read(1 << 20):
        pass
    writer.close()


async def many(url: str, n: int, body: dict) -> None:
    await asyncio.gather(*(one(url, body) for _ in range(n)))


def cpu_s(pid: int) -> float:
    """CPU time of all threads of a process."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def used_s(pid: int, url: str, n: int, body: dict) -> tuple[float, float]:
    """CPU time of the front for n requests at once, and how long they took."""
    begin, began = cpu_s(pid), time.perf_counter()
    asyncio.run(many(url, n, body))
    return cpu_s(pid) - begin, time.perf_counter() - began


def main() -> None:
    model = write_named(ROOT / "data" / "models", "tiny-llama", "F16")
    flags = ["-m", model, "-c", 1 << 20, "--slots", max(SIZES), "--max-waiting", 1024]
    with tempfile.TemporaryDirectory() as log, served(Path(log), *flags) as (process, url, _):
        for n in SIZES:
            for name, extra in WAYS.items():
                few = SAME | extra | {"max_tokens": 1}
                asyncio.run(many(url, n, few))
                fixed, _ = used_s(process.pid, url, n, few)
                used, took = used_s(process.pid, url, n, few | {"max_tokens": N_TOKENS})
                made = n * (N_TOKENS - 1)
                print(
                    f"{n:4} requests, {name:18} {1e6 * (used - fixed) / made:7.2f} us a token, "
                    f"{1e6 * fixed / n:6.0f} us a request; {made / took:8.0f} tokens/s, "
                    f"{100 * used / took:3.0f} % of a core", flush=True,
                )  # fmt: skip


if __name__ == "__main__":
    main()
