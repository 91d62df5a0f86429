"""How well does the model foresee these tokens, and does a faster engine foresee the same?

Every token is scored by the logits of the token before it, in windows of n_ctx that each begin with
an empty cache:

    inputs    BOS t1 t2 ... t(n-1)      what is computed, in ubatches, with the logits of every row
    targets   t1  t2 t3 ... tn          what is scored: NLL = -log softmax(row)[target], natural log

A model whose file names no BOS (or says to leave it out) takes the token before instead, and its
very first token is context only. llama-perplexity differs in one thing: it scores the second half
of every window alone, so that its tokens have more context and its perplexity is lower.

With a second engine on the same weights (`against`) both are fed the same tokens, and every row of
logits a is compared with the reference's row b:

    KL      sum softmax(b) * (log softmax(b) - log softmax(a)), in nats: what it costs to believe a
    NMSE    sum (a - b)^2 / sum b^2, over all rows together, and of the worst row
    argmax  share of rows with the same one, and rows that break the rule of `answers.compare`

Logits arrive as float32 and are reduced in float64, ubatch by ubatch: a few rows at a time, since
those of 2,048 tokens of a vocabulary of 128,256 would be 2 GB in each precision.

The run folder (kind `perplexity`) has one more file, `tokens.parquet`, a row per scored token:

    run_id string, window int32, place int32 (row in the window), token int32 (the target),
    nll float64, and with a reference: nll_reference float64, kl float64,
    error float64 (sum of (a-b)^2), power float64 (sum of b^2), same_argmax bool
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from workbench.bench import provenance, results
from workbench.bench.bounds import BOUNDS
from workbench.bench.divergence import compare_rows, score
from workbench.bench.token_source import Source, Window
from workbench.bench.workload import check_untraced
from workbench.config import Toggles
from workbench.errors import UsageError
from workbench.trace.spans import now_ns

TOKENS = "tokens.parquet"
ENGINE_ARM, REFERENCE_ARM = "engine", "reference"


# the result --------------------------------------------------------------------------------------


class Estimate(NamedTuple):
    """Mean NLL in nats over n tokens, its standard error (NaN for one token), and perplexity."""

    n: int
    nll: float
    error: float

    @classmethod
    def of(cls, nll: np.ndarray) -> Estimate:
        spread = float(np.std(nll, ddof=1)) if len(nll) > 1 else math.nan
        return cls(len(nll), float(np.mean(nll)), spread / math.sqrt(len(nll)))

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.nll))

    def __str__(self) -> str:
        low = self.perplexity * self.error  # d exp(x) = exp(x) dx
        return f"mean NLL {self.nll:.5f} +- {self.error:.5f}, " + (
            f"perplexity {self.perplexity:.4f} +- {low:.4f}"
        )


class Agreement(NamedTuple):
    """How far an engine is from its reference. kl_*: nats a token; nmse_worst: of the worst row;
    same_argmax: share of rows; n_broken: rows that break the rule of `answers.compare`."""

    kl_mean: float
    kl_p99: float
    kl_max: float
    nmse: float
    nmse_worst: float
    same_argmax: float
    n_broken: int

    @classmethod
    def of(cls, tokens: pd.DataFrame, n_broken: int) -> Agreement:
        kl, error, power = (tokens[key].to_numpy() for key in ("kl", "error", "power"))
        with np.errstate(divide="ignore", invalid="ignore"):
            worst, whole = np.max(error / power), np.sum(error) / np.sum(power)
        return cls(
            kl_mean=float(np.mean(kl)),
            kl_p99=float(np.percentile(kl, 99)),
            kl_max=float(np.max(kl)),
            nmse=float(whole),
            nmse_worst=float(worst),
            same_argmax=float(tokens["same_argmax"].mean()),
            n_broken=n_broken,
        )

    def lines(self) -> list[str]:
        return [
            f"KL          mean {self.kl_mean:.3e}, 99 % below {self.kl_p99:.3e}, "
            f"most {self.kl_max:.3e} nats a token",
            f"NMSE        {self.nmse:.3e}, worst row {self.nmse_worst:.3e}",
            f"argmax      the same in {self.same_argmax:.2%} of rows; "
            f"{self.n_broken} rows differ where the reference was clear",
        ]

    def outside(self, dtype: str) -> str | None:
        """One line that says which bound of `BOUNDS[dtype]` does not hold; None where both do."""
        bound = BOUNDS[dtype]
        for what, value, most in (
            ("mean KL", self.kl_mean, bound.kl),
            ("NMSE", self.nmse, bound.nmse),
        ):
            if not value <= most:  # NaN is outside, too
                return f"{what} {value:.3e} is above the bound for {dtype} weights, {most:.0e}"
        return None


class Perplexity(NamedTuple):
    """What was measured. run: as in run.json; tokens: as in tokens.parquet; folder: where both are.

    reference and agreement are None where there was no second engine.
    """

    run: dict[str, Any]
    tokens: pd.DataFrame
    folder: Path
    engine: Estimate
    reference: Estimate | None
    agreement: Agreement | None

    @property
    def interrupted(self) -> bool:
        return bool(self.run["status"] == results.INTERRUPTED)

    def lines(self) -> list[str]:
        """The result as text."""
        n_windows = int(self.tokens["window"].iloc[-1]) + 1
        n_ctx = self.run["result"]["n_ctx"]
        windows = "1 window" if n_windows == 1 else f"{n_windows} windows"
        said = [f"tokens      {self.engine.n} in {windows} of up to {n_ctx}"]
        said.append(f"engine      {self.engine}")
        if self.reference is not None:
            said.append(f"reference   {self.reference}")
        return said + (self.agreement.lines() if self.agreement is not None else [])


# measuring ---------------------------------------------------------------------------------------


def perplexity(
    engine: Any,
    source: Source,
    *,
    against: Toggles | None = None,
    out: str | Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Perplexity:
    """Scores the tokens of `source` with `engine`, window by window.

    against: also with an engine of these toggles on the same weights, and compares the two. out:
    the run folder to write (default: a new one in `data/runs`), written at the end and on the way.
    progress(tokens scored, tokens in all) is called after every window.

    Ctrl-C ends the measuring: finished windows are kept, saved and returned, marked interrupted; so
    are they saved when the device fails, before the error is raised. Raises UsageError for a folder
    that is there already and for a traced engine, DeviceError for toggles the device cannot honour.
    """
    check_untraced(engine)
    folder = Path(out) if out is not None else results.new_run_folder(name=f"ppl-{source.label}")
    if folder.exists():
        raise UsageError(f"{folder} exists already; choose another folder")
    reference = None if against is None else engine.variant(against)
    try:
        record = _Record(engine, reference, source, folder)
        status = results.INTERRUPTED
        try:
            for number, window in enumerate(source.windows):
                record.add(number, *_measure(engine, reference, window))
                if progress is not None:
                    progress(record.n_tokens, source.n_tokens)
                if time.monotonic() - record.saved > results.CHECKPOINT_SECONDS:
                    record.save(status)
            status = results.COMPLETE
        except KeyboardInterrupt:
            engine.backend.synchronize()  # the step cut short still reads staging memory
            if not record.n_tokens:
                raise
        except Exception:
            if record.n_tokens:
                record.save(status)
            raise
        return record.save(status)
    finally:
        if reference is not None:
            reference.close()


def _measure(
    engine: Any, reference: Any | None, window: Window
) -> tuple[dict[str, np.ndarray], list[list[int]]]:
    """The columns of a window's tokens, and by arm the ns of every ubatch."""
    size = engine.config.n_ubatch
    sides = [engine] if reference is None else [engine, reference]
    for side in sides:
        side.reset()
    parts: list[dict[str, np.ndarray]] = []
    times: list[list[int]] = [[] for _ in sides]
    for i in range(0, len(window.inputs), size):
        targets = np.asarray(window.targets[i : i + size])
        rows = []
        for side, taken in zip(sides, times, strict=True):
            start = now_ns()
            rows.append(side.step(window.inputs[i : i + size], "all"))
            taken.append(now_ns() - start)
        if reference is None:
            part = {"nll": score(rows[0], targets)}
        else:
            part = compare_rows(rows[0], rows[1], targets)
        parts.append(part | {"token": targets})
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}, times


