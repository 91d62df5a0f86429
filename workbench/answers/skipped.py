"""Tables of the gain of leaving masked cells unread: by tokens at once, by sequences and by depth,
and for requests of random lengths. Arms are given by name: sets of toggles."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

import workbench as wb
from workbench.answers.effort import effort, fastest, until_built
from workbench.benchmarks.compare import stats
from workbench.benchmarks.compare.arms import switched
from workbench.benchmarks.compare.comparison import AB
from workbench.benchmarks.runs import results
from workbench.benchmarks.runs.results import REQUESTS
from workbench.benchmarks.workload import parse
from workbench.common.errors import DeviceError, UsageError
from workbench.common.sizes import round_up
from workbench.common.tables import Table
from workbench.config import BEST, AttnKernel, TogglePreset, Toggles
from workbench.engine.cache.extent import WAYS
from workbench.server.serving import serving

PROMPTS, GENERATED = PHASES = ("prompts", "generated")
PLAIN = {"skip_masked_kv": "off", "kv_cache": "unified", "kv_growth": "step"}
PAD = 256
VEC = AttnKernel.VEC.value
AGAIN = "off (A/A)"
MEASURED = "measured"  # commit and time, above a table
PARTS = (4, 1)  # a prompt is computed in so many
MARKS = {
    "faster": "faster", "slower": "slower", "no difference": "=", "same work": "same work",
}  # of verdicts  # fmt: skip


def served(engine: wb.Engine) -> Toggles:
    """The background of all measurements here: a server's toggles on the engine's device, with one
    region of the cache, no skipping, and n_kv that grows by n_kv_pad."""
    return engine.resolve(serving(engine.device, TogglePreset(BEST, PLAIN)))


def sized(
    engine: wb.Engine, toggles: Toggles, n_seqs: int, cells: int, n_ubatch: int = 0
) -> wb.Engine:
    """An engine on the same weights, whose n_seqs sequences have `cells` cells each. n_ubatch: 0
    for the engine's own."""
    config = dataclasses.replace(
        engine.config, n_seqs=n_seqs, n_ctx=n_seqs * round_up(cells, PAD),
        n_ubatch=n_ubatch or engine.config.n_ubatch,
    )  # fmt: skip
    return wb.Engine(engine._open, config, toggles)


