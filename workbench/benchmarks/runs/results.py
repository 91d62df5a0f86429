"""Run folders: `run.json`, `samples.parquet`, and for some kinds a timeline or another table.

`run.json`, schema 1; every key is always there:

    schema       int     1
    run_id       str     the folder's name when it was made; every sample carries it
    kind         str     which experiment: `ab`, `bench`, `kernels`, `perplexity`, `sweep`, ...
    name         str     the user's name for the run
    status       str     `complete` or `interrupted`
    started      str     RFC 3339, UTC
    duration_s   float   wall-clock seconds, over all sessions
    command      [str]   the command line
    commit       {hash, number, dirty}              of the checkout, `unknown` outside one
    versions     {package: version | null}          Python and `provenance.PACKAGES`
    machine      {platform, machine, cpu, memory_bytes, load_average, gpus}
    model        {file, hash, architecture, name, quant, n_params, file_bytes, ...}
    engine       {config, device, device_reason, device_description,
                  waiting: how the host waits, idle_sync_us: its time on an idle stream,
                  timer: {tick_ns, error_ns} of the device's clock | null,
                  nvtx: whether there were NVTX ranges, which take time, and a tool to read them}
    seed         int     of every random choice
    tests        [str]   llama-bench test names
    repetitions  int     asked for per arm and test; with `until` in `result`, the most made
    arms         [{name, is_control, toggles, sync_mode, program, counters}]   first: the baseline
    result       {...}   the experiment's own results; its keys belong to `kind`. Of `ab` and
                         `bench`: `energy` has the windows of joules (`energy/windows.py`), or null

`samples.parquet`: one row per timed token, in the order taken; a prompt is one row. (A run of kind
`perplexity` has a row per ubatch, and another file, `tokens.parquet`: see `scores/perplexity.py`.)

    run_id string, arm string, is_control bool, test string,
    repetition int32   from 0, within arm and test
    order int32        running number of the repetition in the run, over all arms
    token int32        from 0, within the repetition
    n_tokens int32     tokens of this row: the prompt's length, or 1
    ns int64           the time of this row, nanoseconds

A save replaces the folder as a whole (`workbench/common/output_swap.py`). If its process is killed,
the folder holds the files of one save, and the next save removes the leftovers. `load_run` reads
files of one save even during another save. Files read by other means may be of two saves while the
folder is written. Folders can be copied between machines.
"""

import dataclasses
import html
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from workbench.benchmarks.runs.provenance import utc_now
from workbench.benchmarks.workload import parse
from workbench.common.errors import UsageError
from workbench.common.output import writing_folder
from workbench.common.output_swap import TEMPORARY, read_files
from workbench.common.tables import Table, to_html
from workbench.config import EngineConfig, Toggles

SCHEMA = 1
RUN_JSON, SAMPLES = "run.json", "samples.parquet"
# a file that makes a folder of run folders one result, and the kind of that result
SWEEP_JSON = "sweep.json"  # `sweep/store.py`
ADVICE_JSON = "advice.json"  # `advise/record.py`
TOGETHER = {SWEEP_JSON: "sweep", ADVICE_JSON: "advise"}
TOGETHER_SCHEMAS = {SWEEP_JSON: 1, ADVICE_JSON: 1}
GROUPS = "groups"  # a sweep's folder of run folders
TABLES = TOKENS, REQUESTS = "tokens.parquet", "requests.parquet"  # of `perplexity`, and of `serve`
COMPLETE, INTERRUPTED = "complete", "interrupted"
NEWER, UNREADABLE = "newer schema", "unreadable"  # how the status of a listed folder begins
CHECKPOINT_SECONDS = 10.0  # between two saves while an experiment runs
DEFAULT_ROOT = Path("data/runs")

RUN_KEYS: dict[str, type | tuple[type, ...]] = {
    "schema": int,
    "run_id": str,
    "kind": str,
    "name": str,
    "status": str,
    "started": str,
    "duration_s": (int, float),
    "command": list,
    "commit": dict,
    "versions": dict,
    "machine": dict,
    "model": dict,
    "engine": dict,
    "seed": int,
    "tests": list,
    "repetitions": int,
    "arms": list,
    "result": dict,
}
ARM_KEYS = ("name", "is_control", "toggles", "sync_mode", "program", "counters")
# what readers of a kind of run take from these
NEEDED: dict[str, dict[str, tuple[str, ...]]] = {
    "ab": {
        "commit": ("hash",), "model": ("name", "quant"), "engine": ("device_description",),
        "result": ("toggle", "answers"),
    },
    "bench": {"commit": ("hash",), "model": ("name",), "engine": ("device_description",)},
}  # fmt: skip

