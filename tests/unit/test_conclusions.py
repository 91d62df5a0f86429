"""Notebooks end with the answer to their title, computed; the committed answer is the runs' own."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pandas as pd
import pytest

import workbench as wb
from notebooks import annotated, conclusions, launches, proofs
from workbench.bench.comparison import AB, background
from workbench.bench.gaps import Gaps
from workbench.bench.results import load_run
from workbench.trace.profile import Timeline
from workbench.trace.spans import HOST_LANE, Span

ROOT = Path(__file__).resolve().parents[2]
RUNS = ROOT / "data" / "results"


def ab(name: str) -> AB:
    return AB.load(RUNS / f"notebook-{name}")


def answer(notebook: str) -> list[str]:
    """The lines of the committed notebook's last cell."""
    last = nbformat.read(ROOT / "notebooks" / f"{notebook}.ipynb", 4).cells[-1]
    assert last.source.startswith("conclusions.") or "\nconclusions." in last.source
    return last.outputs[0].data["text/plain"].splitlines()


def effects(found: AB) -> list[str]:
    """What is said of a comparison in one test: those that differ, the quickest first; the rest."""
    toggle = found.run["result"]["toggle"]
    what = f"{toggle}={found.run['arms'][0]['name']}"
    where = f"In tg32 (beside {background(found.run)})"
    rows = [row for row in found.summary().itertuples() if not row.is_control]
    decided = sorted(
        (row for row in rows if row.verdict != "no difference"), key=lambda r: -r.speedup
    )
    lines = [
        f"{where}, {toggle}={r.label} is {r.speedup:.3f} times as fast as {what} "
        f"(95% CI {r.low:.3f}..{r.high:.3f})."
        for r in decided
    ]
    same = [r.label for r in rows if r.verdict == "no difference"]
    return lines + ([f"{where}, no difference from {what}: {listed(same)}."] if same else [])


def listed(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]


def test_a_token(tmp_path) -> None:
    found = ab("tour")
    steps = pd.DataFrame(
        {
            "launches": [53], "copies": [7], "waits": [13], "step_us": [3100.0],
            "build_us": [1780.0], "host_us": [444.0], "wait_us": [52.7], "device_us": [746.0],
            "idle_us": [float("nan")],
        }
    )  # fmt: skip
    made = conclusions.token(steps, found).splitlines()
    assert made[0].startswith(
        "One token is 53 launches, 7 copies and 13 waits of the host; untraced"
    )
    medians = found.samples[found.samples["test"] == "tg32"].groupby("arm")["ns"].median() / 1e3
    for arm in ("rebuild", "set_rows"):
        assert f"{conclusions.time(medians[arm])} with graph_reuse={arm}" in made[0]
    assert "takes the host 3.10 ms: 1.78 ms to build the program, 444 us to issue it" in made[1]
    assert "The device works 746 us of that. It stands still unknown" in made[2]
    assert made[3:] == effects(found)
    committed = answer("00_tour")
    assert re.sub(r"^.*?; ", "", committed[0]) == re.sub(r"^.*?; ", "", made[0])
    assert committed[3:] == made[3:]


def test_launches_of_a_layer(tiny_model) -> None:
    toggles = wb.Toggles()
    model = tiny_model("tiny-llama", "Q8_0")
    with (
        wb.Engine.load(model, device="null", toggles=toggles) as engine,
        engine.variant(toggles.switched("fuse", "on")) as fused,
    ):
        layers = {
            "unfused": launches.nodes_table(engine.program()),
            "fused": launches.nodes_table(fused.program()),
        }
    runs = ab("fusion"), ab("defer")
    made = conclusions.launches(layers, *runs).splitlines()
    assert made[0] == "A layer takes 23 launches unfused and 7 fused."
    assert made[1:] == [*effects(runs[0]), *effects(runs[1])]
    committed = answer("10_fusion")
    assert re.fullmatch(
        r"A layer takes \d+ launches unfused, \d+ fused and \d+ with halved norms\.", committed[0]
    )
    assert committed[1:] == made[1:]


def of_the_notebook(cycles: dict) -> dict:
    """The orderings that the recorded notebook looked at: packed_implicit came after it."""
    return {key: cycle for key, cycle in cycles.items() if "packed_implicit" not in key[0]}


def test_which_waits(tiny_model) -> None:
    path = tiny_model("tiny-llama", "Q8_0")
    with wb.Engine.load(
        path, device="null", toggles="baseline", n_ubatch=16, unsafe=True
    ) as prover:
        decode = proofs.proof_table(of_the_notebook(proofs.cycles(prover)))
        train = proofs.proof_table(of_the_notebook(proofs.cycles(prover, 48, "train")))
    run = load_run(RUNS / "notebook-gaps")
    gaps = Gaps(run.run, run.samples)
    made = conclusions.waits(decode, train, gaps, ab("sync-off"), ab("sync-on")).splitlines()
    assert made[0] == (
        "Of llama.cpp's 13 waits between tokens, 11 are superfluous with copies on a stream of "
        "their own, and 12 with one stream."
    )
    (fit,) = gaps.fits.values()
    assert f"A wait adds {fit.wait_us:.2f} us" in made[1] and f"{fit.base_us:.1f} us" in made[1]
    assert "with one stream, enough: the wait for the logits." in made[3]
    assert made[4] == "Between tokens these race: implicit (own)."
    assert "these race: write_read_boundary (own), implicit (own), implicit (compute)" in made[7]
    assert made[8:] == [*effects(ab("sync-off")), *effects(ab("sync-on"))]
    assert answer("02_sync_modes") == made


@pytest.mark.parametrize(
    ("us", "said"),
    [(float("nan"), "unknown"), (12.34, "12.3 us"), (746.4, "746 us"), (3102.6, "3.10 ms")],
)
def test_times(us: float, said: str) -> None:
    assert conclusions.time(us) == said


def test_a_conclusion_is_prose_in_a_notebook() -> None:
    shown = conclusions.Conclusion("one `h s` < two\nthree")
    assert shown._repr_html_() == (
        '<p class="wb-answer">one <code>h s</code> &lt; two<br>three</p>'
    )


def spans() -> list[Span]:
    def host(category: str, start: int, end: int, **more: object) -> Span:
        return Span(category, category, HOST_LANE, start * 1000, end * 1000, {"step": 8, **more})

    device = {"step": 8, "kind": "launch", "split": 1}
    return [
        host("step", 0, 100), host("build", 0, 20), host("write", 20, 22, split=0),
        host("launch", 22, 24, split=0), host("copy", 25, 30, split=1),
        host("sync", 30, 34, split=1), host("launch", 40, 44, split=1),
        host("launch", 50, 54, split=1), host("build", 56, 58), host("sync", 60, 90, split=1),
        host("read", 90, 95, split=1),
        Span("a", "device", "cuda stream 0", 45_000, 80_000, device),
    ]  # fmt: skip


def test_phases_of_a_token() -> None:
    frame = Timeline(spans()).to_frame()
    assert [(p.what, p.start_us, p.end_us) for p in annotated.phases(frame)] == [
        ("the host makes batch, graph and program", 0, 20),
        ("inputs go to the device", 20, 34),
        ("the host launches", 40, 54),
        ("the device computes", 45, 80),
        ("the host waits for the logits", 60, 95),
    ]
    texts = {t.get_text() for t in annotated.token(frame).axes[0].texts}
    assert "1  the host makes batch, graph and program: 20 us" in texts
    assert "5  the host waits for the logits: 35 us" in texts
    with pytest.raises(ValueError, match="no step"):
        annotated.token(frame.iloc[:0])