def by_ubatch(
    engine: wb.Engine,
    background: Toggles,
    arms: Mapping[str, str],
    n_prompt: int,
    repeats: int,
    seed: int,
    runs: str,
) -> dict[int, AB]:
    """Compares each arm with the first, on a prompt of n_prompt tokens in ubatches of a fourth of
    it, and at once."""
    found, sets = dict[int, AB](), [*arms.values()]
    for part in PARTS:
        n = max(1, n_prompt // part)
        with sized(engine, background, 1, n_prompt, n) as side:
            found[n] = wb.ab(
                side, " | ".join(sets), tests=[f"pp{n_prompt}"], seed=seed,
                **effort(side, repeats, "1.5%"), out=wb.new_run_folder(runs, f"prompts-in-{part}"),
            )  # fmt: skip
    return found


def ubatch_table(prompts: Mapping[int, AB], arms: Mapping[str, str]) -> pd.DataFrame:
    """A row for each ubatch size: t/s of the first arm, and speedups and verdicts of the other
    arms; `=`: no difference."""
    rows, last = [], [*prompts.values()][-1]
    for n, comparison in prompts.items():
        summary = comparison.summary().set_index("arm")
        row: dict[str, Any] = {
            "tokens at once": n,
            f"t/s {next(iter(arms))}": round(summary["tps_baseline"].iloc[0]),
        }
        for name, arm in [*arms.items()][1:]:
            one = summary.loc[arm]
            row[name] = f"{one['speedup']:.3f} {mark(one['verdict'])}".strip()
        rows.append(row)
    return Table(rows).shown(keys=["tokens at once"], constant={MEASURED: results.taken(last.run)})


def mark(verdict: str) -> str:
    return MARKS.get(verdict, "")


def ubatch_frames(prompts: Mapping[int, AB], arms: Mapping[str, str]) -> dict[str, pd.DataFrame]:
    """For `plots.speedup_by`: one frame, x the tokens at once."""
    parts, names = [], _names(arms)
    for n, comparison in prompts.items():
        summary = comparison.summary()
        labels = summary["arm"].map(lambda arm: names.get(arm, arm))
        parts.append(summary.assign(x=n, label=labels)[~summary["is_control"]])
    frame = pd.concat(parts, ignore_index=True)
    (test,) = frame["test"].unique()
    frame.attrs["x"] = "tokens computed at once (n_ubatch)"
    return {f"{test}, one sequence, over {next(iter(arms.values()))}": frame}


def _names(arms: Mapping[str, str]) -> dict[str, str]:
    """The name of each set of toggles."""
    return {sets: name for name, sets in arms.items()}


def possible(engine: wb.Engine, toggle: str) -> str:
    """The values of a toggle that the engine's device can honour: `kv_parts=off,stream_k`."""
    found = []
    for value in Toggles.values(toggle):
        with suppress(DeviceError, UsageError):
            engine.resolve(engine.toggles.switched(toggle, value))
            found.append(value)
    return f"{toggle}={','.join(found)}"


def tests_of(workload: str, slots: str, n_prompt: int) -> list[str]:
    """Tests of several sequences, prompts and then tokens: every number of sequences with prompts
    of an eighth of n_prompt, and the most sequences with a fourth and with twice of that."""
    widths = sorted({int(n) for n in slots.split(",")})
    cells = [max(1, n_prompt // part) for part in (32, 8, 4)]
    pairs = [(cells[1], n) for n in widths] + [(cell, widths[-1]) for cell in cells]
    return list(dict.fromkeys(f"pp{cell}+{workload}@b{n}" for cell, n in pairs))


def phase_summary(comparison: AB, arms: Mapping[str, str]) -> pd.DataFrame:
    """`AB.summary()` for prompts and for generated tokens: columns phase, n_seqs, depth."""
    labels, samples = _names(arms), comparison.samples
    names = [arm["name"] for arm in comparison.run["arms"]]
    seed = comparison.run["seed"]
    rows = []
    for test in comparison.run["tests"]:
        shape = parse(test)
        for phase in PHASES:
            part = samples[samples["test"] == test]
            part = part[(part["token"] == 0) == (phase == PROMPTS)]
            sums = part.groupby(["repetition", "arm"])[["n_tokens", "ns"]].sum()
            tps = (sums["n_tokens"] * 1e9 / sums["ns"]).unstack()[names].dropna()
            own = {name: stats.speedup(tps[names[0]].to_numpy(), tps[name].to_numpy(), seed)
                   for name in names[1:]}  # fmt: skip
            band = stats.aa_band(own[names[-1]])
            rows += [
                {
                    "test": test, "phase": phase, "n_seqs": shape.n_seqs, "depth": shape.n_prompt,
                    "arm": name, "label": labels.get(name, name),
                    "tps_baseline": float(tps[names[0]].median()),
                    "tps_toggled": float(tps[name].median()), "speedup": ratio.value,
                    "low": ratio.low, "high": ratio.high, "band_low": band.low,
                    "band_high": band.high, "verdict": stats.verdict(ratio, band),
                    "is_control": name == names[-1],
                }
                for name, ratio in own.items()
            ]  # fmt: skip
    found = pd.DataFrame(rows)
    found.attrs |= {"baseline": next(iter(arms)), MEASURED: results.taken(comparison.run)}
    return found


def scaling_frames(phases: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """For `plots.speedup_by`: generated tokens by the number of sequences, and by their depth."""
    rows = phases[(phases["phase"] == GENERATED) & ~phases["is_control"]]
    most, depth = rows["n_seqs"].max(), _fixed_depth(rows)
    by_slots, by_depth = rows[rows["depth"] == depth], rows[rows["n_seqs"] == most]
    by_slots, by_depth = by_slots.assign(x=by_slots["n_seqs"]), by_depth.assign(x=by_depth["depth"])
    by_slots.attrs["x"], by_depth.attrs["x"] = "sequences", "cells of each, before a token"
    return {
        f"{GENERATED}, {depth} cells each": by_slots, f"{GENERATED}, {most} sequences": by_depth,
    }  # fmt: skip


def _fixed_depth(rows: pd.DataFrame) -> int:
    """The depth that was measured with most numbers of sequences."""
    return int(rows.groupby("depth")["n_seqs"].nunique().idxmax())


def scaling_table(phases: pd.DataFrame) -> pd.DataFrame:
    """The speedup of every arm with its verdict (`=`: no difference) for the tokens generated in
    each test, without its prompts."""
    rows, made = [], phases[(phases["phase"] == GENERATED) & ~phases["is_control"]]
    for test, part in made.groupby("test", sort=False):
        baseline = f"t/s {phases.attrs['baseline']}"
        row: dict[str, Any] = {"generated in": test, baseline: round(part["tps_baseline"].iloc[0])}
        for one in part.itertuples():
            row[one.label] = f"{one.speedup:.3f} {mark(one.verdict)}".strip()
        rows.append(row)
    control = phases[(phases["phase"] == GENERATED) & phases["is_control"]]
    bands = f"{control['band_low'].min():.3f}..{control['band_high'].max():.3f}"
    about = {"the widest A/A band": bands, MEASURED: phases.attrs[MEASURED]}
    return Table(rows).shown(keys=["generated in"], constant=about)


def side_by_side(
    engine: wb.Engine,
    background: Toggles,
    arms: Mapping[str, str],
    tests: Sequence[str],
    repeats: int,
    seed: int,
    runs: str,
    name: str = "side-by-side",
) -> AB:
    """Compares each arm with the first, on tests of several sequences. name: of the run folder."""
    each = max(-(-test.n_cells // test.width) for test in map(parse, tests))
    n_seqs = max(test.width for test in map(parse, tests))
    with sized(engine, background, n_seqs, each, min(512, engine.config.n_ubatch)) as side:
        return wb.ab(
            # so many arms and tests take long, and are told apart in few rounds: no `effort`
            side, " | ".join(arms.values()), tests=tests, seed=seed,
            rounds=repeats, smoke=repeats < stats.MIN_REPETITIONS,
            out=wb.new_run_folder(runs, name),
        )  # fmt: skip


def kernels(engine: wb.Engine) -> dict[str, str]:
    """The kernels of attention that the engine's device has, as arms by name: first the vector
    kernel, which the author of #14924 compares with."""
    _, _, values = possible(engine, "attn_kernel").partition("=")
    names = sorted(values.split(","), key=lambda name: name != VEC)
    return {name: f"attn_kernel={name}" for name in names}


def by_kernel(
    engine: wb.Engine, background: Toggles, tests: Sequence[str], repeats: int, seed: int, runs: str
) -> AB:
    """Compares the kernels of attention, where each sequence has a region and no cell is
    skipped."""
    regions = switched(background, "kv_cache=per_sequence")
    arms = kernels(engine)
    return side_by_side(engine, regions, arms, tests, repeats, seed, runs, "attn-kernel")


def ragged(
    engine: wb.Engine,
    background: Toggles,
    most: int,
    n_gen: int,
    n_requests: int,
    slots: int,
    seed: int,
    runs: str,
) -> dict[str, Path]:
    """Serves requests with prompts of 1 to `most` tokens, as many in flight as there are slots:
    without skipping, with each way, and by the first engine once more as the A/A control. Each slot
    has a region. Returns the run folder of each.

    Each engine serves the same requests before, so that most of its programs exist
    (`effort.until_built`). Then all serve them in turn, and of each the fastest turn
    counts (`effort.fastest`).
    """
    asked: dict[str, Any] = {
        "slots": slots, "concurrency": str(slots), "n_prompt": f"uniform:1-{most}",
        "n_gen": str(n_gen), "n_requests": n_requests, "n_warm_up": 0, "seed": seed,
    }  # fmt: skip
    found, sides = dict[str, Path](), dict[str, wb.Engine]()
    with ExitStack() as stack:
        for way in WAYS:
            toggles = switched(background, f"kv_cache=per_sequence skip_masked_kv={way}")
            n_ubatch = min(512, engine.config.n_ubatch)
            side = sized(engine, toggles, slots, most + n_gen, n_ubatch)
            sides[way] = stack.enter_context(side)
            found[way] = wb.new_run_folder(runs, f"ragged-{way.replace('_', '-')}")
        for side in sides.values():
            until_built(side, partial(wb.serve_bench, side, beside=[*sides.values()], **asked))
        sides[AGAIN], found[AGAIN] = sides[WAYS[0]], wb.new_run_folder(runs, "ragged-off-again")
        loads = {
            found[name]: partial(wb.serve_bench, side, **asked) for name, side in sides.items()
        }
        fastest(engine, loads)
    return found


def ragged_frame(folders: Mapping[str, Path]) -> pd.DataFrame:
    """By phase and way: the median over requests of the speedup of each, beside the first way. Of
    prompts it is that of the time to the first token, of generated tokens that of the request's
    median time between two tokens. folders: of `ragged`.

    Columns: phase, label, speedup, low, high (95 % interval), band_low, band_high, verdict,
    is_control; `attrs`: baseline, the first way; ms, its medians by phase; requests; tokens, of a
    mean prompt.
    """
    times = {name: _of_requests(results.load_run(path).samples) for name, path in folders.items()}
    first, rows = next(iter(times)), []
    for phase in PHASES:
        ratios = {
            name: _ratio_of(times[first][phase], times[name][phase])
            for name in times
            if name != first
        }
        band = stats.aa_band(ratios[AGAIN])
        rows += [
            {
                "phase": phase, "label": name, "speedup": ratio.value, "low": ratio.low,
                "high": ratio.high, "band_low": band.low, "band_high": band.high,
                "verdict": stats.verdict(ratio, band), "is_control": name == AGAIN,
            }
            for name, ratio in ratios.items()
        ]  # fmt: skip
    run, (requests,) = results.load_tables(folders[first], REQUESTS)
    found = pd.DataFrame(rows)
    found.attrs |= {
        "baseline": first, "ms": (times[first].median() / 1e6).to_dict(),
        "requests": len(requests), "tokens": float(requests["n_prompt"].mean()),
        MEASURED: results.taken(run.run),
    }  # fmt: skip
    return found


def _of_requests(samples: pd.DataFrame) -> pd.DataFrame:
    """By request, a column for each phase: the time to the first token, and the median time between
    two tokens, ns."""
    first = samples[samples["token"] == 0].set_index("repetition")["ns"]
    later = samples[samples["token"] > 0].groupby("repetition")["ns"].median()
    return pd.DataFrame({PROMPTS: first, GENERATED: later})


def _ratio_of(before: pd.Series, after: pd.Series) -> stats.Ratio:
    """The median of before / after over the requests that have both."""
    pairs = (before / after).dropna().to_numpy()
    if not len(pairs):
        return stats.Ratio(math.nan, math.nan, math.nan, 0)
    return stats.Ratio(*stats.median_interval(pairs), len(pairs))


def ragged_table(frame: pd.DataFrame) -> pd.DataFrame:
    """The speedups of `ragged_frame` with their intervals; `=`: no difference."""
    by, about = frame.set_index(["phase", "label"]), frame.attrs
    rows = []
    for name in dict.fromkeys(frame["label"]):
        row = {"skip_masked_kv": name}
        for phase in PHASES:
            one = by.loc[(phase, name)]
            said = "" if one["is_control"] else mark(one["verdict"])
            row[phase] = f"{one['speedup']:.3f} {said}".strip()
            row[f"95% CI of {phase}"] = stats.interval(one["low"], one["high"])
        rows.append(row)
    constant = {"requests": str(about["requests"]), "tokens a prompt": f"{about['tokens']:.0f}"}
    for phase, what in ((PROMPTS, "first token"), (GENERATED, "next token")):
        band = stats.interval(*by.loc[(phase, AGAIN), ["band_low", "band_high"]])
        constant[f"{what} with {about['baseline']}"] = f"{about['ms'][phase]:.2f} ms"
        constant[f"A/A band of {phase}"] = band
    constant[MEASURED] = about[MEASURED]
    return Table(rows).shown(keys=["skip_masked_kv"], constant=constant, right=list(PHASES))