SAMPLE_SCHEMA = pa.schema(
    [
        ("run_id", pa.string()),
        ("arm", pa.string()),
        ("is_control", pa.bool_()),
        ("test", pa.string()),
        ("repetition", pa.int32()),
        ("order", pa.int32()),
        ("token", pa.int32()),
        ("n_tokens", pa.int32()),
        ("ns", pa.int64()),
    ]
)
_DTYPES = {field.name: field.type.to_pandas_dtype() for field in SAMPLE_SCHEMA}


class Run(NamedTuple):
    """A run folder of any kind, as read.

    folder: where it was read from.
    run: run.json as a dict (`benchmarks/README.md` has its keys).
    samples: the table of every timed token, with the columns of samples.parquet.

    `wb.load` reads it, and raises UsageError for a folder that is damaged or no run folder.
    """

    folder: Path
    run: dict[str, Any]
    samples: pd.DataFrame

    def _repr_html_(self) -> str:
        """The run's kind, status, model, device and commit; then a row per test and arm.

        A run folder may come from anyone, so all its text is escaped.
        """
        run = self.run
        facts = {
            "run": f"{run['run_id']}: {run['kind']}, {run['status']}",
            "model": f"{run['model'].get('name')} {run['model'].get('quant')}",
            "device": run["engine"].get("device_description") or run["engine"].get("device"),
            "commit": f"{str(run['commit'].get('hash'))[:8]}, {run['started']}",
            "folder": self.folder,
        }
        lines = "<br>".join(f"{name}: {html.escape(str(v))}" for name, v in facts.items())
        arms = self.samples.groupby(["test", "arm"], sort=False, as_index=False).agg(
            repetitions=("repetition", "nunique"),
            samples=("ns", "size"),
            total_ms=("ns", lambda ns: ns.sum() / 1e6),
        )
        return f"<p>{lines}</p>" + to_html(arms)


class SampleTable:
    """Collects the samples of a run while it is measured, one `add` per repetition."""

    def __init__(self, run_id: str, earlier: pd.DataFrame | None = None):
        self.run_id = run_id
        self._done: list[pd.DataFrame] = [] if earlier is None or earlier.empty else [earlier]
        self._added: list[_Repetition] = []
        self.n_cells = 0 if not self._done else int(self._done[0]["order"].max()) + 1

    def add(
        self,
        arm: str,
        is_control: bool,
        test: str,
        repetition: int,
        token_ns: np.ndarray,
        token_n: np.ndarray,
    ) -> None:
        """One repetition: its times in ns and token counts, both int64 (n_timed,)."""
        self._added.append(
            _Repetition(arm, is_control, test, repetition, self.n_cells, token_ns, token_n)
        )
        self.n_cells += 1

    def frame(self) -> pd.DataFrame:
        """Every sample so far, in the order taken, with the columns of `samples.parquet`."""
        if self._added:
            self._done = [pd.concat([*self._done, self._frame()], ignore_index=True)]
            self._added = []
        if not self._done:
            return pd.DataFrame({k: pd.Series(dtype=t) for k, t in _DTYPES.items()})
        return self._done[0].astype(_DTYPES)[list(_DTYPES)]

    def _frame(self) -> pd.DataFrame:
        """The added repetitions. They become a table together: a table for each would take longer
        than the token that it is of."""
        counts = [len(one.ns) for one in self._added]
        keys = pd.DataFrame([one[:5] for one in self._added], columns=_Repetition._fields[:5])
        made = keys.loc[np.repeat(keys.index, counts)].reset_index(drop=True)
        return made.assign(
            run_id=self.run_id,
            token=np.concatenate([np.arange(n) for n in counts]),
            n_tokens=np.concatenate([one.n_tokens for one in self._added]),
            ns=np.concatenate([one.ns for one in self._added]),
        )