class _Record:
    """The run folder as it grows: finished windows only."""

    def __init__(self, engine: Any, reference: Any | None, source: Source, folder: Path):
        self.folder, self.n_tokens, self.n_broken = folder, 0, 0
        self.n_ubatch = engine.config.n_ubatch
        self.arms = [(ENGINE_ARM, engine)]
        if reference is not None:
            self.arms.append((REFERENCE_ARM, reference))
        self.samples = results.SampleTable(folder.name)
        self.test = f"pp{engine.config.n_ctx}"
        self._parts: list[pd.DataFrame] = []
        self.begun = self.saved = time.monotonic()
        self.run: dict[str, Any] = {
            "schema": results.SCHEMA,
            "run_id": folder.name,
            "kind": "perplexity",
            "name": source.label,
            "status": results.INTERRUPTED,
            "started": provenance.utc_now(),
            "duration_s": 0.0,
            **provenance.collect(engine),
            "seed": source.seed,
            "tests": [self.test],
            "repetitions": 0,  # windows
            "arms": [],
            "result": {"source": source.label, "n_ctx": engine.config.n_ctx},
        }

    def add(self, number: int, columns: dict[str, np.ndarray], times: list[list[int]]) -> None:
        """A finished window: its columns, and by arm the ns of every ubatch."""
        self.n_broken += int(columns.pop("breaks_rule", np.zeros(1)).sum())
        n = len(columns["nll"])
        begin = {"run_id": self.folder.name, "window": np.int32(number)}
        begin["place"] = np.arange(n, dtype=np.int32)
        begin["token"] = columns.pop("token").astype(np.int32)
        self._parts.append(pd.DataFrame(begin | columns))
        counts = np.minimum(self.n_ubatch, n - np.arange(0, n, self.n_ubatch))
        for (arm, _), taken in zip(self.arms, times, strict=True):
            self.samples.add(arm, False, self.test, number, np.array(taken), counts)
        self.n_tokens += n

    def save(self, status: str) -> Perplexity:
        """Writes the folder, tokens before run.json, and returns what is in it."""
        tokens = pd.concat(self._parts, ignore_index=True)
        agreement = reference = None
        engine = Estimate.of(tokens["nll"].to_numpy())
        if len(self.arms) > 1:
            reference = Estimate.of(tokens["nll_reference"].to_numpy())
            agreement = Agreement.of(tokens, self.n_broken)
        for key, found in (
            (ENGINE_ARM, engine), (REFERENCE_ARM, reference), ("agreement", agreement),
        ):  # fmt: skip
            self.run["result"][key] = None if found is None else _finite(found._asdict())
        self.run |= {
            "status": status,
            "duration_s": round(time.monotonic() - self.begun, 3),
            "repetitions": len(self._parts),
            "arms": [_arm(name, side, self.test) for name, side in self.arms],
        }
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            part = self.folder / f".{TOKENS}.part"
            tokens.to_parquet(part, compression="zstd", index=False)
            os.replace(part, self.folder / TOKENS)
        except OSError as error:
            raise UsageError(f"run folder {self.folder} cannot be written: {error}") from error
        results.write_run(self.folder, self.run, self.samples.frame())
        self.saved = time.monotonic()
        return Perplexity(self.run, tokens, self.folder, engine, reference, agreement)


