"""Machine code of CPU kernels is kept in the user's cache, and found by what it does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from workbench.backend import compiled
from workbench.backend.cpu import compile as compiler
from workbench.backend.cpu import kept
from workbench.backend.cpu.compile import compile_kernel
from workbench.backend.cpu.device import atomics, loops

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache."""
    monkeypatch.setattr(compiled, "cache_dir", lambda: tmp_path)
    return tmp_path


@pytest.fixture
def counts(monkeypatch) -> Callable[[], tuple[int, int]]:
    """How many texts were written, and how many were compiled, since it was asked last."""
    texts, codes = Mock(wraps=compiler.text_of), Mock(wraps=compiler._machine_code)
    monkeypatch.setattr(compiler, "text_of", texts)
    monkeypatch.setattr(compiler, "_machine_code", codes)

    def take() -> tuple[int, int]:
        found = texts.call_count, codes.call_count
        texts.reset_mock()
        codes.reset_mock()
        return found

    return take


def added(n: int = 7, keep: bool = True) -> int:
    """What a kernel adds to a word for each of its parts that was compiled, or found."""

    def body(emit: Any, args: Any, part: Any, n_parts: Any) -> None:
        at = args + part * 8
        emit.store(emit.load("i64", at) + n, at)

    words = np.zeros(3, np.int64)
    compile_kernel("adds", body, keep=keep).ctypes(words.ctypes.data, 1, 3)
    assert words[0] == words[2] == 0
    return int(words[1])


def test_an_edit_compiles_what_has_other_instructions(cache, counts, monkeypatch):
    assert added() == 7 and counts() == (1, 1)
    assert added() == 7 and counts() == (0, 0), "a second start neither writes nor compiles"
    monkeypatch.setattr(compiler, "source_digest", lambda: "edited")
    assert added() == 7 and counts() == (1, 0), "the instructions are the same"
    assert added() == 7 and counts() == (0, 0), "and from then on it is found at once"
    monkeypatch.setattr(compiler, "source_digest", lambda: "edited again")
    assert added(8) == 8 and counts() == (1, 1)


@pytest.mark.parametrize("what", ["get_host_cpu_name", "llvm_version_info"])
def test_another_cpu_or_compiler_finds_nothing(cache, counts, monkeypatch, what):
    added()
    counts()
    other = (99, 0, 0) if what == "llvm_version_info" else lambda: "another"
    monkeypatch.setattr(compiler.llvm, what, other)
    compiler.source_digest.cache_clear()
    try:
        added()
    finally:
        compiler.source_digest.cache_clear()
    assert counts() == (1, 1)


def test_a_damaged_file_or_no_place_is_compiled_again(cache, counts, monkeypatch):
    for damaged in (lambda code: b"", lambda code: code[:-1], lambda code: b"\x7fELF"):
        added()
        for path in cache.glob("*.o"):
            path.write_bytes(damaged(path.read_bytes()))
        counts()
        assert added() == 7 and counts() == (1, 1)
        assert added() == 7 and counts()[1] == 0
    before = sorted(cache.iterdir())
    assert added(keep=False) == 7 and sorted(cache.iterdir()) == before
    monkeypatch.setattr(compiled, "cache_dir", lambda: cache / "gone" / "gone")
    assert added() == 7


def test_floats_are_neither_contracted_nor_reassociated(cache):
    """a * b + c is rounded twice."""

    def body(emit: Any, args: Any, part: Any, n_parts: Any) -> None:
        a, b, c = (emit.load("f32", args + 4 * i) for i in range(3))
        emit.store(a * b + c, args + 12)

    words = np.array([1 + 2**-12, 1 + 2**-12, -1, 0], np.float32)
    compile_kernel("rounds", body).ctypes(words.ctypes.data, 0, 1)
    assert words[3] == 2**-11 != np.float32((1 + 2**-12) ** 2 - 1)


BEFORE = '''
LIMIT = 3
def below(x):
    """Whether x is below."""
    return x < LIMIT
def outer(x):
    return below(x) + 1
'''


def digest(source: str, module: str = "sample") -> str:
    names: dict[str, Any] = {"__name__": module, "load": atomics.load}
    exec(source, names)
    return kept.digest_of(names["outer"])


@pytest.mark.parametrize(("edit", "matters"), [
    (("Whether x is below", "x < LIMIT"), False), (("\ndef below", "\n# why\n\ndef below"), False),
    (("+ 1", "+ 2"), True), (("x < LIMIT\n", "x <= LIMIT\n"), True), (("= 3", "= 4"), True),
    (("below(x) +", "load(x) +"), True), (("outer(x)", "outer(x, y=1)"), True),
])  # fmt: skip
def test_what_a_loop_does_and_calls_matters(edit, matters):
    """Docstrings, comments and lines do not. A module that has moved does: numba's file names it,
    and importing it fails."""
    assert BEFORE.replace(*edit) != BEFORE
    assert (digest(BEFORE) != digest(BEFORE.replace(*edit))) == matters
    assert digest(BEFORE) != digest(BEFORE, "moved")


def test_what_writes_the_code_of_an_operation_matters(monkeypatch):
    before = kept.digest_of(loops.push.py_func)
    monkeypatch.setattr(atomics, "ORDER", "monotonic")
    assert kept.digest_of(loops.push.py_func) != before


@pytest.mark.slow
def test_a_new_process_finds_all_in_the_cache(tmp_path):
    """And writes nothing beside the source."""
    code = (
        "import numpy as np; from workbench.backend.cpu.kernels import op_table, sampling;"
        "op_table.kernel(('add',)); from workbench.backend import compiled;"
        "print(compiled.so_far().n)"
    )
    env, source = os.environ | {"HOME": str(tmp_path)}, ROOT / "workbench"
    before = set(source.rglob("*.nbi"))
    ask = [sys.executable, "-c", code]
    compiles = [int(subprocess.check_output(ask, cwd=ROOT, env=env)) for _ in range(2)]
    assert compiles[0] > 0 == compiles[1] and set(source.rglob("*.nbi")) == before
    assert any((tmp_path / ".cache/workbench/kernels").glob("loops.*.nbi"))
