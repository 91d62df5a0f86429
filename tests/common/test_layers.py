"""The house: imports point down only, pure layers stay pure, each toggle has one room, and nothing
leaves the gate altogether."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Collection
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from data.measure.proofs import EXHAUSTIVE
from workbench.config import FAMILIES, Toggles
from workbench.config.table import ROWS
from workbench.program.sync_modes import Ordering

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "workbench"
PATHS = {
    ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p
    for p in sorted(PACKAGE.rglob("*.py"))
}
# from the top; a layer may import itself and what stands below it
LAYERS = [
    ("__main__",), ("answers", "cli", "jupyter"), ("traffic",), ("server",), ("report",),
    ("benchmarks",), ("trace",), ("engine",), ("backend",), ("program",), ("model",), ("graph",),
    ("config",), ("common", "trace.spans"),
]  # fmt: skip
RANK = {name: len(LAYERS) - i for i, names in enumerate(LAYERS) for name in names}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def layer_of(module: str) -> str:
    parts = module.split(".")[1:]
    return "trace.spans" if parts[:2] == ["trace", "spans"] else parts[0] if parts else ""


def imported(path: Path, known: Collection[str]) -> set[str]:
    """Which known modules a file imports: in functions, and under `if TYPE_CHECKING:`, too."""
    found = set[str]()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = {f"{node.module}.{a.name}" for a in node.names}
            found |= inside if inside <= set(known) else inside | {node.module}
    return found & set(known)


def test_imports_point_down_and_go_in_no_circle():
    """Untie a circle: merge its modules, or move what both need below them."""
    graph = {name: imported(path, PATHS) - {"workbench"} for name, path in PATHS.items()}
    del graph["workbench"]  # its names are imported when they are first used
    upward = [
        f"{name} imports {other}"
        for name, others in graph.items()
        for other in others
        if layer_of(other) != layer_of(name) and RANK[layer_of(other)] >= RANK[layer_of(name)]
    ]
    assert not upward
    TopologicalSorter(graph).prepare()
    assert len(graph) > 150 and "workbench.graph.ir" in graph["workbench.program.lower"]


def loaded_after(names: Collection[str], shown: str = "*sys.modules") -> set[str]:
    """What is printed once these modules are imported."""
    code = "".join(f"import {name}\n" for name in names) + f"import sys\nprint({shown})"
    return set(subprocess.check_output([sys.executable, "-c", code], text=True).split())


@pytest.mark.parametrize("layer", ["graph", "model", "program", "config", "trace.spans"])
def test_pure_layers_load_no_device_and_nothing_above(layer):
    loaded = loaded_after([name for name in PATHS if layer_of(name) == layer])
    assert not [m for m in loaded if m.split(".")[0] in ("cupy", "cuda", "numba")]
    ours = {m for m in loaded if m.startswith("workbench.")}
    # `trace` is the package of the leaf `trace.spans`
    assert not [m for m in ours - {"workbench.trace"} if RANK[layer_of(m)] > RANK[layer]]


def test_import_workbench_is_light():
    heavy = {"pandas", "matplotlib", "scipy", "cupy", "numba", "cuda", "IPython", "ipywidgets"}
    assert not heavy & {m.split(".")[0] for m in loaded_after(["workbench"])}


@pytest.mark.long
def test_no_public_name_is_a_module_once_all_are_imported():
    every = [name for name in PATHS if not name.endswith("__main__")]
    kinds = "*(f'{n}:{type(getattr(workbench, n)).__name__}' for n in dir(workbench))"
    shown = dict(pair.split(":") for pair in loaded_after(every, kinds) if pair[:2] != "__")
    assert {"Engine", "Toggles", "ab", "lab", "profile"} <= set(shown)
    assert "module" not in shown.values() and not any(name.startswith("_") for name in shown)


@pytest.mark.parametrize(("pattern", "files"), [
    # a module by its name in a string: public names; devices, which devices.py names; rooms above
    (r"importlib\.import_module|__import__\(",
     ["__init__.py", "backend/base.py", "common/upper.py"]),
    # the one way up is for drawing a result and for reading a folder of any kind, and for no more
    (r"(?<!\.)\bupper\(", ["benchmarks/runs/loading.py", "common/framed.py", "common/upper.py"]),
    # a value's needs are asked once, by `engine/choose.py`, and no room refuses it again
    (r"cannot honour \{", ["config/table.py"]),
    (r"os\.environ|os\.getenv|getenv\(", []),
    # data/measure, notebooks/ and tests/ stand on the package, never the other way
    (r"(?m)^\s*(?:from|import) (?:data|notebooks|tests)\b", []),
    # one writer of files
    (r"os\.(replace|rename|link)\(|shutil\.(copy|move)|mkstemp|NamedTemporaryFile|\.write_(text|byt"
     r"es)\(|\bopen\([^)]*[\"'][wxa]b?\+?[\"']|O_CREAT|savefig\((?!file|written|out)",
     ["common/output.py", "common/output_swap.py"]),
], ids=lambda value: str(value)[:20])  # fmt: skip
def test_a_few_files_alone_do_what_others_may_not(pattern, files):
    found = re.compile(pattern)
    assert files == [str(p.relative_to(PACKAGE)) for p in PATHS.values()
                     if found.search(p.read_text(encoding="utf-8"))]  # fmt: skip


# toggles ------------------------------------------------------------------------------------------


def toggle_reads(path: Path) -> set[str]:
    """Toggles a module reads: `toggles.name` and `settled.name`; `getattr(toggles, ...)`, which may
    be any, is `*`."""
    found = set()
    for node in ast.walk(parsed(path)):
        match node:
            case ast.Attribute(value=ast.Name(id=owner) | ast.Attribute(attr=owner), attr=name):
                found |= {name} if owner in ("toggles", "settled") else set()
            case ast.Call(func=ast.Name(id="getattr"), args=[of, *_]):
                named = ast.unparse(of).rpartition(".")[2]
                found |= {"*"} if "toggles" in named else set()
    return found


CHOOSES, PASSES_ON = "engine/choose.py", "engine/step_programs.py"


def test_toggles_are_read_in_their_room_and_where_all_is_chosen():
    """What a room is given by another was chosen in one file, and is passed on by one."""
    reads = {
        str(p.relative_to(PACKAGE)): toggle_reads(p)
        for p in PATHS.values()
        if p != PACKAGE / "config" / "toggles.py" and p.parent != PACKAGE / "answers"
    }
    assert list(ROWS) == Toggles.names()
    for name, row in ROWS.items():
        readers = {path for path, names in reads.items() if name in names}
        if row.family:  # read all together, by name, and by nobody else
            assert not readers and "*" in reads[row.room], name
            assert f'"{name}"' in (PACKAGE / row.room).read_text(), name
        elif name in Ordering._fields:
            # read all together by `Ordering.of`; what reads them then is an Ordering's field
            assert readers <= {CHOOSES} and row.room.startswith("program/"), name
        else:
            own = {row.room} if row.room in readers else {PASSES_ON}
            assert readers and readers <= own | {CHOOSES}, name
        assert (PACKAGE / row.room).exists(), f"{name}: no room {row.room}"
    rooms = {Toggles.row(family).room for family in FAMILIES}
    assert {path for path, names in reads.items() if "*" in names} == rooms


# what may be asked whether it has a member: the system, errors, and other people's libraries
ASKED = {
    "os", "error", "shell", "getattr(shell, 'kernel', None)", "sys.modules.get('IPython')",
    "request.module", "shell.displayhook.exec_result", "cupti", "params", "p", "kinds", "real",
    "c", "s", "r", "trace", "source",  # of tests: commands, slices, records and spans of two kinds
    "one",  # of tests: a parameter, with marks or without
}  # fmt: skip


def test_nobody_probes_backends_engines_or_models():
    """Their members are declared, with defaults (`backend/base.py`). A `getattr` with a name or a
    default is a probe, as `hasattr` is."""
    tops = [ROOT / "workbench", ROOT / "tests", ROOT / "data" / "measure"]
    for path in (path for top in tops for path in top.rglob("*.py")):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "attr(" in text else ():
            match node:
                case ast.Call(func=ast.Name(id="hasattr"), args=[of, *_]):
                    assert ast.unparse(of) in ASKED, path
                case ast.Call(func=ast.Name(id="getattr"), args=[of, name, *default]):
                    named = default or isinstance(name, ast.Constant)
                    assert not named or ast.unparse(of) in ASKED, path


# what is needed -----------------------------------------------------------------------------------


IMPORTED_AS = {
    "cupti-python": "cupti", "cupy-cuda13x": "cupy", "nvidia-ml-py": "pynvml",
    "cuda-bindings": "cuda.bindings", "prometheus-client": "prometheus_client",
    "jupyter-client": "jupyter_client",
    "HolisticTraceAnalysis": "hta",
}  # fmt: skip
# nobody imports them: front ends, pytest's plugins, uvicorn's parts, lint, headers and NVRTC's
# library, and what papermill runs notebooks in
INDIRECT = {
    "jupyterlab", "ipykernel", "pytest-benchmark", "pytest-timeout", "pytest-xdist", "pytest-cov",
    "httptools", "uvloop", "ruff", "mypy", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime",
    "nvidia-cuda-cccl",
}  # fmt: skip


def test_every_dependency_is_imported():
    """A package's dependency by the package; an extra's there, in tests or in the campaign."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [entry for each in project["optional-dependencies"].values() for entry in each]
    everything = set()
    for entries, folders in (
        (project["dependencies"], ("workbench",)),
        (extras, ("workbench", "tests", "data/measure")),
    ):
        text = "\n".join(p.read_text() for top in folders for p in (ROOT / top).rglob("*.py"))
        names = {re.match(r"[\w-]+", entry)[0] for entry in entries}
        everything |= names
        for name in names - INDIRECT:
            module = re.escape(IMPORTED_AS.get(name, name))
            assert re.search(rf"(?m)^\s*(?:import|from) {module}\b", text), name
    assert everything >= {*INDIRECT, *IMPORTED_AS}, "a package of the tables is no dependency"


