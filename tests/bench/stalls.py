"""How long streams wait beside large bodies: `python -m tests.bench.stalls [MODEL] [--record]`.

The server, its engine process and the client that reads four streams are processes of their own,
on four cores. Printed are the gaps between tokens, in ms: alone, and while each body is on its way,
over ROUNDS rounds. MODEL: a file to serve; without one the engine process is none, and makes a
token in 5 ms. --record: into data/results/stalls.json, from which the page on the server has its
table; loads of other models stay.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.server.command import NO_ENGINE, served
from tests.server.live import connected, everything, posted
from workbench.benchmarks.runs import provenance
from workbench.common.output import write_text
from workbench.model.synth.models import write_named

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "data" / "results" / "stalls.json"
N_STREAMS, ALONE_S = 4, 2.0
N_CORES, ROUNDS = 4, 3
MOST = 16 << 20  # `--max-body`, where nobody says otherwise


def _keys(n: int) -> bytes:
    return json.dumps({"prompt": "a", "max_tokens": 1} | {f"k{i}": 1 for i in range(n)}).encode()


def bodies(most: int = MOST) -> dict[str, tuple[str, bytes]]:
    """Path and body, by name; each of almost `most` bytes."""
    text = "the engine waits. " * (most // 19)
    ids, lists = (b",".join([b"7"] * (most // 2 - 99)), b",".join([b"[]"] * (most // 3 - 99)))
    chat = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
    return {
        "keys": ("/v1/completions", _keys(most // 15)),
        "ids": ("/v1/completions", b'{"max_tokens":1,"prompt":[' + ids + b"]}"),
        "lists": ("/v1/completions", b'{"prompt":[' + lists + b"]}"),
        "text": ("/v1/completions", json.dumps({"prompt": text, "max_tokens": 1}).encode()),
        "chat": ("/v1/chat/completions", json.dumps(chat).encode()),
        "nonsense": ("/v1/completions", b'{"prompt":"' + b"a" * (most - 100)),
        "tokenize": ("/tokenize", json.dumps({"content": text}).encode()),
        "detokenize": ("/detokenize", b'{"tokens":[' + ids + b"]}"),
    }


class Waits(NamedTuple):
    """Gaps between tokens, ms, while something was done for `seconds`; and its status."""

    gaps: np.ndarray
    seconds: float
    status: str = ""

    def row(self) -> dict[str, Any]:
        """As it is recorded."""
        shares = {"median": 50, "p99": 99, "most": 100}
        found = {name: np.percentile(self.gaps, q) for name, q in shares.items()}
        found |= {"seconds": self.seconds}
        rounded = {name: round(float(value), 3) for name, value in found.items()}
        return {"n": len(self.gaps), **rounded, "status": self.status}


class Streams:
    """Reads streams in a thread, and writes down when something came of each. Where one ends,
    another begins; between them there is no gap."""

    def __init__(self, url: str, n: int, max_tokens: int):
        self._url = url
        self.times: list[list[int]] = []
        self._selector = selectors.DefaultSelector()
        asked = {"prompt": [1], "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
        self._asked = posted(asked)
        for _ in range(n):
            self._begin()
        self._stopped = False
        self._thread = threading.Thread(target=self._read)

    def _begin(self) -> None:
        sock = connected(self._url)
        sock.sendall(self._asked)
        self.times.append([])
        self._selector.register(sock, selectors.EVENT_READ, self.times[-1])

    def _read(self) -> None:
        while not self._stopped:
            for key, _ in self._selector.select(0.1):
                data = key.fileobj.recv(1 << 16)
                key.data.append(time.perf_counter_ns())
                if not data or b"data: [DONE]" in data:
                    self._selector.unregister(key.fileobj)
                    key.fileobj.close()
                    self._begin()

    def waits(self, work: Callable[[], str]) -> Waits:
        """The gaps, of all streams, that overlap some work, which says its status."""
        begin_ns, status, end_ns = time.perf_counter_ns(), work(), time.perf_counter_ns()
        time.sleep(0.3)
        found = [np.empty(0)]
        for at in map(np.array, self.times):
            overlaps = (at[1:] > begin_ns) & (at[:-1] < end_ns)
            found.append(np.diff(at)[overlaps] / 1e6)
        return Waits(np.concatenate(found), (end_ns - begin_ns) / 1e9, status)

    def __enter__(self) -> Streams:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()


def together(rounds: Sequence[Waits]) -> Waits:
    """The gaps of several rounds, the median of their seconds, and each status once."""
    seconds = float(np.median([one.seconds for one in rounds]))
    status = ", ".join(dict.fromkeys(one.status for one in rounds))
    return Waits(np.concatenate([one.gaps for one in rounds]), seconds, status)


def post(url: str, path: str, body: bytes) -> str:
    """The status of the answer. The whole of it is read."""
    with connected(url) as sock:
        sock.settimeout(300)
        sock.sendall(posted(body, path, "1.1", "connection: close"))
        return everything(sock)[9:12].decode()


def measured(url: str, names: list[str], max_tokens: int, rounds: int = 1) -> dict[str, Waits]:
    """Alone, and beside each body. Each has streams of its own, and alone before it."""
    found: dict[str, list[Waits]] = {}
    every, huge = bodies(), json.dumps({"content": "a" * (1 << 19)}).encode()
    for name in names * rounds:
        sent = url, *every[name]
        with Streams(url, N_STREAMS, max_tokens) as streams:
            time.sleep(1)
            post(url, "/tokenize", huge)  # starts processes
            found.setdefault("alone", []).append(streams.waits(lambda: time.sleep(ALONE_S) or ""))
            beside = streams.waits(lambda sent=sent: post(*sent))
        found.setdefault(name, []).append(beside)
        print(f"  {name}: {beside.seconds:.2f} s", file=sys.stderr, flush=True)
    return {name: together(some) for name, some in found.items()}


def record(load: str, found: dict[str, Waits]) -> None:
    """Writes the file with this load's rows."""
    known = json.loads(OUT.read_text()) if OUT.is_file() else {}
    known[load] = {
        "started": provenance.utc_now(), "commit": provenance.commit(),
        "machine": provenance.machine(), "cores": len(os.sched_getaffinity(0)),
        "streams": N_STREAMS, "rounds": ROUNDS, "body_bytes": MOST,
        "rows": {name: one.row() for name, one in found.items()},
    }  # fmt: skip
    write_text(OUT, json.dumps(known, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", metavar="MODEL")
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:N_CORES])
    if args.model is not None:
        load, most = Path(args.model).stem, 4000
        module, flags = ("workbench", "serve"), ["-m", args.model, "--slots", 8, "-c", 8 << 12]
    else:
        load, most = "no engine", 1 << 17
        tiny = write_named(ROOT / "data" / "models", "tiny-llama", "F16")
        module, flags = NO_ENGINE, ["-m", tiny, "-c", 1 << 18]
    with tempfile.TemporaryDirectory() as log, served(Path(log), *flags, module=module) as one:
        found = measured(one[1], list(bodies()), most, ROUNDS)
    print(f"{len(os.sched_getaffinity(0))} cores, {load}")
    print(f"{'':12}{'gaps':>8}{'median':>9}{'P99':>9}{'most':>9}")
    for name, one in found.items():
        said = "{n:8}{median:9.2f}{p99:9.2f}{most:9.2f}   {seconds:.2f} s {status}"
        print(f"{name:12}" + said.format(**one.row()))
    if args.record:
        record(load, found)


if __name__ == "__main__":
    main()
