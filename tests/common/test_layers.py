"""The house: imports point down only, pure layers stay pure, and each toggle has one room."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from workbench.config import FAMILIES, Toggles
from workbench.config.table import ROWS
from workbench.program.sync_modes import Ordering

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "workbench"


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


# from the top; a layer may import itself and what stands below it
LAYERS = [
    ("__main__",),
    ("answers", "cli", "jupyter"),
    ("traffic",),
    ("server",),
    ("report",),
    ("benchmarks",),
    ("trace",),
    ("engine",),
    ("backend",),
    ("program",),
    ("model",),
    ("graph",),
    ("config",),
    ("common", "trace.spans"),
]
RANK = {name: len(LAYERS) - i for i, names in enumerate(LAYERS) for name in names}
# the two files that may import a module by its name in a string; devices.py has the devices' names
STRING_IMPORTS = {"__init__.py", "backend/base.py"}
DEVICE_LIBRARIES = ("cupy", "cuda", "numba")


def modules() -> list[Path]:
    return sorted(p for p in PACKAGE.rglob("*.py"))


def layer_of(module: str) -> str:
    parts = module.split(".")[1:]
    if parts[:2] == ["trace", "spans"]:
        return "trace.spans"
    return parts[0] if parts else ""


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{a.name}" for a in node.names}
            found.add(node.module)
    return {m for m in found if m.split(".")[0] == "workbench"}


def test_imports_point_down():
    upward = []
    for path in modules():
        own = layer_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
        if path == PACKAGE / "__init__.py":
            continue
        for module in imports(path):
            other = layer_of(module)
            if other not in RANK:  # names imported from a module, or the package itself
                continue
            if own != other and RANK[other] >= RANK[own]:
                upward.append(f"{path.relative_to(ROOT)} imports {module}")
    assert not upward


def modules_imported(path: Path, names: Collection[str]) -> set[str]:
    """Which modules of `names` a file imports: in functions, and under `if TYPE_CHECKING:`, too."""
    found = set[str]()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = {f"{node.module}.{a.name}" for a in node.names}
            found |= inside if inside <= set(names) else inside | {node.module}
    return found & set(names)


def circles(graph: Mapping[str, Collection[str]]) -> list[set[str]]:
    """The modules that import one another, directly or by way of others: a set for each circle."""
    reached = {name: set(imported) for name, imported in graph.items()}
    for through in graph:  # Warshall 1962
        for name in graph:
            if through in reached[name]:
                reached[name] |= reached[through]
    tied = {
        frozenset({n for n in reached[name] if name in reached[n]})
        for name in graph
        if name in reached[name]
    }
    return [set(circle) for circle in sorted(tied, key=sorted)]


def test_imports_go_in_no_circle():
    names = {
        ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p
        for p in modules()
    }
    graph = {name: modules_imported(path, names) - {"workbench"} for name, path in names.items()}
    assert not circles(graph), "untie these: merge them, or move what both need below them"
    assert len(graph) > 150 and "workbench.graph.ir" in graph["workbench.program.lower"]


def test_only_two_files_name_modules_in_strings():
    pattern = re.compile(r"importlib\.import_module|__import__\(")
    users = {str(p.relative_to(PACKAGE)) for p in modules() if pattern.search(p.read_text())}
    assert users == STRING_IMPORTS


def loaded_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(out.stdout.split())


@pytest.mark.parametrize("layer", ["graph", "model", "program", "config", "trace.spans"])
def test_pure_layers_load_no_device_and_nothing_above(layer):
    if "." in layer or layer == "config":
        names = [f"workbench.{layer}"]
    else:
        files = sorted((PACKAGE / layer).rglob("[a-z]*.py"))
        names = [".".join(p.relative_to(ROOT).with_suffix("").parts) for p in files]
    loaded = loaded_after("\n".join(f"import {n}" for n in names))
    assert not [m for m in loaded if m.split(".")[0] in DEVICE_LIBRARIES]
    above = [
        m
        for m in loaded
        if m.startswith("workbench.")
        and layer_of(m) in RANK
        and RANK[layer_of(m)] > RANK[layer]
        and m != "workbench.trace"  # the package of the leaf trace.spans
    ]
    assert not above


def test_import_workbench_is_light():
    heavy = {"pandas", "matplotlib", "scipy", "cupy", "numba", "cuda", "IPython", "ipywidgets"}
    assert not heavy & {m.split(".")[0] for m in loaded_after("import workbench")}


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


def test_toggles_are_read_in_their_room_and_where_the_engine_chooses():
    """What a room is given by another was chosen in one file, and is passed on by one."""
    reads = {
        str(p.relative_to(PACKAGE)): toggle_reads(p)
        for p in modules()
        if p != PACKAGE / "config" / "toggles.py" and p.parent != PACKAGE / "answers"
    }
    assert list(ROWS) == Toggles.names()
    for name, row in ROWS.items():
        assert (PACKAGE / row.room).exists(), f"{name}: no room {row.room}"
        readers = {path for path, names in reads.items() if name in names}
        if row.family:
            # read all together, by name, and by nobody else
            assert not readers and "*" in reads[row.room], name
            assert f'"{name}"' in (PACKAGE / row.room).read_text(), name
        elif name in Ordering._fields:
            # read all together by `Ordering.of`; what reads them then is an Ordering's field
            assert readers <= {CHOOSES} and row.room.startswith("program/"), name
        elif row.room in readers:
            assert readers <= {row.room, CHOOSES}, name
        else:
            assert readers and readers <= {CHOOSES, PASSES_ON}, name
    rooms = {Toggles.row(family).room for family in FAMILIES}
    assert {path for path, names in reads.items() if "*" in names} == rooms


def test_what_a_device_cannot_honour_is_said_in_one_table():
    """A value's needs are asked once, by `engine/choose.py`, and no room refuses it again."""
    refusal = "cannot honour {"
    said = {str(p.relative_to(PACKAGE)) for p in modules() if refusal in p.read_text()}
    assert said == {"config/table.py"}


