"""Perplexity: how well a model predicts tokens, and whether a faster engine predicts the same.

Every token is scored by the logits of the token before it, in windows of n_ctx. Each window begins
with an empty cache:

    inputs    BOS t1 t2 ... t(n-1)      computed in ubatches, with the logits of every row
    targets   t1  t2 t3 ... tn          scored: NLL = -log softmax(row)[target], natural log

Some models' files name no BOS, or say to leave it out. Then the first input is the token before the
window, and the very first token is not scored. llama-perplexity differs in one point: it scores
only the second half of every window. So its tokens have more context, and its perplexity is lower.

With a second engine on the same weights (`against`) both engines are fed the same tokens. Every row
of logits a is compared with the reference's row b:

    KL      sum softmax(b) * (log softmax(b) - log softmax(a)), in nats: the loss of using a for b
    NMSE    sum (a - b)^2 / sum b^2, over all rows together, and of the worst row
    argmax  share of rows with the same argmax, and rows that break the rule of `compare_logits`

The number of tokens computed at once decides which kernels are judged: at 1 the decode kernels, at
hundreds the prefill kernels. So the same tokens can be scored at several sizes, each as a run of
its own. One reference serves all sizes. It computes the tokens once, n_ubatch at a time.

Logits arrive as float32 and are reduced in float64, n_ubatch rows at a time. All logits of 2,048
tokens of a vocabulary of 128,256 would be 1 GB for each size.

The run folder has kind `perplexity`; its result.n_ubatch is how many tokens the engine computed at
once. A further file, `tokens.parquet`, has a row per scored token:

    run_id string, window int32, place int32 (row in the window), token int32 (the target),
    nll float64, and with a reference: nll_reference float64, kl float64,
    error float64 (sum of (a-b)^2), power float64 (sum of b^2), same_argmax bool
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from workbench.benchmarks.runs import provenance, results
from workbench.benchmarks.runs.draft import (
    Draft,
    check_same,
    kept,
    new_arm,
    new_run,
    open_out,
    open_outs,
    session_of,
    take_over,
)
from workbench.benchmarks.runs.results import TOKENS
from workbench.benchmarks.scores.divergence import Agreement, Estimate, compare_rows, score
from workbench.benchmarks.scores.token_source import Source, TokenWindow
from workbench.benchmarks.workload import check_untraced
from workbench.common.errors import UsageError
from workbench.common.progress import Bar, bar
from workbench.common.sizes import counted
from workbench.config import BASELINE, FAMILIES, TogglePreset, Toggles
from workbench.config.presets import fixed_presets
from workbench.engine.finite import first_bad_row, not_finite
from workbench.trace.spans import now_ns

if TYPE_CHECKING:
    from workbench.engine.engine import Engine

ENGINE_ARM, REFERENCE_ARM = "engine", "reference"
Times = list[tuple[int, int]]  # (ns, tokens) of every step


# the result --------------------------------------------------------------------------------------


class Perplexity(NamedTuple):
    """The result of a run.

    run: run.json as a dict.
    tokens: the table tokens.parquet.
    folder: the run folder.
    engine: the engine's estimate.
    reference, agreement: None without a second engine.
    """

    run: dict[str, Any]
    tokens: pd.DataFrame
    folder: Path
    engine: Estimate
    reference: Estimate | None
    agreement: Agreement | None

    @property
    def n_ubatch(self) -> int:
        """How many tokens the engine computed at once."""
        return int(self.run["result"]["n_ubatch"])

    @property
    def interrupted(self) -> bool:
        return bool(self.run["status"] == results.INTERRUPTED)

    def lines(self) -> list[str]:
        """The result as text."""
        n_windows = int(self.tokens["window"].iloc[-1]) + 1
        n_ctx, size = self.run["result"]["n_ctx"], self.n_ubatch
        windows = counted(n_windows, "window")
        said = [f"tokens      {self.engine.n} in {windows} of up to {n_ctx}, {size} at a time"]
        said.append(f"engine      {self.engine}")
        if self.reference is not None:
            said.append(f"reference   {self.reference}")
        return said + (self.agreement.lines() if self.agreement is not None else [])


# measuring ---------------------------------------------------------------------------------------


def perplexity(
    engine: Engine,
    source: Source,
    *,
    against: Toggles | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Perplexity:
    """Scores the tokens of `source` with `engine`, window by window, n_ubatch tokens at a time.

    against: toggles of a reference engine on the same weights; the two are compared.
    out: the run folder (default: a new folder in `data/runs`), written at the end and on the way.
    resume: continue the run in `out`; its windows are kept, and not scored again.
    progress(tokens scored, tokens in all): called after every window.

    Ctrl-C ends the measuring: finished windows are saved and returned, marked interrupted. They are
    saved, too, when the device fails, before the error is raised. Raises UsageError for a folder
    that exists (or, with `resume`, holds another run), and for a traced engine. Raises DeviceError
    for toggles that the device cannot honour. Raises ModelFileError or WorkbenchError for logits
    that are not finite.
    """
    if out is None:
        open_out(out, resume)
    folder = Path(out) if out is not None else results.new_run_folder(name=f"ppl-{source.label}")
    return perplexity_by_size(
        engine, source, {engine.config.n_ubatch: folder}, against=against, resume=resume,
        progress=progress,
    )[0]  # fmt: skip


def perplexity_by_size(
    engine: Engine,
    source: Source,
    folders: dict[int, Path],
    *,
    against: Toggles | None = None,
    resume: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> list[Perplexity]:
    """As `perplexity`, once for each size: how many tokens to compute at once.

    folders: the run folder by size. The reference computes n_ubatch tokens at a time, once for all
    sizes. With `resume` each size scores its missing windows; a size without a folder begins.

    Raises UsageError also for no size, and for a size outside 1..n_ubatch.
    """
    check_untraced(engine)
    earlier = check_folders(folders, engine.config.n_ubatch, resume)
    with ExitStack() as opened:
        reference = None
        if against is not None:
            reference = engine.variant(against)
            opened.callback(reference.close)
            reference.cache.room.check(0, min(source.n_tokens, engine.cache.n_ctx_seq))
        records: list[_Record] = []
        for (size, folder), held in zip(folders.items(), earlier, strict=True):
            side = engine
            if records:  # each size needs its own cache
                side = engine.variant(engine.toggles)
                opened.callback(side.close)
            records.append(_Record(side, reference, source, folder, size, held is not None))
        n_left = [source.n_tokens - record.n_tokens for record in records]
        n_left += [max(n_left)] * (reference is not None)
        left = opened.enter_context(bar(source.label, sum(n_left), "tokens"))
        windows = source.after(max((record.windows for record in records), key=len))
        with kept(*(record.draft for record in records)):
            for number, window in enumerate(windows):
                missing = [record for record in records if len(record.windows) <= number]
                if not missing:
                    continue
                try:
                    _measure(missing, reference, window, number, left)
                except KeyboardInterrupt:  # the interrupted step still reads staging memory
                    engine.backend.synchronize()
                    raise
                if progress is not None:
                    progress(records[0].n_tokens, source.n_tokens)
                for record in records:
                    record.draft.checkpoint()
        return [record.found() for record in records if record.n_tokens]


def _measure(
    records: list[_Record], reference: Engine | None, window: TokenWindow, number: int, left: Bar
) -> None:
    """Computes a window for all records, and then adds it to every record."""
    sides = [record.engine for record in records]
    for side in (*sides, *([] if reference is None else [reference])):
        side.reset()
    parts: list[list[dict[str, np.ndarray]]] = [[] for _ in records]
    times: list[Times] = [[] for _ in records]
    reference_times: Times = []
    block = sides[0].config.n_ubatch
    for i in range(0, len(window.inputs), block):
        inputs, targets = window.inputs[i : i + block], np.asarray(window.targets[i : i + block])
        wanted = None
        if reference is not None:
            wanted = _rows(reference, inputs, block, reference_times, left)
        for record, part, taken in zip(records, parts, times, strict=True):
            rows = _rows(record.engine, inputs, record.size, taken, left)
            if (bad := first_bad_row(rows)) is not None:
                raise not_finite(record.engine.model, i + bad)
            if wanted is None:
                columns = {"nll": score(rows, targets)}
            else:
                columns = compare_rows(rows, wanted, targets)
            part.append(columns | {"token": targets})
    for record, part, taken in zip(records, parts, times, strict=True):
        columns = {key: np.concatenate([piece[key] for piece in part]) for key in part[0]}
        every = [taken] if reference is None else [taken, reference_times]
        record.add(number, columns, every)


def _rows(engine: Engine, inputs: Sequence[int], size: int, times: Times, left: Bar) -> np.ndarray:
    """The logits of `inputs`, float32 (n, n_vocab), computed `size` at a time. Adds to `times`, and
    updates the bar `left`."""
    begins, parts = range(0, len(inputs), size), []
    counts = [min(size, len(inputs) - i) for i in begins]
    engine.make_ready(engine.rehearsal.alone(0, [(n, n) for n in counts]))
    for i, n in zip(begins, counts, strict=True):
        start = now_ns()
        parts.append(engine.step(inputs[i : i + n], "all"))
        times.append((now_ns() - start, n))
        left.update(times[-1][1])
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


class _Record:
    """The run folder of a size while it is measured; it has finished windows only.

    size: how many tokens the engine computes at once.
    windows: the targets of each window.
    """

    def __init__(
        self, engine: Engine, reference: Engine | None, source: Source, folder: Path, size: int,
        resume: bool,
    ):  # fmt: skip
        self.folder, self.n_tokens, self.n_broken = folder, 0, 0
        self.windows: list[list[int]] = []
        self._counters: dict[str, dict[str, int]] = {}  # of earlier sessions
        self.engine, self.size = engine, size
        self.arms = [(ENGINE_ARM, engine, size)]
        if reference is not None:
            self.arms.append((REFERENCE_ARM, reference, reference.config.n_ubatch))
        n_ctx = engine.cache.n_ctx_seq
        self.test = f"pp{n_ctx}"
        self._parts: list[pd.DataFrame] = []
        found = provenance.collect(engine)
        arms = [new_arm(name, side.toggles.to_dict()) for name, side, _ in self.arms]
        run = new_run(
            "perplexity", folder.name, source.label, found, arms, [self.test], 0, source.seed
        )
        run["result"] |= {"source": source.label, "n_ctx": n_ctx, "n_ubatch": size}
        run["result"]["sessions"] = [session_of(run)]
        samples = self._take_over(run) if resume else None
        self.draft = Draft(run, folder, self._complete, samples, new=not resume)

    def _take_over(self, run: dict[str, Any]) -> pd.DataFrame:
        """Makes `run` continue the run in the folder; returns the samples of the latter. Raises
        UsageError as `check_same`."""
        earlier, (tokens,) = results.load_tables(self.folder, TOKENS)
        check_same(earlier.run, run, self.folder, ("source", "n_ctx", "n_ubatch"))
        take_over(earlier.run, run)
        self._counters = {arm["name"]: arm["counters"] for arm in earlier.run["arms"]}
        self._parts, self.n_tokens = [tokens], len(tokens)
        self.windows = [w["token"].tolist() for _, w in tokens.groupby("window")]
        self.n_broken = (earlier.run["result"]["agreement"] or {}).get("n_broken", 0)
        return earlier.samples

    def add(self, number: int, columns: dict[str, np.ndarray], times: list[Times]) -> None:
        """Adds a finished window: its columns, and the times of its steps by arm."""
        self.n_broken += int(columns.pop("breaks_rule", np.zeros(1)).sum())
        n = len(columns["nll"])
        begin = {"run_id": self.draft.run["run_id"], "window": np.int32(number)}
        begin["place"] = np.arange(n, dtype=np.int32)
        begin["token"] = columns.pop("token").astype(np.int32)
        self.windows.append(begin["token"].tolist())
        self._parts.append(pd.DataFrame(begin | columns))
        for (arm, *_), taken in zip(self.arms, times, strict=True):
            ns, counts = np.array(taken).T
            self.draft.samples.add(arm, False, self.test, number, ns, counts)
        self.n_tokens += n

    def found(self) -> Perplexity:
        """The result of the finished windows."""
        tokens = pd.concat(self._parts, ignore_index=True)
        engine, reference, agreement = Estimate.of_nll(tokens["nll"].to_numpy()), None, None
        if len(self.arms) > 1:
            reference = Estimate.of_nll(tokens["nll_reference"].to_numpy())
            agreement = Agreement.of_tokens(tokens, self.n_broken)
        return Perplexity(self.draft.run, tokens, self.folder, engine, reference, agreement)

    def _complete(self) -> dict[str, pd.DataFrame]:
        """Completes run.json before a save; returns the table of tokens."""
        found, run = self.found(), self.draft.run
        parts = {
            ENGINE_ARM: found.engine, REFERENCE_ARM: found.reference, "agreement": found.agreement
        }  # fmt: skip
        for key, part in parts.items():
            run["result"][key] = None if part is None else results.finite(part._asdict())
        run["repetitions"] = len(self.windows)
        run["arms"] = [_arm(*arm, self.test) for arm in self.arms]
        for arm in run["arms"]:
            before = self._counters.get(arm["name"], {})
            arm["counters"] = {k: n + before.get(k, 0) for k, n in arm["counters"].items()}
        return {TOKENS: found.tokens}


def _arm(name: str, engine: Engine, size: int, test: str) -> dict[str, Any]:
    n, counters = min(size, engine.cache.n_ctx_seq), engine.counters
    program = engine.program(n_tokens=n, n_outputs=n, n_past=0)
    issued = {test: {"n_tokens": n, "counts": program.counts()}}
    toggles = engine.toggles.to_dict()
    return new_arm(name, toggles, False, engine.sync_mode, issued, counters)


def folders_of(folder: Path, sizes: Sequence[int]) -> dict[int, Path]:
    """The run folder of each size: `folder`, or `folder-ubN` where there are several sizes."""
    if len(sizes) == 1:
        return {sizes[0]: folder}
    return {size: folder.with_name(f"{folder.name}-ub{size}") for size in sizes}


def check_folders(
    folders: dict[int, Path], n_ubatch: int, resume: bool = False
) -> list[results.Run | None]:
    """The run to continue for each size; None for a new run. Raises UsageError for no size, for a
    size outside 1..n_ubatch, and as `draft.open_outs`."""
    for size in folders:
        if not 1 <= size <= n_ubatch:
            raise UsageError(
                f"{size} tokens cannot be computed at once; give 1 to n_ubatch ({n_ubatch}), "
                "or raise --n-ubatch"
            )
    if not folders:
        raise UsageError("no size is given; say how many tokens to compute at once, as 512,1")
    return open_outs([*folders.values()], resume)


def parse_against(text: str) -> Toggles:
    """The toggles of `base`, of a fixed preset, or of the baseline with other values, as
    `activations=float,fuse=on`.

    A toggle named on its own has its value, before or after its family. Raises UsageError for an
    unknown toggle or value, and for two that clash.
    """
    name = BASELINE if text.strip() == "base" else text.strip()
    if name in fixed_presets():
        return TogglePreset(name).toggles()
    changes: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = (p.strip() for p in part.partition("="))
        if not equals:
            raise UsageError(
                f"--against {text!r} is neither `base` nor toggles; write activations=float"
            )
        changes |= {name if name in FAMILIES else Toggles.members(name)[0]: value}
    return Toggles(**changes)
