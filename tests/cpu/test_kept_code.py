"""Machine code of CPU kernels is kept in the user's cache, and found by what it does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import pytest

from workbench.backend import compiled
from workbench.backend.cpu import compile as compiler
from workbench.backend.cpu import kept
from workbench.backend.cpu.compile import compile_kernel
from workbench.backend.cpu.device import atomics, loops
from workbench.backend.cpu.kernels.vector import Body

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache."""
    monkeypatch.setattr(compiled, "cache_dir", lambda: tmp_path)
    return tmp_path


@pytest.fixture
def counts(monkeypatch) -> Callable[[], tuple[int, int]]:
    """How many texts were written, and how many were compiled, since it was asked last."""
    seen = {"texts": 0, "codes": 0}
    text_of, machine_code = compiler.text_of, compiler._machine_code

    def written(body: Body) -> str:
        seen["texts"] += 1
        return text_of(body)

    def made(text: str) -> bytes:
        seen["codes"] += 1
        return machine_code(text)

    monkeypatch.setattr(compiler, "text_of", written)
    monkeypatch.setattr(compiler, "_machine_code", made)

    def take() -> tuple[int, int]:
        found = seen["texts"], seen["codes"]
        seen.update(texts=0, codes=0)
        return found

    return take


def adds(n: int) -> Body:
    """A body that adds n to each of n_parts words."""

    def body(emit: Any, args: Any, part: Any, n_parts: Any) -> None:
        at = args + part * 8
        emit.store(emit.load("i64", at) + n, at)

    return body


def added(kernel: compiler.CompiledKernel) -> int:
    words = np.zeros(3, np.int64)
    kernel.ctypes(words.ctypes.data, 1, 3)
    assert words[0] == words[2] == 0
    return int(words[1])


def test_a_second_start_neither_writes_nor_compiles(cache, counts):
    assert added(compile_kernel("adds", adds(7))) == 7
    assert counts() == (1, 1)
    assert added(compile_kernel("adds", adds(7))) == 7
    assert counts() == (0, 0)


def test_an_edit_that_changes_no_instruction_compiles_nothing(cache, counts, monkeypatch):
    compile_kernel("adds", adds(7))
    monkeypatch.setattr(compiler, "source_digest", lambda: "edited")
    counts()
    assert added(compile_kernel("adds", adds(7))) == 7
    assert counts() == (1, 0)
    compile_kernel("adds", adds(7))
    assert counts() == (0, 0), "and from then on is found at once"


def test_an_edit_that_changes_instructions_compiles(cache, counts, monkeypatch):
    compile_kernel("adds", adds(7))
    monkeypatch.setattr(compiler, "source_digest", lambda: "edited")
    counts()
    assert added(compile_kernel("adds", adds(8))) == 8
    assert counts() == (1, 1)


@pytest.mark.parametrize("what", ["get_host_cpu_name", "llvm_version_info"])
def test_another_cpu_or_compiler_finds_nothing(cache, counts, monkeypatch, what):
    compile_kernel("adds", adds(7))
    counts()
    other = (99, 0, 0) if what == "llvm_version_info" else lambda: "another"
    monkeypatch.setattr(compiler.llvm, what, other)
    compiler.source_digest.cache_clear()
    try:
        compile_kernel("adds", adds(7))
    finally:
        compiler.source_digest.cache_clear()
    assert counts() == (1, 1)


@pytest.mark.parametrize("content", [b"", b"\x7fELF", None])
def test_a_damaged_file_is_compiled_again(cache, counts, content):
    compile_kernel("adds", adds(7))
    for path in cache.glob("*.o"):
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] if content is None else content)
    counts()
    assert added(compile_kernel("adds", adds(7))) == 7
    assert counts() == (1, 1)
    assert added(compile_kernel("adds", adds(7))) == 7
    assert counts()[1] == 0


def test_what_is_not_to_be_kept_leaves_nothing(cache):
    assert added(compile_kernel("adds", adds(7), keep=False)) == 7
    assert not list(cache.iterdir())


def test_without_a_place_it_is_compiled_all_the_same(cache, monkeypatch):
    monkeypatch.setattr(compiled, "cache_dir", lambda: cache / "gone" / "gone")
    assert added(compile_kernel("adds", adds(7))) == 7


def test_floats_are_neither_contracted_nor_reassociated(cache):
    """a * b + c is rounded twice."""

    def body(emit: Any, args: Any, part: Any, n_parts: Any) -> None:
        a, b, c = (emit.load("f32", args + 4 * i) for i in range(3))
        emit.store(a * b + c, args + 12)

    words = np.array([1 + 2**-12, 1 + 2**-12, -1, 0], np.float32)
    compile_kernel("rounds", body).ctypes(words.ctypes.data, 0, 1)
    assert words[3] == 2**-11 != np.float32((1 + 2**-12) ** 2 - 1)


# loops that numba compiles ------------------------------------------------------------------------

BEFORE = '''
LIMIT = 3
def below(x):
    """Whether x is below."""
    return x < LIMIT
def outer(x):
    return below(x) + 1
'''


def outer(source: str) -> FunctionType:
    names: dict[str, Any] = {"__name__": "sample", "load": atomics.load}
    exec(source, names)
    found: FunctionType = names["outer"]
    return found


@pytest.mark.parametrize(
    "edit", [("Whether x is below", "x < LIMIT"), ("\ndef below", "\n# a comment\n\ndef below")]
)
def test_docstrings_comments_and_lines_do_not_matter(edit):
    assert kept.digest_of(outer(BEFORE)) == kept.digest_of(outer(BEFORE.replace(*edit)))


@pytest.mark.parametrize(
    "edit",
    [("+ 1", "+ 2"), ("x < LIMIT\n", "x <= LIMIT\n"), ("LIMIT = 3", "LIMIT = 4"),
     ("below(x) +", "load(x) +"), ("outer(x)", "outer(x, y=1)")],
)  # fmt: skip
def test_what_a_loop_does_and_calls_matters(edit):
    assert BEFORE.replace(*edit) != BEFORE
    assert kept.digest_of(outer(BEFORE)) != kept.digest_of(outer(BEFORE.replace(*edit)))


def test_what_writes_the_code_of_an_operation_matters(monkeypatch):
    before = kept.digest_of(loops.push.py_func)
    monkeypatch.setattr(atomics, "ORDER", "monotonic")
    assert kept.digest_of(loops.push.py_func) != before


def test_code_of_a_module_that_has_moved_is_not_taken():
    """numba's file names the module, and importing it fails where it has moved."""
    namespace = {"__name__": "workbench.backend.cpu.old_place"}
    exec("def doubled(x):\n    return 2 * x", namespace)
    before = kept.digest_of(namespace["doubled"])
    namespace["doubled"].__module__ = "workbench.backend.cpu.device.new_place"
    assert kept.digest_of(namespace["doubled"]) != before


def test_a_new_process_finds_all_in_the_cache_and_writes_nothing_beside_the_source(tmp_path):
    code = (
        "import numpy as np; from workbench.backend.cpu.kernels import op_table, sampling;"
        "op_table.kernel(('add',)); from workbench.backend import compiled;"
        "print(compiled.so_far().n)"
    )
    env = os.environ | {"HOME": str(tmp_path)}
    before = set(ROOT.joinpath("workbench").rglob("*.nbi"))
    compiles = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True,
            check=True,
        )  # fmt: skip
        compiles.append(int(done.stdout))
    assert compiles[0] > 0 == compiles[1]
    assert set(ROOT.joinpath("workbench").rglob("*.nbi")) == before
    assert any((tmp_path / ".cache/workbench/kernels").glob("loops.*.nbi"))