# what may be asked whether it has a member: the system, errors, and other people's libraries
ASKED = {
    "os", "error", "shell", "getattr(shell, 'kernel', None)", "sys.modules.get('IPython')",
    "shell.displayhook.exec_result", "cupti", "params", "p", "kinds", "real",
    "value", "lab",  # of the inventory
    "c", "s", "r", "trace", "source",  # of tests: commands, slices, records and spans of two kinds
    "one",  # of tests: a parameter, with marks or without
}  # fmt: skip


def asked_for_members(path: Path) -> Iterator[str]:
    """The first argument of each `hasattr`, and of each `getattr` with a name or a default."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            of, *name = (ast.unparse(arg) for arg in node.args) if node.args else ("",)
            named = len(name) == 2 or (name[:1] and name[0][0] in "'\"")
            if node.func.id == "hasattr" or (node.func.id == "getattr" and named):
                yield of


def test_nobody_probes_backends_engines_or_models():
    """Their members are declared, with defaults (`backend/base.py`)."""
    folders = (PACKAGE, ROOT / "tests", ROOT / "data" / "measure")
    found = {
        f"{path.relative_to(ROOT)}: {of}"
        for folder in folders
        for path in folder.rglob("*.py")
        for of in asked_for_members(path)
        if of not in ASKED
    }
    assert not found


def test_no_environment_variables_are_read():
    pattern = re.compile(r"os\.environ|os\.getenv|getenv\(")
    assert not [p for p in modules() if pattern.search(p.read_text())]


def test_the_package_knows_nothing_of_the_campaign_or_the_tests():
    """data/measure, notebooks/ and tests/ stand on the package, never the other way. The wheel has
    none of them."""
    foreign = re.compile(r"^\s*(?:from|import) (?:data|notebooks|tests)\b", re.MULTILINE)
    assert not [str(p) for p in modules() if foreign.search(p.read_text())]
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    wheel = wheel["targets"]["wheel"]
    assert wheel["packages"] == ["workbench"]
    assert set(map(Path, wheel["force-include"])) == {
        Path("kernels"), Path("notebooks"), Path("data/prompts"),
        Path("data/results/README.md"), Path("data/results/proofs.json"),
    }  # fmt: skip


# what a package is imported as, where that is not its name
IMPORTED_AS = {
    "cupti-python": "cupti", "cupy-cuda13x": "cupy", "nvidia-ml-py": "pynvml",
    "cuda-bindings": "cuda.bindings",
    "prometheus-client": "prometheus_client",
}  # fmt: skip
# packages that nobody imports, and what they are for
INDIRECT = {
    "jupyterlab": "the front end of `make lab`",
    "ipykernel": "what papermill runs notebooks in",
    "pytest-benchmark": "the fixture of tests/bench",
    "pytest-timeout": "a limit for each test",
    "pytest-xdist": "`make test` on two cores",
    "httptools": "uvicorn's parser of HTTP",
    "uvloop": "uvicorn's event loop",
    "ruff": "`make lint`",
    "mypy": "`make lint`",
    "nvidia-cuda-nvrtc": "the library behind cuda.bindings.nvrtc, without a toolkit",
    "nvidia-cuda-runtime": "headers that kernels include",
    "nvidia-cuda-cccl": "headers that kernels include",
    "pytest-cov": "pytest's --cov, which tests/faults/touched.py asks for",
}


def imported(folders: tuple[str, ...]) -> str:
    """The sources of the Python files below some folders."""
    files = [p for folder in folders for p in (ROOT / folder).rglob("*.py")]
    return "\n".join(p.read_text() for p in files)


def test_every_dependency_is_imported():
    """A package's dependency by the package; an extra's there, in tests or in the campaign."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [entry for each in project["optional-dependencies"].values() for entry in each]
    for entries, folders in (
        (project["dependencies"], ("workbench",)),
        (extras, ("workbench", "tests", "data/measure")),
    ):
        text, names = imported(folders), {re.match(r"[\w-]+", entry)[0] for entry in entries}
        modules_of = {name: IMPORTED_AS.get(name, name) for name in names - set(INDIRECT)}
        assert not {
            name
            for name, module in modules_of.items()
            if not re.search(rf"^\s*(?:import|from) {re.escape(module)}\b", text, re.MULTILINE)
        }
    everything = {re.match(r"[\w-]+", e)[0] for e in (*project["dependencies"], *extras)}
    assert everything >= {*INDIRECT, *IMPORTED_AS}, "a package of the tables is no dependency"
