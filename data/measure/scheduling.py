"""The tables of scheduling: the cost of a wait, the worth of the sync modes, the cost of
rebuilding, and the gain of a second device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from data.measure.matrix import CPU_STEP, MODES, Row
from data.measure.racing import RACES
from data.measure.recorded import Recorded, model_of
from data.measure.tables import Line, Part, Table
from workbench.answers import waits
from workbench.benchmarks.compare.comparison import AB
from workbench.benchmarks.compare.stats import FASTER, SLOWER, aa_band, speedup, verdict
from workbench.benchmarks.runs import results
from workbench.benchmarks.times.gaps import CONTROL, DIFFERENCES, Difference, Fit, Gaps
from workbench.config import CopyStream, SyncMode

BASE, MERGED = SyncMode.PER_COPY.value, SyncMode.COPY_BOUNDARY.value
OTHERS = [mode for mode in MODES if mode not in (BASE, MERGED)]
# the run whose wait stands beside tokens, and the runs of tokens, of the same device
WAITED, DECODED = "gaps-on-llama-3.2-1b-f16", ("llama-3.2-1b-bf16", "llama-3-8b-q4_0")
BACKGROUNDS = {"kept": "programs kept", "all": "all on"}


def _where(row: Row, run: dict[str, Any], stream: str) -> dict[str, str]:
    beside = BACKGROUNDS[row.toggles.split()[0]]
    return {"Model": model_of(run), "with": beside, "copies ride": stream}


class Stream(NamedTuple):
    """The gaps of one run with copies on one stream.

    where: the cells that name it.
    us: median gap by mode.
    again: median gap of the baseline's control; None without a control.
    saved: by how many us the gap is shorter under the merged mode, median over the rounds.
    """

    run: Gaps
    where: dict[str, str]
    us: dict[str, float]
    again: float | None
    fit: Fit
    differences: list[Difference]
    issued: list[dict[str, Any]]
    saved: float


@functools.lru_cache(maxsize=2)
def _streams(recorded: Recorded) -> list[Stream]:
    """Every stream of every run of gaps."""
    found = []
    for row, run in recorded.of("gaps"):
        gaps = Gaps(run.run, run.samples)
        table, fits = gaps.table(), gaps.fits
        control = table["arm"].str.endswith(CONTROL)
        again = table[control].set_index("copy_stream")["gap_us"]
        for name, part in table[~control].groupby("copy_stream", sort=False):
            stream, us = str(name), part.set_index("sync")["gap_us"].to_dict()
            differ = [d for d in gaps.differences if d.copy_stream == stream]
            saved = float(np.median(gaps.less(BASE, MERGED, stream)))
            where, of = _where(row, run.run, stream), part.to_dict("records")
            found.append(
                Stream(gaps, where, us, again.get(stream), fits[stream], differ, of, saved)
            )
    return found


def gaps(recorded: Recorded) -> Iterator[Line]:
    """A line for each model, background and copy stream: the gap under every mode, and the cost of
    a wait by the fit."""
    for found in _streams(recorded):
        fit, again = found.fit, found.again
        cells = {mode: f"{found.us[mode]:.0f}" if mode in found.us else "" for mode in MODES} | {
            f"{BASE} again": "" if again is None else f"{again:.0f}",
            "one wait": f"{fit.wait_us:.1f} ({fit.low_us:.1f}..{fit.high_us:.1f})",
        }
        yield Line(found.where | cells, [found.run])


def differences(recorded: Recorded) -> Iterator[Line]:
    """The same lines, with the difference from mode to mode."""
    for found in _streams(recorded):
        went = {
            (d.before, d.after): f"{d.us:.0f} ({d.low_us:.0f}..{d.high_us:.0f})"
            for d in found.differences
        }
        cells = {f"{before} -> {after}": went.get((before, after), "")
                 for before, after in DIFFERENCES}  # fmt: skip
        yield Line(found.where | cells, [found.run])


def from_row_to_row(recorded: Recorded) -> str:
    every = [d for found in _streams(recorded) for d in found.differences]
    went = [
        f"{before} -> {after}, {what}: {min(us):.0f} to {max(us):.0f} us"
        for (before, after), what in DIFFERENCES.items()
        if (us := [d.us for d in every if (d.before, d.after) == (before, after)])
    ]
    return "From row to row: " + "; ".join(went) + "."


def issued(recorded: Recorded) -> Iterator[Line]:
    """A line for each mode: what it issues for a token."""
    modes: dict[str, dict[str, Any]] = {}
    for found in _streams(recorded):
        for row in found.issued:
            cells = modes.setdefault(
                row["sync"],
                {"sync": row["sync"], "pattern": f"`{row['pattern']}`",
                 "waits of the host": row["waits"], "of the device": row["stream_waits"],
                 "copies": row["copies"]},
            )  # fmt: skip
            cells[f"bytes, {found.where['Model']}"] = f"{int(row['bytes'])}"
    yield from map(Line, modes.values())


def syncs(recorded: Recorded) -> Iterator[Line]:
    """A line for each test: t/s under the mode before the change and under the mode that was
    merged, and the speedups of the others. A speedup is bold that lies outside the A/A band, with
    an interval that excludes 1."""
    for row, run in recorded.of("sync", "ab", "sync"):
        ab = AB(run.run, run.samples)
        where = _where(row, ab.run, ab.run["arms"][0]["toggles"]["copy_stream"])
        for test, part in ab.summary().groupby("test", sort=False):
            arms = part.set_index("arm")
            merged, control = arms.loc[MERGED], part[part["is_control"]].iloc[0]
            said = {
                mode: _bold(arms.loc[mode, "speedup"], arms.loc[mode, "verdict"])
                for mode in MODES
                if mode in arms.index
            }
            cells = {
                "Test": str(test), f"t/s {BASE}": f"{merged['tps_baseline']:.1f}",
                f"t/s {MERGED}": f"{merged['tps_toggled']:.1f}", "Speedup": said[MERGED],
                **{mode: said.get(mode, "") for mode in OTHERS},
                "A/A band": f"{control['band_low']:.2f}..{control['band_high']:.2f}",
            }  # fmt: skip
            yield Line(where | cells, [ab])


def by_median_token(recorded: Recorded) -> Iterator[Line]:
    """us of the median token, and its speedup by mode. A repetition counts by its median token,
    which some hundred slow tokens in a row do not change; each of them lowers a throughput."""
    saved = {tuple(found.where.values()): found.saved for found in _streams(recorded)}
    for row, run in recorded.of("sync", "ab", "sync"):
        ab = AB(run.run, run.samples)
        where = _where(row, ab.run, ab.run["arms"][0]["toggles"]["copy_stream"])
        less = saved.get(tuple(where.values()))
        us = ab.samples.groupby(["arm", "test", "repetition"])["ns"].median().unstack("arm") / 1e3
        token, control = us[BASE].median(), ab.run["arms"][-1]["name"]
        made = {
            m: speedup((1e6 / us[BASE]).to_numpy(), (1e6 / us[m]).to_numpy())
            for m in (*MODES, control)
            if m in us
        }
        band = aa_band(made.pop(control))
        said = {mode: _bold(ratio.value, verdict(ratio, band)) for mode, ratio in made.items()}
        cells = {
            f"us {BASE}": f"{token:.0f}", f"us {MERGED}": f"{us[MERGED].median():.0f}",
            "Speedup": said[MERGED],
            "by its gap": "" if less is None else f"{token / (token - less):.3f}",
            **{mode: said.get(mode, "") for mode in OTHERS},
            "A/A band": f"{band.low:.3f}..{band.high:.3f}",
        }  # fmt: skip
        yield Line(where | cells, [ab])


def beside_tokens(recorded: Recorded) -> str:
    """A sentence with the cost of one wait and tokens of the same device (`waits.said`); empty
    where they were not measured on one device."""
    run = recorded.run(WAITED)
    if run is None:
        return ""
    device = run.run["engine"]["device_description"]
    tokens = dict[str, float]()
    for name in DECODED:
        found = recorded.run(f"decode-{name}")
        if found is not None and found.run["engine"]["device_description"] == device:
            times = results.percentiles(found.samples).set_index("test")["p50_us"]
            (us,) = times[times.index.str.startswith("tg")]
            tokens[model_of(found.run)] = float(us)
    fit = Gaps(run.run, run.samples).fits[CopyStream.OWN.value]
    return waits.said(waits.RecordedWait(device, fit.wait_us, tokens)) if tokens else ""


def _bold(ratio: float, judged: str) -> str:
    return f"**{ratio:.3f}**" if judged in (FASTER, SLOWER) else f"{ratio:.3f}"


def comparisons(
    recorded: Recorded, step: str, toggle: str = "", device: str = ""
) -> Iterator[Line]:
    """A line for each toggled arm in a step's comparisons. device: of another device's runs."""
    of_device = Recorded(recorded.folder, device) if device else recorded
    for one in of_device.toggled(step, "ab", toggle):
        name, before = one.ab.run["result"]["toggle"], one.ab.label(one.ab.run["arms"][0])
        arms = f"{before} -> {one.found['label']}"
        named = {"what": one.row.label, "model": one.model}
        yield Line(one.found | named | {"arms": f"{name}: {arms}" if name else arms}, [one.ab])


COMPARED = {
    "": "{what}", "Model": "{model}", "Test": "{test}", "toggle": "{arms}",
    "t/s baseline": "{tps_baseline:.1f}", "t/s toggled": "{tps_toggled:.1f}",
    "Speedup": "{speedup:.2f}", "95% CI": "{low:.2f}..{high:.2f}", "verdict": "{verdict}",
}  # fmt: skip


def compared(title: str, lines: Callable[[Recorded], Iterator[Line]]) -> Table:
    return Table(title, lines, COMPARED, "{n} interleaved repetitions")


BLOCKS: dict[str, list[Part]] = {
    "gaps-cuda": [
        Table("Host gaps", gaps, None,
              "us, medians; {n} rounds; one wait with its 95 % interval"),
        "What goes from mode to mode, us (95 % interval), within a round:",
        Table("", differences),
        from_row_to_row,
        beside_tokens,
        "What each mode issues for a token (of the bytes all but some kilobytes are logits):",
        Table("", issued),
    ],
    "sync-cuda": [
        Table("Sync modes", syncs, None,
              "{n} interleaved repetitions of each test, answers checked in the same run"),
        "By the median token of each repetition, all tests of a row together; *by its gap* is "
        f"what {MERGED} would be worth if a token were shorter by what its gap is:",
        Table("", by_median_token),
    ],
    "graph-reuse-cuda": [
        compared("Graph reuse", partial(comparisons, step="sync", toggle="graph_reuse"))
    ],
    "pipeline-cuda": [
        compared("Two devices", partial(comparisons, step="pipeline")),
        "What the orderings do that the checker refuses (#20463), on these devices:",
        RACES,
    ],
    "toggles-cpu": [
        compared(device, partial(comparisons, step=CPU_STEP, device=device))
        for device in ("embedded", "host")
    ],
}  # fmt: skip
