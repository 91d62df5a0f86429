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
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "trace"))
import nvtx_injection  # noqa: E402

pytestmark = [pytest.mark.long, pytest.mark.skipif(
    not nvtx_injection.supported(), reason="the injection library is written for Linux only"
)]  # fmt: skip
RANGES, TOKENS = 1000, 16


@pytest.fixture(scope="module")
def do(tiny_model, tmp_path_factory) -> Iterator[Callable[[str, int], None]]:
    """`do(case, n)` in the child."""
    library = tmp_path_factory.mktemp("nvtx") / "libnvtxtool.so"
    nvtx_injection.write_library(library)
    with subprocess.Popen(
        [sys.executable, HERE / "nvtx_child.py", library, tiny_model("tiny-llama", "Q4_0")],
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
