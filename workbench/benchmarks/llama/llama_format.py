"""llama-bench's rows and its five formats: md, csv, json, jsonl, sql.

FIELDS is the contract: names, order and types of the columns that `tools/llama-bench` writes
(`test::get_fields`, `get_field_type`) and that `scripts/compare-llama-bench.py` reads
(LLAMA_BENCH_DB_FIELDS). The script reads two files of CSV or JSON, or one file of JSONL or SQLite
with both sides. It tells the sides apart by build_commit alone. All formats but SQLite need the
option `-t llama-bench`:

    compare-llama-bench.py -t llama-bench -b <build A> -c <build B> -i a.json -i b.json
"""

from __future__ import annotations

import csv
import io
import json
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from workbench.benchmarks.compare.until import RepeatEnd
from workbench.benchmarks.energy import joules
from workbench.benchmarks.runs import results
from workbench.benchmarks.workload import Sample, Workload
from workbench.common.errors import UsageError
from workbench.common.nearest import choices
from workbench.common.tables import markdown
from workbench.config import Toggles, said_toggles

FIELDS: dict[str, type] = {
    "build_commit": str, "build_number": int, "cpu_info": str, "gpu_info": str, "backends": str,
    "model_filename": str, "model_type": str, "model_size": int, "model_n_params": int,
    "n_batch": int, "n_ubatch": int, "n_threads": int, "cpu_mask": str, "cpu_strict": bool,
    "poll": int, "type_k": str, "type_v": str, "n_gpu_layers": int, "n_cpu_moe": int,
    "split_mode": str, "main_gpu": int, "no_kv_offload": bool, "flash_attn": int, "devices": str,
    "tensor_split": str, "tensor_buft_overrides": str, "load_mode": str, "lazy_mode": str,
    "embeddings": bool, "no_op_offload": int, "no_host": bool, "repack": bool, "fit_target": int,
    "fit_min_ctx": int, "n_prompt": int, "n_gen": int, "n_depth": int, "test_time": str,
    "avg_ns": int, "stddev_ns": int, "avg_ts": float, "stddev_ts": float,
}  # fmt: skip
# ours, after llama-bench's fields in json and jsonl, whose reader skips unknown fields
TOKEN_FIELDS = ("p50_us", "p90_us", "p99_us", "ttft_us")
SQL_TYPES: dict[type, str] = {str: "TEXT", int: "INTEGER", bool: "INTEGER", float: "REAL"}
TABLE = "llama_bench"
FORMATS = ("md", "csv", "json", "jsonl", "sql")


class BenchRow(NamedTuple):
    """A measured test.

    samples: the repetitions, in the order taken.
    fields: every name of FIELDS but the four statistics.
    toggles: all toggles of the engine.
    ended: how repeating ended (`until.RepeatEnd` as a dict); empty for a fixed number of
        repetitions.
    energy: joules a token (`energy/joules.py`: a row); empty where energy was not measured.
    """

    workload: Workload
    samples: list[Sample]
    fields: dict[str, Any]
    toggles: dict[str, str]
    ended: dict[str, Any]
    energy: dict[str, Any]

    @property
    def samples_ns(self) -> list[int]:
        return [s.ns_total for s in self.samples]

    @property
    def samples_ts(self) -> list[float]:
        """Tokens per second of each repetition: (n_prompt + n_gen) / time."""
        return [1e9 * self.workload.n_tokens / ns for ns in self.samples_ns]

    def line(self) -> str:
        """The rate, and how repeating ended where the number was not fixed."""
        said = f"{self.workload.name}: {self.values()['avg_ts']:.2f} t/s"
        if not self.ended:
            return said
        ended = RepeatEnd(**self.ended).line(rounds="repetitions", of="the median's")
        return f"{said}; {ended}"

    def tokens(self) -> dict[str, Any]:
        """TOKEN_FIELDS, us: percentiles of single tokens (None where the test generates none) and
        the time to first token; see `results.percentiles`."""
        after_prompt = slice(1 if self.workload.n_prompt else 0, None)
        single = np.concatenate([s.token_ns[after_prompt] for s in self.samples])
        first = np.array([s.token_ns[0] for s in self.samples])
        return dict(results.finite(results.token_times(single, first)))

    def values(self) -> dict[str, Any]:
        """The row under llama-bench's names, in its order and types."""
        ns, ts = np.array(self.samples_ns, float), np.array(self.samples_ts)
        found = self.fields | {
            "avg_ns": int(ns.mean()),
            "stddev_ns": int(_stddev(ns)),
            "avg_ts": float(ts.mean()),
            "stddev_ts": _stddev(ts),
        }
        return {name: kind(found[name]) for name, kind in FIELDS.items()}


