"""The public names: they alone are shown, and each says what it takes, returns and raises."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from types import FunctionType

import pytest
from IPython.core.completer import IPCompleter
from IPython.core.interactiveshell import InteractiveShell

import workbench as wb

OURS = Path(__file__).parents[1] / "trace" / "files" / "ours-eager.pftrace.gz"
NAMES = {
    "AB", "Engine", "EngineConfig", "Profile", "Program", "Run", "Sampling", "Sweep",
    "Toggles", "ab", "bench", "check", "compare", "kv_visits", "lab", "load", "new_run_folder",
    "plot", "profile", "runs", "serve_bench",
}  # fmt: skip


def test_public_names_are_shown_and_nothing_else():
    assert set(dir(wb)) >= NAMES and not any(name.startswith("_") for name in dir(wb))
    assert sorted(wb.__all__) == dir(wb)
    namespace: dict[str, object] = {}
    exec("from workbench import *", namespace)
    assert set(dir(wb)) <= set(namespace) and namespace["Toggles"] is wb.Toggles
    for name in dir(wb):
        assert getattr(wb, name) is not None and name not in sys.builtin_module_names


def test_tab_completes_the_public_names():
    shell = InteractiveShell()
    shell.user_ns["wb"] = wb
    completer = IPCompleter(shell=shell, namespace=shell.user_ns, global_namespace=shell.user_ns)
    completer.use_jedi = False
    _, found = completer.complete("wb.be")
    assert [one.rpartition(".")[2] for one in found] == ["bench"]
    _, found = completer.complete("wb.")
    assert {one.rpartition(".")[2] for one in found} == set(dir(wb))


@pytest.mark.long
def test_a_wrong_name_is_answered_with_the_nearest():
    """In the message, which IPython shows, too; and once."""
    with pytest.raises(AttributeError, match=r"'bnch'\. Did you mean: 'bench'"):
        _ = wb.bnch
    code = "import workbench as wb; wb.Togles"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "has no attribute 'Togles'. Did you mean: 'Toggles'?" in said.stderr
    assert said.stderr.count("Did you mean") == 1


# docstrings ---------------------------------------------------------------------------------------

# methods of the public classes that a notebook calls
METHODS = {
    "AB": ["load", "save", "summary", "table", "to_frame", "percentiles", "evidence", "plot",
           "to_csv", "to_parquet"],
    "Engine": ["load", "variant", "generate", "prefill", "step", "submit", "program", "resolve"],
    "Profile": ["kernels", "phases", "gaps", "summary", "save", "plot", "to_frame"],
    "Toggles": ["preset", "switched", "values", "members"],
}  # fmt: skip
CALLABLES: dict[str, Callable[..., object]] = {
    **{name: getattr(wb, name) for name in dir(wb) if name != "lab"}, "lab": type(wb.lab),
    **{f"{of}.{name}": getattr(getattr(wb, of), name) for of, names in METHODS.items()
       for name in names},
    "lab.panel": wb.lab.panel,
}  # fmt: skip
RETURNS = re.compile(r"\breturns?\b|\bis given\b", re.IGNORECASE)
NAMES_IT = re.compile(r"(A|An|One|The|These|All|How) ")  # its first words are what it returns
# what refuses nothing: tables of what is there, and classes that a function fills
REFUSES_NOTHING = {
    "kv_visits", "new_run_folder",
    *(f"AB.{name}" for name in ("summary", "table", "to_frame", "percentiles", "evidence")),
    *(f"Profile.{name}" for name in ("phases", "gaps", "summary", "to_frame")),
}  # fmt: skip


def parameters_of(what: Callable[..., object]) -> list[str]:
    """The parameters of a call; of a class those of its constructor, of a NamedTuple its fields."""
    if isinstance(what, type) and issubclass(what, tuple):
        return list(what._fields)
    given = inspect.signature(what).parameters.values()
    return [p.name for p in given if p.name not in ("self", "cls", "_")]


def doc_of(what: Callable[..., object]) -> str:
    own = inspect.getdoc(what) or ""
    made = inspect.getdoc(what.__init__) or "" if isinstance(what, type) else ""
    return f"{own}\n{made}"


@pytest.mark.parametrize("name", CALLABLES)
def test_a_docstring_names_every_parameter_what_is_returned_and_what_is_raised(name):
    what = CALLABLES[name]
    doc = doc_of(what)
    missing = [p for p in parameters_of(what) if not re.search(rf"\b{re.escape(p)}\b", doc)]
    assert not missing, f"{name} says nothing of {missing}"
    if not isinstance(what, type):
        assert RETURNS.search(doc) or NAMES_IT.match(doc), f"{name} does not say what it returns"
    if name not in REFUSES_NOTHING:
        assert re.search(r"\w+Error\b", doc), f"{name} does not say what it raises"


def test_every_public_attribute_of_a_public_class_says_what_it_is():
    kinds = (property, cached_property, classmethod, staticmethod, FunctionType)
    classes = {name: of for name in dir(wb) if isinstance(of := getattr(wb, name), type)}
    silent = [
        f"{name}.{attribute}"
        for name, of in classes.items()
        for attribute, what in inspect.getmembers_static(of)
        if isinstance(what, kinds) and not attribute.startswith("_") and not inspect.getdoc(what)
    ]
    assert not silent


def test_the_tables_of_a_trace_name_their_columns_and_units():
    prof = wb.Profile.load(OURS)
    for table in (prof.phases, prof.gaps):
        doc = inspect.getdoc(table) or ""
        own = [column for column in table() if "_" in column or column in ("step", "between")]
        assert own and not [column for column in own if column not in doc]
        assert re.search(r"\bus\b", doc), "and the unit of their times"
