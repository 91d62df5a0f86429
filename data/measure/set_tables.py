"""The table of the sets of toggles that preset `best` could take as a whole, and which won."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from data.measure.matrix import SETS
from data.measure.plan_tables import Fresh, captured, fresh_of
from data.measure.recorded import Recorded, model_of
from data.measure.tables import Line, Part, Table
from workbench.bench.comparison import AB
from workbench.bench.stats import FASTER, SLOWER


def compared(recorded: Recorded) -> Iterator[tuple[AB, dict[str, Any], Fresh | None]]:
    """Each set and test of each run: the comparison, its row of `AB.summary`, and what was counted
    where engines were made anew."""
    for row, run in recorded.of("best"):
        made = (
            {(one.arm["name"], one.row["test"]): one for one in fresh_of(run)}
            if row.kind == "fresh"
            else {}
        )
        ab = AB(run.run, run.samples)
        for found in ab.summary().to_dict("records"):
            if not found["is_control"]:
                yield ab, found, made.get((found["arm"], found["test"]))


def sets_of_best(recorded: Recorded) -> Iterator[Line]:
    """A set of toggles that preset `best` could have: beside what won one by one, in engines that
    are warm or made anew."""
    for ab, found, fresh in compared(recorded):
        yield Line(
            {
                "Model": model_of(ab.run), "engines": _engines(fresh),
                "Test": found["test"], "set": _set_name(found["arm"]),
                "t/s one by one": f"{found['tps_baseline']:.1f}",
                "t/s then": f"{found['tps_toggled']:.1f}",
                "Speedup": f"{found['speedup']:.3f} ({found['low']:.3f}..{found['high']:.3f})",
                "A/A band": f"{found['band_low']:.3f}..{found['band_high']:.3f}",
                "verdict": found["verdict"],
                "captured": captured(fresh.plans) if fresh else "",
            },
            [ab],
        )  # fmt: skip


def won(recorded: Recorded) -> str:
    """Which sets won and which did not, and where they are slower, as `best_table` judges."""
    verdicts: dict[str, list[tuple[str, str]]] = {}
    for ab, found, fresh in compared(recorded):
        answer = ab.answer(found["arm"])
        sound = answer is not None and answer.holds
        where = f"{found['test']} of {model_of(ab.run)}, {_engines(fresh)} ({found['speedup']:.2f})"
        verdicts.setdefault(_set_name(found["arm"]), []).append(
            (found["verdict"] if sound else SLOWER, where if sound else f"{where}, other logits")
        )
    said, taken = list[str](), 0
    for name, them in verdicts.items():
        faster = sum(verdict == FASTER for verdict, _ in them)
        slower = [where for verdict, where in them if verdict == SLOWER]
        wins = faster > 0 and not slower
        taken += wins
        lost = f"slower in {'; '.join(slower)}" if slower else "slower in none"
        said.append(f"- {name}: {'won' if wins else 'did not win'}; faster in "
                    f"{faster} of {len(them)}, {lost}")  # fmt: skip
    rule = "A set wins that is faster in some test and slower in none, warm and made anew"
    mean = (
        "Of these `best` has the fastest by the mean, where a speedup inside its band counts as 1."
    )
    left = mean if taken else "None did, so `best` keeps what won one by one."
    return "\n".join([f"{rule}. {left}", "", *said])


def _engines(fresh: Fresh | None) -> str:
    return "made anew" if fresh else "warm"


def _set_name(arm: str) -> str:
    """What of a set tells it from the others on CUDA; the caption has what they share."""
    shared = _shared()
    return " ".join(f"`{word}`" for word in arm.split() if word not in shared)


def _shared() -> list[str]:
    first, *others = (arm.split() for arm in SETS["cuda"][1:])
    return [word for word in first if all(word in other for other in others)]


BLOCKS: dict[str, list[Part]] = {
    "sets-cuda": [
        Table("Sets of toggles for best", sets_of_best, None,
              "{n} interleaved repetitions or engines; each set has "
              + ", ".join(f"`{word}`" for word in _shared())),
        won,
    ],
}  # fmt: skip
