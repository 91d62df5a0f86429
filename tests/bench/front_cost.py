"""What a token costs the front: `python -m tests.bench.front_cost`.

Front, engine process and client are processes of their own. The engine makes tokens without a
model, as fast as it can. Printed is the CPU time of the front's process, by token or event.
"""

from __future__ import annotations

import asyncio
import sys
import time
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from urllib.parse import urlsplit

from tests.server.fake_worker import FakeWorker
from tests.server.live import posted, texts_of
from workbench.model.synth.models import write_tiny
from workbench.server.server import Listening, serve
from workbench.server.wire.front import FrontSettings

MODELS = Path(__file__).resolve().parents[2] / "data" / "models"
N_PROMPT, N_TOKENS = 1000, 1000


def engine(own: Connection, n_vocab: int, step_s: float) -> None:
    worker = FakeWorker(n_vocab, n_ctx=1 << 20, n_slots=1024, n_waiting=1024, step_s=step_s)
    worker.own = own
    worker.serve()


def front(say: Connection, step_s: float) -> None:
    texts = texts_of(write_tiny(MODELS, "tiny-llama", "F16"))
    ours, theirs = Pipe()
    process = get_context("fork").Process(
        target=engine, args=(theirs, texts.tokenizer.n_vocab, step_s), daemon=True
    )

    def start(n_fronts: int) -> tuple[list[Connection], object]:
        process.start()
        theirs.close()
        return [ours], process

    serve(start, texts, None, FrontSettings("tiny"), Listening(port=0), say.send)  # type: ignore


async def one(url: str, body: dict) -> int:
    """Sends a request; the bytes of its answer."""
    at = urlsplit(url)
    reader, writer = await asyncio.open_connection(at.hostname, at.port)
    writer.write(posted(body, "/v1/completions", "1.1", "connection: close"))
    n = 0
    while part := await reader.read(1 << 20):
        assert n or part.startswith(b"HTTP/1.1 200"), part
        n += len(part)
    writer.close()
    return n


async def many(url: str, n: int, body: dict) -> None:
    await asyncio.gather(*(one(url, body) for _ in range(n)))


def cpu_s(pid: int) -> float:
    """CPU time of all threads of a process."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def main() -> None:
    step_s = float(sys.argv[1]) if len(sys.argv) > 1 else 0.003
    spawn = get_context("spawn")
    said, say = spawn.Pipe(duplex=False)
    process = spawn.Process(target=front, args=(say, step_s))
    process.start()
    while not (line := said.recv()).startswith("ready"):
        pass
    url, pid = line.partition(" at ")[2].partition(" ")[0], process.pid
    assert pid is not None
    same = {"prompt": list(range(N_PROMPT)), "ignore_eos": True}
    for n in (1, 8, 32, 128):
        for name, extra in (
            ("whole", {}),
            ("whole, stop texts", {"stop": ["never found", "nor this"]}),
            ("streamed", {"stream": True}),
        ):
            few = same | extra | {"max_tokens": 1}
            body = same | extra | {"max_tokens": N_TOKENS}
            asyncio.run(many(url, n, few))
            begin = cpu_s(pid)
            asyncio.run(many(url, n, few))
            fixed, began = cpu_s(pid) - begin, time.perf_counter()
            begin = cpu_s(pid)
            asyncio.run(many(url, n, body))
            took, used = time.perf_counter() - began, cpu_s(pid) - begin
            made = n * (N_TOKENS - 1)
            print(
                f"{n:4} requests, {name:18} {1e6 * (used - fixed) / made:7.2f} us a token, "
                f"{1e6 * fixed / n:6.0f} us a request; {made / took:8.0f} tokens/s, "
                f"{100 * used / took:3.0f} % of a core"
            )
    process.terminate()
    process.join()


if __name__ == "__main__":
    main()