def _stddev(values: np.ndarray) -> float:
    """Standard deviation of the sample (n - 1); 0 for one repetition, as in llama-bench."""
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0


def format_rows(rows: Sequence[BenchRow], fmt: str = "md", width: int | None = None) -> str:
    """Rows as text in one of FORMATS, ending in a newline; raises UsageError for another format.

    width: of the terminal, for md. Where llama-bench's table is wider, the columns that are the
        same in all rows are printed above a narrower table.
    """
    if fmt == "md":
        return _md(rows, width)
    return data_of(fmt, TABLE, FIELDS, (row.values() for row in rows), map(_object, rows))


def data_of(
    fmt: str,
    table: str,
    fields: Mapping[str, type],
    rows: Iterable[Mapping[str, Any]],
    objects: Iterable[Mapping[str, Any]],
) -> str:
    """Rows as text in one of FORMATS but md; raises UsageError for another format. rows: the values
    of `fields`, for csv and sql (as a `table`). objects: for json and jsonl."""
    if fmt == "csv":
        return csv_of(fields, rows)
    if fmt == "sql":
        return sql_of(table, fields, rows)
    if fmt == "json":
        return json_of(objects)
    if fmt == "jsonl":
        return "".join(json.dumps(one) + "\n" for one in objects)
    raise UsageError(f"format {fmt!r} does not exist; {choices(fmt, FORMATS)}")


def _plain(value: Any) -> str:
    """A value as llama-bench prints it in csv and sql: booleans 0 and 1, reals with six digits."""
    if isinstance(value, bool):
        return str(int(value))
    return f"{value:.6f}" if isinstance(value, float) else str(value)


