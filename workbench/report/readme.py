"""README's tables and captions, regenerated from the recorded runs: `make readme`.

README.md holds blocks `<!-- begin NAME -->` ... `<!-- end NAME -->`; each is filled from
`data/results/` by the function of that name in BLOCKS. A test fails where README and the run
folders disagree, so no number in it is written by hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from workbench.bench import results
from workbench.bench.comparison import AB
from workbench.config import Toggles, folded
from workbench.errors import WorkbenchError
from workbench.report import blocks, targets
from workbench.report.recorded import commit_of
from workbench.report.tables import markdown

RESULTS = Path("data/results")
README = Path("README.md")
BLOCK = re.compile(r"(<!-- begin (\S+) -->\n).*?(<!-- end \2 -->)", re.DOTALL)


# toggles of the first tables, named by their values alone; the others have tables of their own
SCHEDULING = ("sync", "copy_stream", "graph_reuse")


def comparisons(folder: Path, device: str) -> list[AB]:
    """The comparisons of scheduling toggles: run folders named `<device>-...`, by name."""
    runs = sorted(folder.glob(f"{device}-*/run.json"))
    found = [AB.load(run.parent) for run in runs if _is_of_scheduling(run)]
    if not found:
        raise WorkbenchError(f"{folder} holds no comparison on {device}; record one first")
    return found


def _is_of_scheduling(path: Path) -> bool:
    run = json.loads(path.read_text())
    return run["kind"] == "ab" and run["result"]["toggle"] in SCHEDULING


def headline(folder: Path, device: str) -> str:
    """One row per comparison: the baseline against the value that removes the most."""
    rows = []
    for ab in comparisons(folder, device):
        row = [r for r in ab.summary().to_dict("records") if not r["is_control"]][-1]
        rows.append(
            {
                "mechanism": _mechanism(ab, row["label"]),
                "with": _background(ab),
                "Model": _model(ab),
                "Test": row["test"],
                "t/s baseline": _rate(ab, ab.run["arms"][0]["name"], row["test"]),
                "t/s toggled": _rate(ab, row["arm"], row["test"]),
                "GB/s": f"{row['tps_toggled'] * _weight_bytes(ab) / 1e9:.0f}",
                "Speedup": f"{row['speedup']:.2f}",
                "95% CI": f"{row['low']:.2f}..{row['high']:.2f}",
                "verdict": row["verdict"],
            }
        )
    return markdown(pd.DataFrame(rows)) + "\n\n" + _caption(comparisons(folder, device))


def every_arm(folder: Path, device: str) -> str:
    """Every arm of every comparison, the A/A controls included."""
    rows = []
    for ab in comparisons(folder, device):
        for row in ab.summary().to_dict("records"):
            rows.append(
                {
                    "mechanism": _mechanism(ab, row["label"]),
                    "with": _background(ab),
                    "Model": _model(ab),
                    "t/s": _rate(ab, row["arm"], row["test"]),
                    "Speedup": f"{row['speedup']:.3f}",
                    "95% CI": f"{row['low']:.3f}..{row['high']:.3f}",
                    "A/A band": f"{row['band_low']:.3f}..{row['band_high']:.3f}",
                    "us a token": f"{_token_us(ab, row['arm']):.0f}",
                    "verdict": row["verdict"],
                }
            )
    return markdown(pd.DataFrame(rows))


def _mechanism(ab: AB, label: str) -> str:
    return f"{ab.run['result']['toggle']}: {ab.label(ab.run['arms'][0])} -> {label}"


def _background(ab: AB) -> str:
    """The other scheduling toggles by value, and what else is not as in the baseline."""
    toggle, toggles = ab.run["result"]["toggle"], ab.run["arms"][0]["toggles"]
    base = Toggles().to_dict()
    others = {k: v for k, v in folded(toggles).items() if k not in SCHEDULING}
    changed = [f"{k}={v}" for k, v in others.items() if v != folded(base).get(k)]
    return ", ".join([toggles[k] for k in SCHEDULING if k != toggle] + changed)


def _model(ab: AB) -> str:
    return ab.model.replace(" with random weights", "")


def _weight_bytes(ab: AB) -> int:
    return ab.run["model"]["weight_bytes_per_token"]


def _token_us(ab: AB, arm: str) -> float:
    """The median token of an arm, whatever its neighbours suffered."""
    return float(ab.samples.loc[ab.samples["arm"] == arm, "ns"].median()) / 1e3


def _rate(ab: AB, arm: str, test: str) -> str:
    """Median tokens per second of an arm, and half its interquartile range."""
    rates = results.rates(ab.samples)
    tps = rates.loc[(rates["arm"] == arm) & (rates["test"] == test), "tps"]
    low, mid, high = tps.quantile([0.25, 0.5, 0.75])
    return f"{mid:.1f} ± {(high - low) / 2:.1f}"


def _caption(found: list[AB]) -> str:
    device = found[0].run["engine"]["device_description"]
    commits = ", ".join(dict.fromkeys(commit_of(ab.run) for ab in found))
    dates = sorted(ab.run["started"][:10] for ab in found)
    n = sorted({ab.run["repetitions"] for ab in found})
    return (
        f"{device}; {' and '.join(map(str, n))} interleaved repetitions, answers checked in the "
        f"same run; models with random weights of the real shapes; commit {commits}; {dates[0]}."
    )


def peer(folder: Path) -> str:
    """Decode and prefill on two CPU threads beside llama.cpp's, from `make peer`."""
    found = json.loads((folder / "peer-cpu.json").read_text())
    rows = [
        {
            "Model": f"{row['preset']} {row['quant']}",
            "Test": row["test"],
            "t/s llama.cpp": f"{row['median_t_s']['llama.cpp']:.1f}",
            "t/s workbench": f"{row['median_t_s']['workbench']:.1f}",
            "Ratio": f"{row['ratio']:.2f}",
            "95% CI": f"{row['ci95'][0]:.2f}..{row['ci95'][1]:.2f}",
        }
        for row in [*found["decode"], *found.get("prefill", [])]
    ]
    cpu = found["machine"]["cpu"]["name"]
    version = found["versions"]["llama-cpp-python"]
    return (
        markdown(pd.DataFrame(rows))
        + f"\n\n{cpu}, 2 threads each, alternating in one run; llama-cpp-python {version}; "
        + f"commit {commit_of(found)}; {found['date'][:10]}."
    )


BLOCKS: dict[str, Callable[[Path], str]] = {
    "headline-cuda": lambda folder: headline(folder, "cuda"),
    "every-arm-cuda": lambda folder: every_arm(folder, "cuda"),
    "targets-cuda": targets.table,
    "peer-cpu": peer,
    **blocks.BLOCKS,
}


def fill(text: str, folder: Path = RESULTS) -> str:
    """`text` with every block regenerated; raises WorkbenchError for a block nobody fills."""

    def block(match: re.Match[str]) -> str:
        name = match.group(2)
        if name not in BLOCKS:
            raise WorkbenchError(f"README block {name!r} is not one of {', '.join(BLOCKS)}")
        return f"{match.group(1)}{BLOCKS[name](folder)}\n{match.group(3)}"

    return BLOCK.sub(block, text)


if __name__ == "__main__":
    README.write_text(fill(README.read_text()))
