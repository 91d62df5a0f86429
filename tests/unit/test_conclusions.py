"""Notebooks end with the answer to their title, computed; the committed answer is the runs' own."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pandas as pd
import pytest

import workbench as wb
from workbench.answers import annotated, branches, conclusions, kept, launches, planned, proofs
from workbench.benchmarks.compare.comparison import AB, background
from workbench.benchmarks.runs.results import load_run
from workbench.benchmarks.times.gaps import Gaps
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
    of = f"{toggle}=" if toggle else ""  # a set's arms name their toggles themselves
    what = f"{of}{found.run['arms'][0]['name']}"
    where = f"In tg32 (beside {background(found.run)})"
    rows = [row for row in found.summary().itertuples() if not row.is_control]
    decided = sorted(
        (row for row in rows if row.verdict != "no difference"), key=lambda r: -r.speedup
    )
    lines = [
        f"{where}, {of}{r.label} is {r.speedup:.3f} times as fast as {what} "
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


def test_which_waits(tiny_model) -> None:
    path = tiny_model("tiny-llama", "Q8_0")
    with wb.Engine.load(
        path, device="null", toggles="baseline", n_ubatch=16, unsafe=True
    ) as prover:
        decode = proofs.proof_table(proofs.cycles(prover))
        train = proofs.proof_table(proofs.cycles(prover, 48, "train"))
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
    assert made[4] == "Between tokens these race: implicit (own) and packed_implicit (own)."
    assert "these race: write_read_boundary (own), implicit (own), implicit (compute)" in made[7]
    assert made[8:] == [*effects(ab("sync-off")), *effects(ab("sync-on"))]
    assert answer("02_sync_modes") == made


def test_what_building_costs(tiny_model) -> None:
    off, on = ab("reuse-off"), ab("reuse-on")
    with wb.Engine.load(
        tiny_model("tiny-llama", "Q8_0"), device="null", n_kv_pad=16, n_seqs=2,
        toggles=wb.Toggles(graph_reuse="set_rows"),
    ) as counter:  # fmt: skip
        steps = kept.reuse_table(counter)
    names = wb.Toggles.members("redo")
    layers = kept.layers_table({name: ab(name.replace("_", "-")) for name in names})
    worth = kept.worth_table(on)
    tables = {"phases": kept.phases_table(off), "steps": steps, "layers": layers, "worth": worth}
    quoted = "Verdict on #8366, at llama.cpp's build time: 1.01."
    made = conclusions.reuse(tables, quoted, off, on).splitlines()
    assert re.match(r"Building the graph anew costs a token .* ms here: graph .*prepare", made[0])
    assert made[2] == (
        "Of 33 tokens one after the other 30 reuse a program: all but the first and the 2 with "
        "which n_kv grows."
    )
    kept_us = 1e6 / on.summary().set_index("arm")["tps_toggled"]["set_rows"]
    assert "the price of this engine's Python" in made[4]
    assert f"With a build of 100 us it would be {(kept_us + 100) / kept_us:.3f} here" in made[4]
    assert f"a build of {conclusions.time(0.03 * kept_us)} and" in made[5]
    assert made[6] == quoted and made[7:] == [*effects(off), *effects(on)]
    committed = [line for line in answer("03_graph_reuse") if not line.startswith("Verdict")]
    assert committed == [line for line in made if line != quoted]


def tables_of_plans() -> dict[str, pd.DataFrame]:
    made = {
        "tokens": 24, "captured": 2, "twinned": 0, "updated": 0, "made anew": 0, "replayed": 24,
        "part by part": 0, "capture us": 40.0, "instantiate us": 60.0, "update us": float("nan"),
    }  # fmt: skip
    forced = [
        made | {"arm": "ours with set_rows", "captured": 3},
        made | {"arm": "ours with patch_pointers", "updated": 23, "update us": 17.25},
    ]
    proof = {"races": "none", "because": "enough: the wait for the logits"}
    return {
        "calls": pd.DataFrame({"arm": ["off", "a step"], "nodes": [54, 54], "calls": [54, 1]}),
        "made": pd.DataFrame([made | {"arm": arm} for arm in ("pr", "today", "ours")]),
        "forced": pd.DataFrame(forced),
        "repaid": planned.repaid_table(
            pd.DataFrame([made | {"arm": "pr"}, made | {"arm": "ours"}]), ab("plans-on")
        ),
        "gap": pd.DataFrame(
            {
                "arm": ["off", "a split", "a step"],
                "gap us": [40.31, 35.0, 29.0],
                "saved us": [float("nan"), 1.0, 10.0],
                "95% CI": ["", "-1.0..2.0", "9.0..11.0"],
                "captures us": [float("nan"), 99.0, 200.0],
                "repaid after tokens": ["", "not known", "20"],
            }
        ),
        "proof": pd.DataFrame([{"ordering": name} | proof for name in ("off", "a step")]),
    }


def test_when_plans_repay_themselves() -> None:
    tables, off, on = tables_of_plans(), ab("plans-off"), ab("plans-on")
    made = conclusions.plans(tables, off, on).splitlines()
    assert made[0] == (
        "By the device's clock captures are repaid after so many tokens: 20 (a step)."
    )
    assert made[1] == (
        "The device is given 54 kernels and copies a token; calls of the host for them: 54 (off) "
        "and 1 (a step)."
    )
    assert made[2].startswith("plans=pr captures 2 in 24 tokens, which takes 200 us in all. ")
    assert "ours with patch_pointers updates its plan for 23 of 24 tokens, 17.2 us each." in made
    assert "Plans where n_kv grows: 3 captured and 0 updated (ours with set_rows)." in made
    between = made.index(
        "Between the kernels of two tokens are 40.3 us (off), 35.0 us (a split) and 29.0 us (a "
        "step)."
    )
    assert made[between + 1 : between + 3] == [
        "By the device's clock a token is no shorter for sure with a split (95% CI -1.0..2.0).",
        "By the device's clock a token is 10.0 us shorter with a step (95% CI 9.0..11.0); its "
        "captures took 200 us, repaid after 20 tokens.",
    ]
    enough = "Nothing races. With plans as without, this is enough: the wait for the logits."
    assert made[made.index(enough) + 1 :] == [*effects(off), *effects(on)]
    committed = answer("04_plans")
    assert committed[committed.index(enough) + 1 :] == [*effects(off), *effects(on)]
    assert re.match(r"The device is given \d+ kernels and copies a token; calls", committed[1])
    table = tables["gap"].set_index("arm")["repaid after tokens"].replace("20", "not known")
    assert conclusions._by_the_clock(table) == (
        "By the device's clock no plan is known to repay its captures: no token is shorter."
    )


@pytest.mark.parametrize(
    ("us", "verdict", "said"),
    [
        (4.0, "faster", "That is repaid after 50 tokens: a token is 4.0 us shorter."),
        (-4.0, "slower", "That is never repaid, as a token is longer."),
        (
            4.0, "no difference",
            "The comparison does not tell when that is repaid, as it shows no difference.",
        ),
    ],
)  # fmt: skip
def test_when_a_capture_is_repaid(us: float, verdict: str, said: str) -> None:
    tables = tables_of_plans()
    repaid = planned.repaid_table(tables["made"], Stub(us, verdict))  # type: ignore[arg-type]
    assert repaid["us for captures"].tolist() == [200.0]
    (line,) = conclusions._repaid(tables["made"].set_index("arm"), repaid)
    assert line == f"plans=ours captures 2 in 24 tokens, which takes 200 us in all. {said}"


class Stub:
    """A comparison in which `ours` takes so many us less of a token of 100 us."""

    def __init__(self, us: float, verdict: str):
        self._row = {"arm": "ours", "is_control": False, "tps_baseline": 1e6 / 100,
                     "tps_toggled": 1e6 / (100 - us), "verdict": verdict}  # fmt: skip

    def summary(self) -> pd.DataFrame:
        return pd.DataFrame([self._row])


def test_what_races_with_plans_is_said() -> None:
    proof = tables_of_plans()["proof"].set_index("ordering")
    other = proof.assign(because=["enough: a", "enough: b"])
    assert list(conclusions._as_eager(other)) == [
        "Nothing races; enough: a (off) and enough: b (a step)."
    ]
    assert list(conclusions._as_eager(proof.assign(races=["none", 3]))) == ["These race: a step."]


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


def test_overlap_of_branches_as_a_table(tiny_model) -> None:
    path = tiny_model("tiny-llama", "Q8_0")
    one = wb.Toggles(graph_reuse="set_rows", sync="packed_implicit")
    arms = {"streams=1": one, "streams=3": one.switched("streams", "3")}
    with wb.Engine.load(path, device="embedded", toggles="baseline") as engine:
        found = branches.overlap_table(engine, arms, n_tokens=3)
        tick_ns = engine.backend.clock().tick_ns
    assert found["arm"].tolist() == list(arms) and found["overlap"][0] == "0.0%"
    assert found["us a branch"][0] == branches.NONE and " to " in found["us a branch"][1]
    assert found["branches unresolved"].tolist() == ["0 of 0", "0 of 6"]
    assert (found["us with two kernels or more"] <= found["us with any"]).all()
    assert (found[["us a token", "with noting", "times as long"]] > 0).all().all()
    assert found.attrs["constant"]["the device's clock goes on by"] == f"{tick_ns} ns"
    assert f"the device's clock goes on by: {tick_ns} ns; unresolved: shorter than 10" in str(found)


def test_whether_streams_help(tiny_model) -> None:
    path = tiny_model("tiny-llama", "Q8_0")
    one = wb.Toggles(graph_reuse="set_rows", sync="packed_implicit")
    arms = {"streams=1": one, "streams=3": one.switched("streams", "3")}
    with wb.Engine.load(path, device="embedded", toggles="baseline", unsafe=True) as engine:
        forks = branches.forks_table(engine, arms)
        lifetimes = branches.lifetimes_table(engine, arms["streams=3"])
        frames = branches.layer_frames(engine, arms["streams=3"], layer=0)
    assert forks["streams"].tolist() == [1, 3] and forks["waits of streams"].tolist() == [0, 8]
    assert (
        lifetimes["races"].tolist()[2] == "none" and "none" not in lifetimes["races"].tolist()[:2]
    )
    assert lifetimes["all finds it"].tolist() == ["yes", "yes", "nothing to find"]
    lost = {name: [row for row in frame["lost"] if row] for name, frame in frames.items()}
    assert lost["lifetimes=serial"] and not lost["lifetimes=visibility"]
    runs = ab("streams-off"), ab("streams-on"), ab("streams-fused")
    made = conclusions.streams(forks, lifetimes, *runs).splitlines()
    assert made[0].startswith("With streams=3 a token has ")
    assert made[1] == "Side by side, memory races with lifetimes serial and interleaved."
    assert made[-len([e for run in runs for e in effects(run)]) :] == [
        effect for run in runs for effect in effects(run)
    ]
    assert answer("05_streams")[-1] == made[-1]
