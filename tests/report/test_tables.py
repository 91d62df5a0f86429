"""The tables: the comparison's own numbers, and what does not vary below them; and what results
show of themselves in a notebook, where nothing that a file brought runs."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.benchmarks.made_runs import comparison
from workbench.benchmarks.compare import stats
from workbench.benchmarks.compare.answers import Answer
from workbench.benchmarks.compare.comparison import AB
from workbench.benchmarks.runs import results
from workbench.config import Toggles
from workbench.engine.generation import Generation
from workbench.jupyter.pair import Pair
from workbench.report import profiles, tables
from workbench.trace.analysis import LAUNCHES
from workbench.trace.profile import Profile
from workbench.trace.spans import Recorder


def test_a_table_has_the_comparison_s_numbers():
    found = comparison()
    table = tables.speedup_table(found)
    columns = "Test,Toggled,t/s baseline,t/s toggled,Speedup,95% CI,n,verdict"
    assert ",".join(table.columns) == columns
    assert table.attrs["constant"] == {
        "Model": "tiny Q8_0", "Device": "embedded, 2 workers", "Toggle": "sync",
        "Baseline": "per_copy", "Background": "copy_stream=own, all else off",
        "Commit": "aaaaaaaa", "Date": "2026-11-21", "answer": str(found.answer("copy_boundary")),
    }  # fmt: skip
    arms = table[table["Test"] != tables.GEOMETRIC_MEAN]
    numbers = found.summary()
    assert list(arms["Speedup"].astype(float)) == pytest.approx(list(numbers["speedup"]), abs=6e-4)
    assert list(arms["verdict"]) == list(numbers["verdict"])
    assert dict(zip(arms["Toggled"], arms["verdict"], strict=True)) == {
        "copy_boundary": "faster", "write_read_boundary": "slower",
        "blocking_copies": "no difference", "per_copy (A/A)": "A/A control",
    }  # fmt: skip
    few = tables.speedup_table(comparison(rounds=1, tests=("tg32",)))
    assert set(few["95% CI"]) == {"-"}


def test_the_geometric_mean_comes_last_without_the_control():
    ab = comparison()
    numbers = ab.summary()
    numbers.loc[numbers["test"] == "pp512", "speedup"] *= 4
    ab.summary = lambda: numbers
    table = tables.speedup_table(ab)
    assert list(table["Test"][-3:]) == [tables.GEOMETRIC_MEAN] * 3
    for toggled, said in table[-3:].set_index("Toggled")["Speedup"].items():
        both = numbers[numbers["label"] == toggled]["speedup"]
        assert float(said) == pytest.approx(np.sqrt(both.prod()), abs=6e-4)
    alone = tables.speedup_table(comparison(tests=("tg32",)))
    assert tables.GEOMETRIC_MEAN not in set(alone["Test"])


def test_several_devices_and_models_stand_apart():
    several = comparison(), comparison(device="cuda", model="big"), comparison(model="big")
    numbers = tables.summary(*several)
    n = len(several[0].summary())
    devices = ["embedded, 2 workers"] * 2 * n + ["cuda, 2 workers"] * n
    assert list(numbers["device"]) == devices, "rows of one device stand together"
    table = tables.speedup_table(*several)
    assert {"Model", "Device"} <= set(table.columns)
    assert (table["Test"] == tables.GEOMETRIC_MEAN).sum() == 9


def test_steps_without_gaps_count_for_the_one_in_the_middle():
    gap = {"step": 3, "between": LAUNCHES, "before": "a", "after": "b", "traced_us": 5.0}
    for n_steps, n_gaps in ((1, "1"), (3, "0")):
        table = profiles.gaps_table(pd.DataFrame([gap]), n_steps).set_index("traced us")
        assert table.loc["gaps", f"between {LAUNCHES}"] == n_gaps


# in a notebook ------------------------------------------------------------------------------------

EVIL = "<script>alert('&\"')</script><img src=x onerror=alert(1)>"
OWN_TAGS = {"table", "caption", "thead", "tbody", "tr", "th", "td", "p", "br", "small", "b", "code"}


class Page(HTMLParser):
    """The tags and the text of a page."""

    def __init__(self, source: str):
        super().__init__()
        self.tags: set[str] = set()
        self.text = ""
        self.feed(source)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)

    def handle_data(self, data):
        self.text += data


def hostile() -> AB:
    """A comparison whose every name is a script: a run folder from a stranger."""
    made = comparison(model=EVIL, device=EVIL, rounds=5, tests=("tg32",))
    run, samples = made.run, made.samples
    names = {arm["name"]: f"{EVIL} {arm['name']}" for arm in run["arms"]}
    for arm in run["arms"]:
        arm["name"] = names[arm["name"]]
    run["result"] |= {"toggle": EVIL, "warm_up": {EVIL: {"stable": False, "rounds": 1}}}
    run["result"]["answers"] = {names[k]: v for k, v in run["result"]["answers"].items()}
    run |= {"run_id": EVIL, "started": EVIL, "tests": [EVIL], "commit": {"hash": EVIL}}
    return AB(run, samples.assign(arm=samples["arm"].map(names), test=EVIL))


def pair() -> Pair:
    traces = [Profile(Recorder(nvtx=False))] * 2
    return Pair(
        "tg4", Toggles(), Toggles(sync="packed"), (EVIL, EVIL), (1.0, 2.0),
        stats.Ratio(2.0, 1.9, 2.1, 5), stats.Band(0.9, 1.1), Answer("exact", True, 3, 0, 0.0),
        *traces, False,
    )  # fmt: skip


def recorded() -> results.Run:
    return results.Run(Path(EVIL), hostile().run, hostile().samples)


@pytest.mark.parametrize("make", [hostile, pair, recorded, lambda: Generation(text=EVIL * 2)])
def test_names_from_files_are_text_and_never_tags(make):
    page = Page(make()._repr_html_())
    assert page.tags <= OWN_TAGS and EVIL[:20] in page.text


def test_a_pair_says_whether_it_is_of_a_gpu():
    one = pair()
    assert Page(one._repr_html_()).text == one.line == repr(one)
    assert "faster, 2.000x" in one.line and "not of a GPU" in one.line
    assert "not of a GPU" not in one._replace(device_is_gpu=True).line
    made = comparison(rounds=5)
    empty = results.Run(Path("r"), made.run, made.samples.iloc[:0])
    assert Page(empty._repr_html_()).tags >= {"table", "p"}, "an interrupted run may have no sample"