class _Repetition(NamedTuple):
    """A repetition as `SampleTable.add` has it."""

    arm: str
    is_control: bool
    test: str
    repetition: int
    order: int
    ns: np.ndarray
    n_tokens: np.ndarray


def rates(samples: pd.DataFrame) -> pd.DataFrame:
    """Tokens per second of every repetition: columns arm, is_control, test, repetition, order,
    n_tokens, ns, tps; in the order taken."""
    keys = ["arm", "is_control", "test", "repetition", "order"]
    table = samples.groupby(keys, sort=False, as_index=False)[["n_tokens", "ns"]].sum()
    table["tps"] = table["n_tokens"] * 1e9 / table["ns"]
    return table.sort_values("order", ignore_index=True)


PERCENTILES = (50, 90, 99)


def token_times(single_ns: np.ndarray, first_ns: np.ndarray) -> dict[str, float]:
    """p50_us, p90_us and p99_us of generated tokens, NaN without any, and ttft_us, the median of
    the times to first token. single_ns, first_ns: int64 (n,), ns."""
    found = np.percentile(single_ns / 1e3, PERCENTILES) if len(single_ns) else [math.nan] * 3
    named = {f"p{p}_us": float(us) for p, us in zip(PERCENTILES, found, strict=True)}
    return named | {"ttft_us": float(np.median(first_ns)) / 1e3}


def percentiles(samples: pd.DataFrame) -> Table:
    """How long single tokens took: one row per test and arm, in the order measured; us.

    Columns: test, arm, is_control, n_tokens (generated tokens of all repetitions), p50_us, p90_us,
    p99_us (of these tokens; NaN where the test generates none), ttft_us (time to first token:
    median over the repetitions). The first token of a test with a prompt takes the whole prompt;
    without a prompt it is the first generated token. Nothing is tokenised or sampled.
    """
    rows = []
    for (test, arm, is_control), part in samples.groupby(["test", "arm", "is_control"], sort=False):
        ns, is_first = part["ns"].to_numpy(), part["token"].to_numpy() == 0
        single = ns[~is_first] if parse(str(test)).n_prompt else ns
        rows.append(
            {"test": test, "arm": arm, "is_control": bool(is_control), "n_tokens": len(single)}
            | token_times(single, ns[is_first])
        )
    columns = ["test", "arm", "is_control", "n_tokens", "p50_us", "p90_us", "p99_us", "ttft_us"]
    return Table(rows, columns=columns)


class NewerSchema(UsageError):
    """A run folder that a later Workbench wrote."""


def check_schema(schema: Any, known: int, file: str, where: str | Path) -> None:
    """Raises UsageError, with `where` and the file's name, where its schema is not `known`; for a
    newer schema NewerSchema."""
    if isinstance(schema, int) and schema > known:
        raise NewerSchema(
            f"{where}: schema {schema} of {file} is newer than {known}, the newest that this "
            "version reads; install the Workbench that wrote it, or a later one"
        )
    if schema != known:
        raise UsageError(f"{where}: schema {schema!r} of {file} is not {known}")


def check_run(run: Any, where: str | Path) -> None:
    """Raises UsageError, with `where` and the key, where `run` is not of schema 1."""
    if not isinstance(run, Mapping):
        raise UsageError(f"{where}: run.json is no object")
    check_schema(run.get("schema"), SCHEMA, RUN_JSON, where)
    for key, kind in RUN_KEYS.items():
        if not isinstance(run.get(key), kind):
            raise UsageError(f"{where}: run.json has no valid {key!r}")
    if run["status"] not in (COMPLETE, INTERRUPTED):
        raise UsageError(f"{where}: status {run['status']!r} of run.json does not exist")
    for part, keys in NEEDED.get(run["kind"], {}).items():
        if absent := [key for key in keys if key not in run[part]]:
            raise UsageError(f"{where}: {part!r} in run.json has no {absent[0]!r}")
    if not _is_pace(run["result"].get("pace", {})):
        raise UsageError(f"{where}: 'pace' in the result of run.json has no us by test and round")
    if not all(isinstance(test, str) for test in run["tests"]):
        raise UsageError(f"{where}: a test in run.json is no text")
    if run["seed"] < 0:
        raise UsageError(f"{where}: seed {run['seed']} of run.json is below 0")
    if run["kind"] in NEEDED and not run["arms"]:
        raise UsageError(f"{where}: run.json has no arm")
    for arm in run["arms"]:
        missing = [key for key in ARM_KEYS if not isinstance(arm, dict) or key not in arm]
        if missing:
            raise UsageError(f"{where}: an arm in run.json has no {missing[0]!r}")


