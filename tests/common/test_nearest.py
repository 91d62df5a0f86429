"""A wrong name names the right one."""

import re

import pytest

from workbench.benchmarks.workload import parse
from workbench.common.errors import UsageError
from workbench.common.nearest import choices, nearest
from workbench.config import EngineConfig, Toggles
from workbench.engine.load import config_of


def test_case_and_dashes_do_not_matter():
    known = ["copy_stream", "sync", "Q4_0"]
    for typed, meant in {"copy-stream": "copy_stream", "SYNC": "sync", "q4": "Q4_0"}.items():
        assert nearest(typed, known) == meant
    assert nearest("elephant", known) is None and nearest("", known) is None
    assert choices("snyc", known) == "did you mean sync? choose one of copy_stream, sync, Q4_0"
    assert choices("elephant", known).startswith("choose one of")


@pytest.mark.parametrize(("make", "meant"), [
    (lambda: Toggles.members("fuze"), "fuse"), (lambda: Toggles.members("plan"), "plans"),
    (lambda: Toggles(sync="paked"), "packed"), (lambda: Toggles.preset("bset"), "best"),
    (lambda: EngineConfig(device="cpuda"), "cuda"), (lambda: EngineConfig(nvtx="of"), "off"),
    (lambda: config_of({"nctx": 3}), "n_ctx"), (lambda: parse("tgg32"), "tg32"),
    (lambda: parse("t128"), "tg128"), (lambda: parse("pp512-tg64"), "pp512+tg64"),
    (lambda: parse("tg32@4096"), "tg32@d4096"),
    (lambda: parse("pp0+tg4"), "tg4"),
])  # fmt: skip
def test_what_does_not_exist_names_the_nearest(make, meant):
    with pytest.raises(UsageError, match=re.escape(f"did you mean {meant}?")):
        make()
