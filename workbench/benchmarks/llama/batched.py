"""`workbench bench -npl`: llama-batched-bench's measurement, under its names.

Several sequences have a prompt each (or one shared prompt). Then every step generates one token of
each sequence.

    PP, TG        tokens of a prompt, and tokens that a sequence generates
    B, N_KV       sequences, and cells
    T_PP, T_TG    seconds
    S_PP, S_TG    tokens of all sequences per second
    S             cells per second of both parts

Source: `tools/batched-bench` of llama.cpp. It measures once; here the times are means.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.benchmarks.llama import llama_format as fmt
from workbench.benchmarks.llama.llama_bench import measured
from workbench.benchmarks.llama.llama_format import BenchRow, Column
from workbench.benchmarks.workload import Workload
from workbench.common.errors import UsageError

if TYPE_CHECKING:
    from workbench.engine.engine import Engine

TABLE = "llama_batched_bench"
# llama-batched-bench's fields; the last four name the engine of a row
FIELDS: dict[str, type] = {
    "n_kv_max": int, "n_batch": int, "n_ubatch": int, "flash_attn": int, "is_pp_shared": int,
    "n_gpu_layers": int, "n_threads": int, "n_threads_batch": int, "pp": int, "tg": int, "pl": int,
    "n_kv": int, "t_pp": float, "speed_pp": float, "t_tg": float, "speed_tg": float, "t": float,
    "speed": float, "build_commit": str, "backends": str, "model_filename": str, "model_type": str,
}  # fmt: skip
_ABOUT = (
    "n_kv_max", "n_batch", "n_ubatch", "flash_attn", "is_pp_shared", "n_gpu_layers", "n_threads",
    "n_threads_batch",
)  # fmt: skip
_ENGINE = ("model_type", "backends", *_ABOUT)


def workloads(
    n_prompt: Sequence[int], n_gen: Sequence[int], n_seqs: Sequence[int], shared: bool = False
) -> list[Workload]:
    """llama-batched-bench's tests in its order: by prompt, by generated tokens, by sequences.

    shared: all sequences share one prompt, computed once and copied. Raises UsageError for a number
    below 1.
    """
    for what, values in (
        ("tokens of a prompt", n_prompt), ("tokens to generate", n_gen), ("sequences", n_seqs),
    ):  # fmt: skip
        for value in values:
            if value < 1:
                raise UsageError(
                    f"{value} {what} cannot be measured with several sequences; give 1 or more"
                )
    tests = [
        Workload(pp, tg, 0, n, shared) for pp, tg, n in itertools.product(n_prompt, n_gen, n_seqs)
    ]
    if not tests:
        raise UsageError("there is no test to run; give -npl the numbers of sequences")
    return list(dict.fromkeys(tests))


def batched(
    engine: Engine,
    n_prompt: Sequence[int] = (512,),
    n_gen: Sequence[int] = (128,),
    n_seqs: Sequence[int] = (1, 8, 32),
    repetitions: int = 5,
    *,
    seed: int = 0,
    out: str | Path | None = None,
) -> list[BenchRow]:
    """Measures every test of the matrix on `engine`; one row per test. Arguments as for `bench`.
    Raises UsageError for tests that do not fit the engine, and as `workloads` does."""
    return measured(engine, workloads(n_prompt, n_gen, n_seqs), repetitions, seed=seed, out=out)


def values(row: BenchRow) -> dict[str, Any]:
    """A row under llama-batched-bench's names, in its order and types; times in seconds."""
    test = row.workload
    times = np.array([[s.token_ns[0], s.token_ns[1:].sum()] for s in row.samples], float)
    t_pp, t_tg = (times.mean(axis=0) / 1e9).tolist()
    found = row.fields | {
        "is_pp_shared": int(test.shared),
        "n_threads_batch": row.fields["n_threads"],
        "pp": test.n_prompt,
        "tg": test.n_gen,
        "pl": test.n_seqs,
        "n_kv": test.n_cells,
        "t_pp": t_pp,
        "speed_pp": test.n_prompt_tokens / t_pp,
        "t_tg": t_tg,
        "speed_tg": test.n_seqs * test.n_gen / t_tg,
        "t": t_pp + t_tg,
        "speed": test.n_cells / (t_pp + t_tg),
    }
    return {name: kind(found[name]) for name, kind in FIELDS.items()}


def line(row: BenchRow) -> str:
    """Both rates of a row, and how repeating ended where the number was not fixed."""
    found, (_, *ended) = values(row), row.line().split("; ")
    said = f"prompt {found['speed_pp']:.2f} t/s, generation {found['speed_tg']:.2f} t/s"
    return "; ".join([f"{row.workload.name}: {said}", *ended])


def format_rows(rows: Sequence[BenchRow], wanted: str = "md", width: int | None = None) -> str:
    """Rows as text in one of llama-bench's formats, ending in a newline. Raises UsageError for an
    unknown format. width: of the terminal, for md."""
    if wanted == "md":
        return _md(rows, width)
    return fmt.data_of(wanted, TABLE, FIELDS, map(values, rows), map(_object, rows))


def _object(row: BenchRow) -> dict[str, Any]:
    """llama-batched-bench's JSON object, and after its keys ours: every repetition, toggles."""
    return values(row) | {
        "samples_t_pp": [int(s.token_ns[0]) / 1e9 for s in row.samples],
        "samples_t_tg": [int(s.token_ns[1:].sum()) / 1e9 for s in row.samples],
        "step_ns": [s.token_ns[1:].tolist() for s in row.samples],
        "toggles": row.toggles,
        **fmt.energy_object(row),
    }


def _md(rows: Sequence[BenchRow], width: int | None) -> str:
    """A table for each engine; above it the settings that llama-batched-bench prints."""
    texts = []
    for about, group in itertools.groupby(rows, lambda row: [values(row)[n] for n in _ENGINE]):
        alike = list(group)
        said = f"{about[0]}, {about[1]}: " + ", ".join(
            f"{name} = {value}" for name, value in zip(_ABOUT, about[2:], strict=True)
        )
        toggles = f"toggles: {fmt.shared_toggles(alike)}"
        wide = width or max(len(said), len(toggles))
        above = ["\n".join(textwrap.wrap(s, wide, break_on_hyphens=False)) for s in (said, toggles)]
        columns = [*fmt.varying_toggles(alike), *_COLUMNS, *fmt.energy_columns(alike)]
        texts += ["\n".join(above), fmt.table_of(columns, alike, width)]
    if not texts:
        return ""
    first = rows[0].fields
    return "\n\n".join([*texts, f"build: {first['build_commit']} ({first['build_number']})\n"])


def _column(name: str, heading: str, wide: int, text: str) -> Column:
    return Column(heading, wide, lambda row: text.format(values(row)[name]))


_COLUMNS = [
    _column("pp", "PP", 6, "{}"), _column("tg", "TG", 6, "{}"), _column("pl", "B", 4, "{}"),
    _column("n_kv", "N_KV", 6, "{}"),
    _column("t_pp", "T_PP s", 8, "{:.3f}"), _column("speed_pp", "S_PP t/s", 8, "{:.2f}"),
    _column("t_tg", "T_TG s", 8, "{:.3f}"), _column("speed_tg", "S_TG t/s", 8, "{:.2f}"),
    _column("t", "T s", 8, "{:.3f}"), _column("speed", "S t/s", 8, "{:.2f}"),
]  # fmt: skip
