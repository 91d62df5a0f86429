"""The tables beside llama.cpp: speed on a CPU, and how right both are. `make peer` records them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from data.measure.recorded import commit_of
from workbench.report.tables import markdown

MADE = {
    "quantised": "{name}, by llama.cpp's quantiser",
    "blocks": "{name}, random blocks",
    "rope": "keys of linear RoPE scaling",
    "qwen2": "qwen2 {name}",
    "parts": "in parts, {name}",
}
SIDES = {"llama.cpp": "llama.cpp", "f16": "workbench", "q8_0": "with --expand q8_0"}


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


def peer_files(folder: Path) -> str:
    """How far llama.cpp and the engine are from float64 on files of each kind, from `make peer`."""
    found = json.loads((folder / "peer-files.json").read_text())
    worst: dict[str, dict[str, float]] = {}
    for row in found["files"]:
        name = row["name"].split()[-1] if row["kind"] in ("quantised", "blocks") else row["name"]
        said = worst.setdefault(MADE[row["kind"]].format(name=name), {})
        each = {"llama.cpp": row["llama.cpp"]["nmse"]}
        each |= {expand: of["nmse"] for expand, of in row["workbench"].items()}
        for side, nmse in each.items():
            said[side] = max(nmse, said.get(side, 0.0))
    rows = [
        {"File": name} | {side: f"{of[side]:.1e}" if side in of else "" for side in SIDES}
        for name, of in worst.items()
    ]
    return (
        markdown(pd.DataFrame(rows).rename(columns=SIDES))
        + f"\n\nNMSE of {found['files'][0]['n_tokens']} tokens, one by one, against float64 of the "
        + "file's own values; the worst of tiny-llama, tiny-qwen2 and tiny-qwen3. "
        + f"llama-cpp-python {found['versions']['llama-cpp-python']}; "
        + f"commit {commit_of(found)}; {found['date'][:10]}."
    )


BLOCKS: dict[str, Callable[[Path], str]] = {"peer-cpu": peer, "peer-files": peer_files}
