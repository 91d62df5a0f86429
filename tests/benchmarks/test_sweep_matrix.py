"""Which cells a matrix has, which it leaves out and why, and the keys by which they are found."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.profiles import examples
from workbench.benchmarks.sweep.cells import grouped
from workbench.benchmarks.sweep.matrix import matrix_of, read_matrix
from workbench.benchmarks.sweep.sweep import sweep
from workbench.common.errors import UsageError
from workbench.config import FAMILIES, Toggles

# toggles without a clash or a need, so that every product is whole
FREE = {"sync": ("per_copy", "packed", "auto"), "fuse": ("off", "on"), "pdl": ("off", "on"),
        "streams": ("1", "2", "3")}  # fmt: skip


@st.composite
def axes(draw):
    """Values of some axes, each in any order."""

    def some(values):
        return draw(st.lists(st.sampled_from(values), min_size=1, unique=True))

    names = draw(st.lists(st.sampled_from(sorted(FREE)), unique=True))
    return {
        "models": some(["a.gguf", "x/b.gguf"]),
        "tests": some(["tg4", "pp8", "pp8+tg4"]),
        "n_depth": some([0, 16]),
        "toggles": {name: some(FREE[name]) for name in names},
        "engine": {"n_ubatch": some([16, 512]), "threads": some([1, 2])},
        "presets": some(["baseline", "best"]),
    }


def flat(asked):
    """The axes by the names that a cell has."""
    return {"model": [p.rpartition("/")[2].removesuffix(".gguf") for p in asked["models"]],
           "test": asked["tests"], "n_depth": asked["n_depth"], **asked["engine"],
           "preset": asked["presets"], **asked["toggles"]}  # fmt: skip


@given(asked=axes(), data=st.data())
@settings(max_examples=examples(100))
def test_cells_are_the_product_without_what_is_excluded(asked, data):
    own = flat(asked)
    some = data.draw(st.lists(st.sampled_from(sorted(own)), min_size=1, unique=True))
    rule = {name: [data.draw(st.sampled_from(own[name]))] for name in some}
    every = [dict(zip(own, values, strict=True)) for values in itertools.product(*own.values())]
    kept = [c for c in every if not all(c[name] in values for name, values in rule.items())]
    matrix = matrix_of(**asked, exclude=[rule])
    if not kept:
        with pytest.raises(UsageError, match="the matrix has no cell"):
            matrix.cells()
        return
    cells, left_out = matrix.cells()
    named = [{name: cell.axes[name] for name in own} for cell in cells]
    assert named == kept, "in order, the first axis slowest"
    assert len(left_out) == len(every) - len(kept)
    assert all("excluded by " in one.reason for one in left_out)
    for cell in cells:
        assert cell.config.n_ubatch == cell.axes["n_ubatch"]
        assert cell.workload.n_depth == cell.axes["n_depth"]
        assert cell.config.n_ctx >= cell.workload.n_cells
        assert cell.wanted.name == cell.axes["preset"]


@given(asked=axes(), data=st.data())
@settings(max_examples=examples(100))
def test_a_key_names_a_cell_whatever_the_order_and_the_other_cells(asked, data):
    def keys(of):
        cells, _ = matrix_of(**of).cells()
        return {cell.key("h" + cell.axes["model"], 0): cell.axes for cell in cells}

    was = keys(asked)
    mixed = {name: data.draw(st.permutations(asked[name]))
             for name in ("models", "tests", "n_depth", "presets")}  # fmt: skip
    for table in ("toggles", "engine"):
        order = data.draw(st.permutations(sorted(asked[table])))
        mixed[table] = {name: data.draw(st.permutations(asked[table][name])) for name in order}
    now = keys(mixed)
    assert now.keys() == was.keys() and all(now[key] == was[key] for key in was)
    more = keys(asked | {"tests": [*asked["tests"], "tg5"]})
    assert set(was) < set(more)
    n = len(list(itertools.product(*flat(asked).values())))
    assert len(was) <= n
    same = {"baseline"} == set(asked["presets"]) or not FREE.keys() & asked["toggles"].keys()
    assert len(was) == n or not same, "only toggles that two names have in common are one cell"
    cells, _ = matrix_of(**asked).cells()
    assert not {cell.key("another", 0) for cell in cells} & set(was)
    assert not {cell.key("h" + cell.axes["model"], 1) for cell in cells} & set(was)


@given(asked=axes(), data=st.data(), most=st.integers(2, 7))
@settings(max_examples=examples(100))
def test_groups_have_every_missing_cell_once(asked, data, most):
    """But for baselines, which begin every comparison."""
    cells = {c.key(c.axes["model"], 0): c for c in matrix_of(**asked).cells()[0]}
    found = data.draw(st.sets(st.sampled_from(sorted(cells))))
    groups = grouped(cells, found, most)
    counted = [key for group in groups for key in group.keys]
    firsts = {group.keys[0] for group in groups}
    assert set(cells) - found <= set(counted)
    assert all(counted.count(key) == 1 and key not in found for key in counted if key not in firsts)
    assert all(1 <= len(group.keys) <= most and group.n_arms != 2 for group in groups)
    for group in groups:
        same = {(cell.path, cell.config, cell.workload) for cell in group.cells}
        assert len(same) == 1, "only toggles differ"
    assert len({group.name for group in groups}) == len(groups)


def test_impossible_cells_have_a_reason():
    cells, left_out = matrix_of(
        "a.gguf", "pp4+tg4", n_depth=[0, 8], n_parallel=[1, 2],
        toggles={"sync": ["event_guarded", "packed"], "copy_stream": ["own", "compute"]},
        presets="baseline",
    ).cells()  # fmt: skip
    why = [one.reason for one in left_out]
    assert len(cells) == 3 * 3 and len(why) == 7
    assert sum("clash" in reason for reason in why) == 3
    assert sum("for one sequence alone; n_depth=8 with n_parallel=2" in one for one in why) == 4
    assert {cell.workload.name for cell in cells} == {"pp4+tg4@b1", "pp4+tg4@b2", "pp4+tg4@d8"}
    assert {cell.config.n_seqs for cell in cells} == {1, 2}
    cells, left_out = matrix_of(
        "a.gguf", sets=["", "sync=packed pdl=on"], toggles={"pdl": ["off", "on"]}
    ).cells()
    assert [one.reason for one in left_out] == [
        "set 'sync=packed pdl=on' has another pdl than pdl=off"
    ]
    assert [cell.wanted.changes.get("sync") for cell in cells] == [None, None, "packed"]


def test_values_with_commas_are_a_list():
    """As the command takes them, in Python and in a TOML file."""
    lists = {"tests": ["tg4", "pp8"], "presets": ["baseline", "best"],
             "toggles": {"sync": ["per_copy", "packed"], "streams": [1, 2]}}  # fmt: skip
    texts = {"tests": "tg4,pp8", "presets": "baseline,best",
             "toggles": {"sync": "per_copy, packed", "streams": "1,2"}}  # fmt: skip
    assert matrix_of("a.gguf", **texts) == matrix_of("a.gguf", **lists)
    texts["toggles"] = "sync=per_copy,packed streams=1,2"
    assert matrix_of("a.gguf", **texts) == matrix_of("a.gguf", **lists)


@pytest.mark.parametrize(("asked", "said"), [
    ({"engine": {"n_ubach": [1]}}, "axis 'n_ubach' does not exist; did you mean n_ubatch"),
    ({"engine": {"sync": ["packed"]}}, "sync is a toggle and no setting; give toggles={'sync'"),
    ({"toggles": {"n_ubatch": [8]}}, "n_ubatch is a setting and no toggle"),
    ({"engine": {"n_ubatch": [0]}}, "n_ubatch=0 must be at least 1"),
    ({"engine": {"n_ubatch": ["many"]}}, "n_ubatch='many' is no whole number"),
    ({"engine": {"n_ubatch": [64, 64]}}, "n_ubatch has 64 twice; give each value once"),
    ({"tests": "tg4,tg4"}, "test has tg4 twice; give each value once"),
    ({"toggles": {"sync": "packed,packed"}}, "sync has packed twice; give each value once"),
    ({"engine": {"n_ubatch": []}}, "n_ubatch has no value, so the matrix has no cell"),
    ({"engine": {"device": "null"}}, "device 'null' computes nothing"),
    ({"toggles": {"synk": ["packed"]}}, "toggle 'synk' does not exist"),
    ({"toggles": {"sync": ["pack"]}}, "toggle sync='pack' does not exist"),
    ({"toggles": {"sync": "packed,pack"}}, "toggle sync='pack' does not exist"),
    ({"toggles": {"sync": []}}, "sync has no value, so the matrix has no cell"),
    ({"sets": ["sync"]}, "toggle sync has no value; write sync="),
    ({"presets": "worst"}, "preset 'worst' does not exist"),
    ({"tests": []}, "no test was named"),
    ({"tests": "tg0"}, "test 'tg0' does not exist"),
    ({"n_depth": [-1]}, "n_depth=-1 must be 0 or more"),
    ({"n_parallel": [0]}, "n_parallel=0 must be 1 or more"),
    ({"tests": "tg4@d8", "n_depth": [16]}, "test tg4@d8 has a depth or sequences of its own"),
    ({"exclude": "sync=packed"}, "no cell has an axis 'sync' to exclude; choose one of model"),
    ({"exclude": "test"}, "exclusion 'test' has no value; write it as test=VALUE"),
    ({"exclude": "test=tg5"}, "exclusion test=tg5: no cell has it; test is tg32"),
    ({"exclude": [{}]}, "an exclusion names no axis"),
    ({"exclude": 3}, "exclude=3 is no exclusion; write it as 'sync=packed n_ubatch=128'"),
    ({"exclude": [3]}, "exclude=3 is no exclusion"),
    ({"exclude": [["a"]]}, r"exclude=\['a'\] is no exclusion"),
    ({"exclude": None}, "exclude=None is no exclusion"),
    ({"models": []}, "model has no value"),
    ({"models": ["a/x.gguf", "b/x.gguf"]}, "two models have the name x"),
    ({"repetitions": 0}, "repetitions=0: give 1 or more"),
    ({"seed": -1}, "seed=-1 must be 0 or more"),
    ({"engine": {"n_ubatch": range(1, 400), "threads": range(1, 400)}}, "159,201 cells, and "),
])  # fmt: skip
def test_a_wrong_matrix_is_one_line(asked, said):
    with pytest.raises(UsageError, match=said) as error:
        matrix_of(**({"models": "a.gguf"} | asked))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("text", "said"), [
    ("models = [", "is no TOML file"),
    ("model = 'a'", "key 'model' does not exist; did you mean models"),
    ("n_ubatch = 64", r"n_ubatch belongs in a table; write it below a line \[engine\]"),
    ("sync = 'packed'", r"sync belongs in a table; write it below a line \[toggles\]"),
    ("toggles = 'sync'", r"toggles must be a table, as \[toggles\]"),
    ("repetitions = 'many'", "repetitions='many' is no whole number"),
])  # fmt: skip
def test_a_wrong_file_is_one_line(tmp_path, text, said):
    path = tmp_path / "sweep.toml"
    with pytest.raises(UsageError, match=r"sweep\.toml cannot be read: No such file"):
        read_matrix(path)
    path.write_text(text)
    with pytest.raises(UsageError, match=said) as error:
        read_matrix(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("text", "said"), [
    ("[toggles]\nfuse = 1.5", "toggle fuse=1.5 does not exist; choose one of off, on"),
    ("[engine]\nn_ubatch = 'x'", "n_ubatch='x' is no whole number"),
    ("tests = 'zz8'", "test 'zz8' does not exist"), ("models = 5", "5 is no path; give the path"),
    ('models = ""', "'' is no path; give the path of a GGUF file"),
    ("repetitions = 0", "repetitions=0: give 1 or more"),
    ("exclude = ['fuse=x']", "exclusion fuse=x: no cell has it; fuse is off, on"),
])  # fmt: skip
def test_a_wrong_value_of_a_file_names_the_file(tmp_path, text, said):
    """An argument that is wrong in itself does not."""
    path, given = tmp_path / "sweep.toml", {} if "models" in text else {"models": "a.gguf"}
    path.write_text(text)
    asked = given | ({"toggles": {"fuse": ["off", "on"]}} if "exclude" in text else {})
    with pytest.raises(UsageError) as error:
        sweep(**asked, matrix=path, dry_run=True, out=tmp_path / "s")
    assert str(error.value).startswith(f"{path}: {said}") and "\n" not in str(error.value)
    path.write_text("repetitions = 2")
    with pytest.raises(UsageError, match=r"^seed=-1 must be 0 or more"):
        sweep("a.gguf", seed=-1, matrix=path, dry_run=True, out=tmp_path / "s")


def test_every_toggle_and_family_can_be_an_axis():
    for name in (*FAMILIES, *Toggles.names()):
        values = Toggles.values(name)
        matrix = matrix_of("a.gguf", toggles={name: values}, presets="baseline")
        cells, left_out = matrix.cells()
        assert len(cells) + len(left_out) == len(values)
