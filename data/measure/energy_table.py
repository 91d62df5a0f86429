"""What costs or saves energy: the table of step `energy`, from its run folders."""

from __future__ import annotations

from collections.abc import Iterator

from data.measure.matrix import ENERGY
from data.measure.recorded import Arms, Recorded, spread
from data.measure.tables import Line, Part, Table
from workbench.benchmarks.compare.stats import percent
from workbench.benchmarks.energy import joules
from workbench.config import Toggles, parse_changes

STEP = "energy"
DIGITS = 3  # of a ratio: effects are a few percent


def lines(recorded: Recorded) -> Iterator[Line]:
    """A line for each model and switch: joules a token without and with it, and the ratio."""
    for _, run in recorded.of(STEP):
        arms, (test,) = Arms(run), run.run["tests"]
        each = joules.joules(run.run).set_index("arm")
        for name, off, on in ENERGY:
            if not {off, on} <= set(each.index):
                continue
            ratio, verdict = joules.compared(run.run, test, off, on)
            values = {"model": arms.model, "switch": name, "off": off}
            there = Toggles(**arms.toggles(on))  # an older run lacks newer toggles: they are off
            values["on"] = " ".join(f"{t}={there.value_of(t)}" for t in parse_changes(off))
            for side, arm in (("off", off), ("on", on)):
                values[f"j_{side}"] = each.loc[arm, "j_per_token"]
                values[f"w_{side}"] = each.loc[arm, "mean_w"]
            speedup = spread(arms.between(test, off, on).ratio)
            values |= {"energy": spread(ratio, DIGITS), "verdict": verdict, "speedup": speedup}
            yield Line(values, [arms])


def windows(recorded: Recorded) -> str:
    """What the counter could tell: of each model, idle power, steps, uncertainty, A/A band."""
    told = []
    for _, run in recorded.of(STEP):
        each, found = joules.joules(run.run), run.run["result"]["energy"]
        if each.empty:
            continue
        row = each.iloc[0]
        low, high = row["energy_band_low"], row["energy_band_high"]
        told.append(
            f"{Arms(run).model}: idle {row['idle_w']:.0f} W; the counter steps every "
            f"{1e3 * found['cadence_s']:.0f} ms, at most {percent(each['step_share'].max())} of a "
            f"window; the ends of a window are uncertain by "
            f"{percent(each['uncertainty_share'].max())} at most; A/A band {low:.3f}..{high:.3f}."
        )
    return " ".join(told)


BLOCKS: dict[str, list[Part]] = {
    "energy-cuda": [
        Table("Joules a token", lines, {
            "Model": "{model}", "switch": "{switch}", "off": "`{off}`", "on": "`{on}`",
            "J/token off": "{j_off:.4g}", "J/token on": "{j_on:.4g}", "energy": "{energy}",
            "verdict": "{verdict}", "speedup": "{speedup}", "W off": "{w_off:.0f}",
            "W on": "{w_on:.0f}",
        }, "windows of 5 s or more by NVML's energy counter, {n} of each arm; {tests}"),
        "Energy is that of the GPU's board, what it draws when idle included, and not the host's: "
        "a core that spins is not counted. All else is as preset `best` has it.",
        windows,
    ],
}  # fmt: skip