# prints of each test that is collected whether it is for `make test-exhaustive` alone
MARKED = """
import sys, pytest
class Marked:
    def pytest_collection_finish(self, session):
        for item in session.items:
            print("::", item.nodeid.partition("[")[0], bool(item.get_closest_marker("exhaustive")))
sys.exit(pytest.main(sys.argv[1:], [Marked()]))
"""


@pytest.mark.slow
def test_nothing_leaves_the_gate_altogether():
    """Of what the exhaustive tests try the others try something, but for the full products."""
    words = re.compile(r"mark\.exhaustive|\b(share|tiers|rest|exhaustive)\(")
    files = [p for p in (ROOT / "tests").rglob("test_*.py") if words.search(p.read_text())]
    ask = [sys.executable, "-c", MARKED, "--collect-only", "-m", "not gpu and not browser"]
    said = subprocess.check_output([*ask, "-p", "no:cacheprovider", *files], cwd=ROOT, text=True)
    found = {tuple(line.split()[1:]) for line in said.splitlines() if line.startswith(":: ")}
    gate, exhaustive = ({test for test, is_left_out in found if is_left_out == answer}
                        for answer in ("False", "True"))  # fmt: skip
    product = {test for test in exhaustive if test.rpartition("::")[2] in EXHAUSTIVE}
    assert len(product) == len(EXHAUSTIVE) and len(exhaustive) > 20
    assert exhaustive - product <= gate
