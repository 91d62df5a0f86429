"""What results show of themselves in a notebook: nothing that a file brought runs in the page."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest
from comparisons import comparison

from workbench.benchmarks.compare import stats
from workbench.benchmarks.compare.answers import Answer
from workbench.benchmarks.compare.comparison import AB
from workbench.benchmarks.runs import results
from workbench.config import Toggles
from workbench.engine.generation import Generation
from workbench.jupyter.pair import Pair
from workbench.trace.profile import Profile
from workbench.trace.window import WindowRecorder

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
    run["result"]["answers"] = {names[k]: v for k, v in run["result"]["answers"].items()}
    run["result"]["toggle"] = EVIL
    run["result"]["warm_up"] = {
        EVIL if k == "tg32" else k: v for k, v in run["result"]["warm_up"].items()
    }
    run |= {"run_id": EVIL, "started": EVIL, "tests": [EVIL], "commit": {"hash": EVIL}}
    return AB(run, samples.assign(arm=samples["arm"].map(names), test=EVIL))


def pair() -> Pair:
    traces = Profile(WindowRecorder(nvtx=False)), Profile(WindowRecorder(nvtx=False))
    return Pair(
        "tg4", Toggles(), Toggles(sync="packed"), (EVIL, EVIL), (1.0, 2.0),
        stats.Ratio(2.0, 1.9, 2.1, 5), stats.Band(0.9, 1.1), Answer("exact", True, 3, 0, 0.0),
        *traces, False,
    )  # fmt: skip


def recorded() -> results.Run:
    made = hostile()
    return results.Run(Path(EVIL), made.run, made.samples)


def generated() -> Generation:
    return Generation(text=f"{EVIL}{EVIL}")


@pytest.mark.parametrize("make", [hostile, pair, recorded, generated])
def test_names_from_files_are_text_and_never_tags(make):
    page = Page(make()._repr_html_())
    assert page.tags <= OWN_TAGS and EVIL[:20] in page.text


def test_a_comparison_shows_its_table_its_caption_and_its_sentences():
    made = comparison(tests=("tg32",))
    page = Page(made._repr_html_())
    assert {"table", "p"} <= page.tags
    for said in (*made.table()["Toggled"], *made.verdict.splitlines(), made.caption):
        assert said in page.text


def test_a_run_shows_what_it_is_and_a_row_for_every_test_and_arm(tmp_path):
    made = comparison(rounds=5)
    run = results.Run(tmp_path, made.run, made.samples)
    shown = run._repr_html_()
    for word in ("tiny Q8_0", made.run["run_id"], "ab, complete", str(tmp_path)):
        assert word in Page(shown).text
    assert shown.count("<tr") == 1 + len(made.run["tests"]) * len(made.run["arms"])
    empty = results.Run(tmp_path, made.run, pd.DataFrame(made.samples.iloc[:0]))
    assert Page(empty._repr_html_()).tags >= {"table", "p"}, "an interrupted run may have no sample"


def test_a_pair_shows_its_speedup_line():
    made = pair()
    assert Page(made._repr_html_()).text == made.line == repr(made)
    assert "faster, 2.000x" in made.line and "bit-equal" in made.line
    assert "not of a GPU" in made.line
    assert "not of a GPU" not in made._replace(device_is_gpu=True).line