def _is_pace(found: object) -> bool:
    """Whether a value is what a comparison notes of its host (`compare/pace.py`)."""
    if not isinstance(found, dict) or not found:
        return found == {}
    tests = found.get("tests")
    if not isinstance(tests, dict) or not all(isinstance(us, list) for us in tests.values()):
        return False
    every = [us for rounds in tests.values() for us in rounds if us is not None]
    return all(
        isinstance(us, int | float) and 0 < us < math.inf for us in (found.get("least_us"), *every)
    )


def new_run_folder(root: str | Path = DEFAULT_ROOT, name: str = "run") -> Path:
    """A path under `root` that does not exist yet: date, time and `name`. Nothing is created."""
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "run"
    stamp = re.sub(r"[:-]", "", utc_now()).replace("T", "-").rstrip("Z")
    folder = Path(root) / f"{stamp}-{slug}"
    number = 2
    while folder.exists():
        folder = Path(root) / f"{stamp}-{slug}-{number}"
        number += 1
    return folder


def write_run(
    folder: str | Path,
    run: Mapping[str, Any],
    samples: pd.DataFrame,
    tables: Mapping[str, pd.DataFrame] | None = None,
    new: bool = False,
) -> Path:
    """Writes `run`, `samples` and further `tables` (by file name) as a run folder; returns its
    path.

    An existing folder is replaced as a whole: a reader finds the files of this save or of an
    earlier save, never a mixture. Other files (a timeline) stay, except tables of another run.
    new: the folder must not exist, except as an earlier save of this run.
    Raises UsageError where `run` is not of schema 1 or the folder cannot be written.
    """
    folder = Path(folder)
    check_run(run, folder)
    table = pa.Table.from_pandas(samples, schema=SAMPLE_SCHEMA, preserve_index=False)
    text = json.dumps(run, indent=1, ensure_ascii=False, default=_plain) + "\n"
    others = {
        name: pa.Table.from_pandas(frame, preserve_index=False)
        for name, frame in (tables or {}).items()
    }
    saved = _holds(folder, run)
    without = () if saved else TABLES
    with writing_folder(folder, new=new and not saved, without=without) as made:
        for name, content in (others | {SAMPLES: table}).items():
            with made.writing(name) as file:
                pq.write_table(content, file, compression="zstd")
        with made.writing(RUN_JSON, "t") as file:
            file.write(text)
    return folder


def _holds(folder: Path, run: Mapping[str, Any]) -> bool:
    """Whether the folder holds an earlier save of the same run."""
    try:
        old = json.loads((folder / RUN_JSON).read_text(encoding="utf-8"))
        return all(old[key] == run[key] for key in ("run_id", "kind", "started"))
    except (OSError, ValueError, TypeError, KeyError):  # no run, or a damaged one
        return False