def csv_of(fields: Iterable[str], rows: Iterable[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    text.write(",".join(fields) + "\n")
    writer = csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerows([_plain(v) for v in row.values()] for row in rows)
    return text.getvalue()


def _object(row: BenchRow) -> dict[str, Any]:
    """llama-bench's JSON object, and after its keys ours: times of single tokens, toggles."""
    return (
        row.values()
        | row.tokens()
        | {
            "samples_ns": row.samples_ns,
            "samples_ts": row.samples_ts,
            "token_ns": [s.token_ns.tolist() for s in row.samples],
            "toggles": row.toggles,
        }
        | energy_object(row)
    )


def energy_object(row: BenchRow) -> dict[str, Any]:
    """The energy of a row as a key of its JSON object; empty where it was not measured."""
    return {"energy": results.finite(row.energy)} if row.energy else {}


def json_of(objects: Iterable[Mapping[str, Any]]) -> str:
    lines = [
        "  {\n"
        + ",\n".join(f"    {json.dumps(k)}: {json.dumps(v)}" for k, v in one.items())
        + "\n  }"
        for one in objects
    ]
    return "[\n" + ",\n".join(lines) + "\n]\n"


def sql_of(table: str, fields: Mapping[str, type], rows: Iterable[Mapping[str, Any]]) -> str:
    columns = ",\n".join(f"  {name} {SQL_TYPES[kind]}" for name, kind in fields.items())
    text = [f"CREATE TABLE IF NOT EXISTS {table} (\n{columns}\n);\n\n"]
    for row in rows:
        values = ", ".join("'" + _plain(v).replace("'", "''") + "'" for v in row.values())
        text.append(f"INSERT INTO {table} ({', '.join(fields)}) VALUES ({values});\n")
    return "".join(text)


class Column(NamedTuple):
    """A column of the md table: heading, width (negative: aligned left), text of a row."""

    heading: str
    width: int
    text: Callable[[BenchRow], str]


def _field(name: str, heading: str, width: int) -> Column:
    return Column(heading, width, lambda row: _plain(row.values()[name]))


def _toggle(name: str) -> Column:
    width = max(map(len, (name, *Toggles.values(name))))
    return Column(name, -width, lambda row: row.toggles[name])


def varying_toggles(rows: Sequence[BenchRow]) -> list[Column]:
    """A column for each toggle that is not the same in every row."""
    return [
        _toggle(name) for name in Toggles.names() if len({row.toggles[name] for row in rows}) > 1
    ]


def _md(rows: Sequence[BenchRow], width: int | None) -> str:
    """llama-bench's table: threads on a CPU, ngl on a GPU, and options that vary or are not
    default.

    The toggles that all rows share are printed above the table. Toggles that vary have columns. A
    second table has the percentiles of single tokens and the time to first token.
    """
    if not rows:
        return ""
    columns = [
        Column("model", -30, lambda row: row.fields["model_type"]),
        Column("size", 10, lambda row: _bytes(row.fields["model_size"])),
        Column("params", 10, lambda row: _count(row.fields["model_n_params"])),
        Column("backend", -10, lambda row: row.fields["backends"]),
    ]
    on_gpu = any(row.fields["gpu_info"] for row in rows)
    for name, heading, wide, usual in (
        ("n_threads", "threads", 7, not on_gpu), ("n_gpu_layers", "ngl", 3, on_gpu),
    ):  # fmt: skip
        if usual or len({row.fields[name] for row in rows}) > 1:
            columns.append(_field(name, heading, wide))
    if any(row.fields["n_ubatch"] != 512 for row in rows):
        columns.append(_field("n_ubatch", "n_ubatch", 8))
    columns += varying_toggles(rows)
    columns.append(Column("test", 15, _test))
    columns.append(Column("t/s", 20, _rate))
    energy = energy_columns(rows)
    names = [c for c in columns[:-2] if len({c.text(row) for row in rows}) > 1]
    first = rows[0].fields
    shared = f"toggles: {shared_toggles(rows)}"
    above = "\n".join(textwrap.wrap(shared, width or len(shared), break_on_hyphens=False))
    tables = (
        table_of(each, rows, width) for each in ([*columns, *energy], [*names, *_TOKEN_COLUMNS])
    )
    build = f"build: {first['build_commit']} ({first['build_number']})\n"
    return "\n\n".join([above, *tables, build])


def table_of(columns: Sequence[Column], rows: Sequence[BenchRow], width: int | None) -> str:
    lines = []
    cells = [[c.heading for c in columns]] + [[c.text(row) for c in columns] for row in rows]
    for line in cells:
        padded = (
            t.rjust(c.width) if c.width > 0 else t.ljust(-c.width)
            for t, c in zip(line, columns, strict=True)
        )
        lines.append("| " + " | ".join(padded) + " |")
    rule = ("-" * (abs(c.width) - 1) + ("-" if c.width < 0 else ":") for c in columns)
    lines.insert(1, "| " + " | ".join(rule) + " |")
    if width is not None and len(lines[0]) > width:
        frame = pd.DataFrame(cells[1:], columns=cells[0])
        frame.attrs["right"] = [c.heading for c in columns if c.width > 0]
        return markdown(frame, width)
    return "\n".join(lines)


def energy_columns(rows: Sequence[BenchRow]) -> list[Column]:
    """The column of joules a token; none where no row has them."""
    energy = Column("J/token", 16, lambda row: joules.cell(row.energy))
    return [energy] if any(row.energy for row in rows) else []


def shared_toggles(rows: Sequence[BenchRow]) -> str:
    """The toggles that are not off and the same in every row: `sync=packed, fuse=on`."""
    first = rows[0].toggles
    return said_toggles(
        {n: v for n, v in first.items() if all(row.toggles[n] == v for row in rows)}
    )


def _us(name: str) -> Callable[[BenchRow], str]:
    def text(row: BenchRow) -> str:
        us = row.tokens()[name]
        return "-" if us is None else f"{us:,.1f}"

    return text


def _test(row: BenchRow) -> str:
    return row.workload.name.replace("@", " @ ")


_TOKEN_COLUMNS = [
    Column("test", 15, _test),
    Column("token p50 us", 12, _us("p50_us")),
    Column("p90 us", 12, _us("p90_us")),
    Column("p99 us", 12, _us("p99_us")),
    Column("first token us", 14, _us("ttft_us")),
]


def _rate(row: BenchRow) -> str:
    values = row.values()
    return f"{values['avg_ts']:.2f} ± {values['stddev_ts']:.2f}"


def _bytes(n: int) -> str:
    return f"{n / 2**20:.2f} MiB" if n < 2**30 else f"{n / 2**30:.2f} GiB"


def _count(n: int) -> str:
    return f"{n / 1e6:.2f} M" if n < 1e9 else f"{n / 1e9:.2f} B"
