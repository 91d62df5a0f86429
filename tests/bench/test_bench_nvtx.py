"""What NVTX ranges cost the host: 1000 ranges, and 16 tokens with them and without.

The tool does nothing: its functions return at once. So a figure is what the `nvtx` package, NVTX
and the engine take. A tool that keeps what it is told takes more. The process is a child, for NVTX
looks for its tool once in a process; each case is a line to it and an answer.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from ctypes import pythonapi
from pathlib import Path

import pytest

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[1] / "trace"))
import nvtx_injection  # noqa: E402

pytestmark = pytest.mark.skipif(
    not nvtx_injection.supported(), reason="the injection library is written for Linux only"
)
RANGES, TOKENS, N_CTX = 1000, 16, 256


@pytest.fixture(scope="module")
def do(tiny_model, tmp_path_factory) -> Iterator[Callable[[str, int], None]]:
    """`do(case, n)` in the child."""
    library = tmp_path_factory.mktemp("nvtx") / "libnvtxtool.so"
    nvtx_injection.write_library(library)
    with subprocess.Popen(
        [sys.executable, HERE, library, tiny_model("tiny-llama", "Q4_0")],
        env=os.environ | {"NVTX_INJECTION64_PATH": str(library)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
    ) as child:  # fmt: skip
        assert child.stdin is not None and child.stdout is not None
        assert child.stdout.readline() == "ready\n"

        def done(case: str, n: int) -> None:
            child.stdin.write(f"{case} {n}\n")
            assert child.stdout.readline() == "done\n"

        yield done


@pytest.mark.parametrize("case", ["range", "step_range", "phase"])
def test_thousand_ranges(benchmark, do, case):
    benchmark(do, case, RANGES)


@pytest.mark.parametrize("nvtx", ["off", "on"])
def test_tokens(benchmark, do, nvtx):
    benchmark(do, f"token_{nvtx}", TOKENS)


class Quiet(nvtx_injection.Counter):
    """A tool of compiled code that returns at once."""

    def __init__(self, path: Path):
        super().__init__(path)
        told = nvtx_injection.PUSH, nvtx_injection.POP, nvtx_injection.START, nvtx_injection.END
        self._keep |= dict.fromkeys(told, pythonapi.Py_IsInitialized)


def main(library: str, model: str) -> None:
    """The child: does a case n times for each line `CASE N`, and answers with a line."""
    tool = Quiet(Path(library))  # before NVTX is called
    from workbench.engine.engine import Engine
    from workbench.engine.look.nvtx_ranges import NvtxRanges, ranges_of

    ranges = ranges_of("auto")
    assert tool.loaded and isinstance(ranges, NvtxRanges)
    attributes = ranges.attributes("a range", "launch", 1)
    clock = ranges.clock(lambda phase, start_ns, end_ns: None, lambda: 1)
    engines = {
        nvtx: Engine.load(model, device="embedded", n_ctx=N_CTX, threads=1, nvtx=nvtx)
        for nvtx in ("off", "on")
    }

    def a_range() -> None:
        ranges.push(attributes)
        ranges.pop()

    def a_step(nvtx: str) -> None:
        if engines[nvtx].n_past == N_CTX:
            engines[nvtx].reset()
        engines[nvtx].step([7])

    cases: dict[str, Callable[[], object]] = {
        "range": a_range, "step_range": lambda: ranges.stop(ranges.start_step(1, 2, 3)),
        "phase": lambda: clock.end("batch", clock.begin("batch")),
        "token_off": lambda: a_step("off"), "token_on": lambda: a_step("on"),
    }  # fmt: skip
    print("ready", flush=True)
    for line in sys.stdin:
        name, n = line.split()
        for _ in range(int(n)):
            cases[name]()
        print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