def origin(run: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Where the rows of a run's frame come from: model, device, settings, then `more`, and commit,
    run_id and date (UTC). So frames of several runs can be concatenated."""
    model, engine = run["model"], run["engine"]
    return {
        "model": " ".join(filter(None, (model.get("name"), model.get("quant")))),
        "device": engine.get("device_description") or engine.get("device"),
        "settings": settings_said(run) or "default",
        **more,
        "commit": str(run["commit"]["hash"])[:8],
        "run_id": run["run_id"],
        "date": str(run["started"])[:10],
    }


def taken(run: Mapping[str, Any]) -> str:
    """The commit and the time (UTC) of a run: `commit 1a2b3c4d, 2026-11-29T05:35:29Z`."""
    return f"commit {str(run['commit']['hash'])[:8]}, {run['started']}"


def settings_said(run: Mapping[str, Any]) -> str:
    """The settings of a run's engine that are not EngineConfig's defaults, without its device:
    `n_seqs=4, n_ubatch=128`."""
    usual = dataclasses.asdict(EngineConfig())
    own = {
        name: value
        for name, value in (run["engine"].get("config") or {}).items()
        if name != "device"
        and usual.get(name) != (tuple(value) if isinstance(value, list) else value)
    }
    return ", ".join(f"{name}={value}" for name, value in own.items())


def finite(value: Any) -> Any:
    """`value`, with None for NaN and infinity, which JSON does not have. Goes into dicts and
    lists."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _plain(value: Any) -> Any:
    """NumPy scalars and paths as plain numbers and text, for JSON."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} does not belong into run.json")


# Reworded texts of a device: the key of `engine`, a pattern of the old words, today's words.
REWORDED = (
    ("device_description", r"^(embedded device, \d+) lanes\b", r"\1 workers"),
    ("waiting", r"\bidle lanes\b", "idle workers"),
)
SETTINGS = {
    field.name: list(field.default) if isinstance(field.default, tuple) else field.default
    for field in dataclasses.fields(EngineConfig)
    if field.name not in ("device", "n_ctx", "n_ubatch", "n_kv_pad", "threads")  # in every run.json
}


def in_todays_words(run: dict[str, Any]) -> dict[str, Any]:
    """Changes a run.json of any commit in place: today's words, and today's keys. A recorded run
    folder is never rewritten. A commit that renames a toggle, a value or a key of run.json adds the
    renaming here.

    A missing toggle or setting gets its default: before it existed, engines did what the default
    does now. A perplexity run without result.n_ubatch computed its engine's n_ubatch tokens at
    once. One toggle is an exception: attention on a GPU split its cells
    (kv_parts=parallel_blocks) before the toggle existed. Such a run is read with the toggle off,
    because its pages show it with everything off.
    """
    engine = run["engine"]
    for key, old, new in REWORDED:
        if isinstance(engine.get(key), str):
            engine[key] = re.sub(old, new, engine[key])
    config = engine.get("config")
    if run["kind"] == "kernels" or not isinstance(config, dict):
        return run
    config.update(SETTINGS | config)
    for arm in run["arms"]:
        if isinstance(toggles := arm["toggles"], dict) and toggles:  # empty: not our engine
            toggles.update(Toggles().to_dict() | toggles)
    if run["kind"] == "perplexity":
        run["result"].setdefault("n_ubatch", config.get("n_ubatch"))
    return run


def load_run(folder: str | Path) -> Run:
    """Reads a run folder, in today's words (`in_todays_words`). Raises UsageError, in one line,
    where the folder is no run folder or is damaged."""
    return load_tables(folder)[0]


def load_tables(folder: str | Path, *names: str) -> tuple[Run, list[pd.DataFrame]]:
    """As `load_run`, with the tables of these file names. All files are of one save."""
    folder = Path(folder)
    try:
        text, *contents = read_files(folder, RUN_JSON, SAMPLES, *names)
        run = json.loads(text.decode("utf-8"))
        check_run(run, folder)
        in_todays_words(run)
        samples, *tables = (pq.read_table(pa.BufferReader(content)) for content in contents)
    except FileNotFoundError as error:
        if not folder.exists():
            raise UsageError(
                f"{folder} is no run folder: it does not exist; `workbench runs ls` lists run "
                "folders"
            ) from error
        missing = Path(str(error.filename)).name
        if missing in names:  # the files of every run were there: they are read first
            has = [name for name in (SAMPLES, *TABLES) if (folder / name).is_file()]
            raise UsageError(
                f"{folder} has no table {missing.removesuffix('.parquet')}; it has "
                + ", ".join(name.removesuffix(".parquet") for name in has)
            ) from error
        kind = together(folder)
        raise UsageError(
            f"{folder} is no run folder: {missing} is missing"
            + (f"; it is a result of {kind}, and below it are run folders" if kind else "")
        ) from error
    except NotADirectoryError as error:
        raise no_folder(folder) from error
    except (OSError, ValueError, pa.ArrowException) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{folder} cannot be read: {str(error).splitlines()[0]}") from error
    _check_columns(samples.schema, folder)
    return (
        Run(folder, run, samples.to_pandas().astype(_DTYPES)),
        [table.to_pandas() for table in tables],
    )


def _check_columns(schema: pa.Schema, folder: Path) -> None:
    if schema.names != SAMPLE_SCHEMA.names:
        raise UsageError(f"{folder}: samples.parquet has columns {schema.names}")


def no_folder(file: Path) -> UsageError:
    """The error of a file that was given in place of a run folder."""
    what = "`workbench runs ls` lists run folders"
    if file.suffix == ".zip":  # of `workbench runs export`
        what = f"unpack it first (unzip {file}), and name the folder that was in it"
    return UsageError(f"{file} is no run folder: it is a file; {what}")


def together(folder: Path) -> str:
    """What the run folders below a folder are together: `sweep`, `advise`, or nothing."""
    return next((kind for file, kind in TOGETHER.items() if (folder / file).is_file()), "")


def together_status(folder: Path) -> str:
    """COMPLETE, or why the file that makes this folder one result cannot be read, as `runs` says
    it."""
    try:
        for file, kind in TOGETHER.items():
            if (folder / file).is_file():
                read_together(folder, file, kind)
    except UsageError as error:
        return _refused(error, folder)
    return COMPLETE


def _refused(error: Exception, folder: Path) -> str:
    """The status of a folder that cannot be read."""
    why = NEWER if isinstance(error, NewerSchema) else UNREADABLE
    return f"{why}: {'' if str(folder) in str(error) else f'{folder}: '}{error}"


def read_together(folder: Path, file: str, what: str) -> dict[str, Any]:
    """The content of a `file` of TOGETHER. Raises UsageError, in one line, where it is missing,
    cannot be read, or is of another schema. what: `sweep`, or `advice`."""
    try:
        found = json.loads((folder / file).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(f"{folder} is no {what}: {file} is missing") from error
    except (OSError, ValueError) as error:
        said = str(error).splitlines()[0]
        raise UsageError(f"{folder / file} cannot be read: {said}") from error
    made: dict[str, Any] = found if isinstance(found, dict) else {}
    check_schema(made.get("schema"), TOGETHER_SCHEMAS[file], file, folder)
    return made


def runs(root: str | Path = DEFAULT_ROOT) -> pd.DataFrame:
    """The runs under `root`, oldest first: one row per folder with a run.json, readable or not.

    Columns: run_id, started, kind, name, status, model, device, tests, arms, repetitions, commit,
    duration_s, folder, part_of (the folder of the sweep or the advice to which the run belongs).
    A folder that cannot be read has the reason as its status, after `newer schema: ` or
    `unreadable: `.
    """
    rows, holders = list[dict[str, Any]](), dict[Path, str]()
    for path in sorted(Path(root).glob(f"**/{RUN_JSON}")):
        inside = path.relative_to(root).parts
        if any(part.startswith(TEMPORARY) for part in inside):  # a save, or its leftovers
            continue
        try:
            rows.append(_row(path.parent))
        except (OSError, ValueError, KeyError, pa.ArrowException) as error:  # or UsageError
            status = _refused(error, path.parent)
            rows.append({"run_id": path.parent.name, "status": status, "folder": str(path.parent)})
        rows[-1]["part_of"] = _part_of(path.parent, len(inside) - 1, holders)
    columns = [
        "run_id", "started", "kind", "name", "status", "model", "device", "tests", "arms",
        "repetitions", "commit", "duration_s", "folder", "part_of",
    ]  # fmt: skip
    table = pd.DataFrame(rows, columns=columns)
    return table.sort_values(["started", "run_id"], ignore_index=True, na_position="first")


def _part_of(folder: Path, most: int, holders: dict[Path, str]) -> str:
    """The nearest of at most `most` folders above that is one result; empty where none is.
    holders: what is known of folders, which grows."""
    for above in folder.parents[:most]:
        if above not in holders:
            holders[above] = together(above)
        if holders[above]:
            return str(above)
    return ""


def _row(folder: Path) -> dict[str, Any]:
    run = json.loads((folder / RUN_JSON).read_text(encoding="utf-8"))
    check_run(run, folder)
    _check_columns(pq.read_schema(folder / SAMPLES), folder)  # of a file that is cut it fails
    same = ("run_id", "started", "kind", "name", "status", "repetitions", "duration_s")
    return {key: run[key] for key in same} | {
        "model": f"{run['model'].get('name')} {run['model'].get('quant')}",
        "device": run["engine"].get("device"),
        "tests": ", ".join(run["tests"]),
        "arms": ", ".join(arm["name"] for arm in run["arms"]),
        "commit": str(run["commit"].get("hash"))[:8],
        "folder": str(folder),
    }
