"""The process that `test_bench_nvtx.py` times: it has a tool for NVTX, and does a case n times for
each line `CASE N` that it is given. It answers each with a line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from ctypes import pythonapi
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "trace"))
import nvtx_injection

PROMPT, N_CTX = [1, 2, 3], 256


class Quiet(nvtx_injection.Counter):
    """A tool of compiled code that returns at once."""

    def __init__(self, path: Path):
        super().__init__(path)
        told = nvtx_injection.PUSH, nvtx_injection.POP, nvtx_injection.START, nvtx_injection.END
        self._keep |= dict.fromkeys(told, pythonapi.Py_IsInitialized)


def main(library: str, model: str) -> None:
    tool = Quiet(Path(library))  # before NVTX is called
    from workbench.engine.engine import Engine
    from workbench.engine.look.nvtx_ranges import NvtxRanges, ranges_of

    ranges = ranges_of("auto")
    assert tool.loaded and isinstance(ranges, NvtxRanges)
    attributes = ranges.attributes("a range", "launch", 1)
    clock = ranges.clock(lambda phase, start_ns, end_ns: None, lambda: 1)

    def a_range() -> None:
        ranges.push(attributes)
        ranges.pop()

    def a_step_range() -> None:
        ranges.stop(ranges.start_step(1, 2, 3))

    def a_phase() -> None:
        clock.end("batch", clock.begin("batch"))

    def stepping(engine: Engine) -> Callable[[], object]:
        def step() -> None:
            if engine.n_past == N_CTX:
                engine.reset()
            engine.step([7])

        return step

    cases: dict[str, Callable[[], object]] = {
        "range": a_range, "step_range": a_step_range, "phase": a_phase
    }  # fmt: skip
    for nvtx in ("off", "on"):
        cases[f"token_{nvtx}"] = stepping(
            Engine.load(model, device="embedded", n_ctx=N_CTX, threads=1, nvtx=nvtx)
        )
    print("ready", flush=True)
    for line in sys.stdin:
        name, n = line.split()
        case = cases[name]
        for _ in range(int(n)):
            case()
        print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