def _arm(name: str, engine: Any, test: str) -> dict[str, Any]:
    n, counters = min(engine.config.n_ubatch, engine.config.n_ctx), engine.counters
    program = engine.program(n_tokens=n, n_outputs=n, n_past=0)
    return {
        "name": name,
        "is_control": False,
        "toggles": engine.toggles.to_dict(),
        "sync_mode": engine.sync_mode,
        "program": {test: {"n_tokens": n, "counts": program.counts()}},
        "counters": counters,
    }


def _finite(found: dict[str, Any]) -> dict[str, Any]:
    """For run.json, which knows no NaN and no infinity: null stands for them."""
    return {k: v if math.isfinite(v) else None for k, v in found.items()}


def parse_against(text: str) -> Toggles:
    """`base`, or the baseline with other values: `activations=float,fuse=on`.

    Raises UsageError for a toggle or value that does not exist, and for two that clash.
    """
    base = Toggles()
    changes: dict[str, str] = {}
    for part in [] if text.strip() == "base" else text.split(","):
        name, equals, value = (p.strip() for p in part.partition("="))
        if not equals:
            raise UsageError(
                f"--against {text!r} is neither `base` nor toggles; write activations=float"
            )
        changes |= dict.fromkeys(Toggles.members(name), value)
    return Toggles(**(base.to_dict() | changes))
