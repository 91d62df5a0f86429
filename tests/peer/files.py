"""llama.cpp and this engine on files as people have them: the same logits?

`make peer` runs `python -m tests.peer.files`, too. It writes `data/results/peer-files.json`, a row
for each file:

* quantised: by llama.cpp's own quantiser, in each of its mixes of types without kernels here.
* blocks: random ones, valid, of types that its quantiser does not write without an importance
  matrix, or at all (NVFP4 is a converter's).
* rope: the keys of linear RoPE scaling, with and without a type.
* qwen2: the architecture, in types with kernels.
* parts: a model in several files, as a converter writes it and as llama.cpp's quantiser does.

Every file is computed token by token by llama.cpp and by this engine, which expands what has no
kernels to F16 and to Q8_0. Both are held against float64 of the file's own values
(`tests/reference.py`), and against each other. llama.cpp rounds activations to 8 bits where it
multiplies by such types, and an engine that expanded them to F16 rounds nothing. Files in F32 are
also computed by llama.cpp with F32 everywhere: that entitles the reference to judge.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from cyclopts import App

from data.measure.command import start
from tests import reference
from tests.edited import edited, retyped
from tests.peer.compare import LLAMA, OURS, ROOT, Worker, both, computed, model_file
from workbench.common.output import write_text
from workbench.config import EXPAND
from workbench.model.gguf.inspect import summary

RESULT = ROOT / "data" / "results" / "peer-files.json"

QUANTISED = (
    "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K_S", "Q3_K_M", "Q3_K_L", "IQ3_S", "IQ3_M", "IQ4_NL",
    "IQ4_XS", "TQ1_0", "TQ2_0",
)  # file types of llama.cpp  # fmt: skip
BLOCKS = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "NVFP4")
ROPE: dict[str, dict[str, Any]] = {
    "older key": {"rope.scale_linear": 4.0},
    "no type": {"rope.scaling.factor": 4.0},
    "both keys": {"rope.scaling.factor": 4.0, "rope.scale_linear": 9.0},
    "linear, older key": {"rope.scaling.type": "linear", "rope.scale_linear": 4.0},
    "none": {"rope.scaling.type": "none", "rope.scaling.factor": 4.0},
    "zero": {"rope.scaling.factor": 0.0},
}

# NMSE against float64, three times what was measured. Where a product rounds activations to 8 bits
# (llama.cpp's with quantised weights, the engine's with Q8_0 ones) that is what shows. The mixes of
# the quantiser have a head and a few more matrices in types with kernels, so there it always does.
PLAIN_TOLERANCE = 3e-6  # nothing is rounded to 8 bits
TOLERANCE = 3e-3
BOTH_TOLERANCE = 6e-3  # of one against the other, where both round
EXACT_KINDS = ("blocks", "rope")  # files that expanded to F16 round nothing

app = App(help=__doc__)


class Case(NamedTuple):
    """A file to compare on. expands: it has types without kernels; then both ways are computed."""

    kind: str
    name: str
    path: Path
    expands: bool = True


def quantised(llama: Worker, source: Path, out: Path, name: str, keep_split: bool = False) -> Path:
    """`source` quantised by llama.cpp to its file type `name`, as llama-quantize would."""
    llama.ask("quantize", model=str(source), out=str(out), ftype=name, keep_split=keep_split)
    return out


def cases(llama: Worker, folder: Path) -> Iterator[Case]:
    """Every file, made in `folder` when it is wanted."""
    sources = {arch: model_file(f"tiny-{arch}", "F32") for arch in ("llama", "qwen2", "qwen3")}
    for name, (arch, source) in product(QUANTISED, sources.items()):
        path = folder / f"{arch}-{name}.gguf"
        yield Case("quantised", f"{arch} {name}", quantised(llama, source, path, name))
    for name, (arch, source) in product(BLOCKS, sources.items()):
        yield Case("blocks", f"{arch} {name}", random_blocks(source, folder, name))
    for (name, keys), (arch, source) in product(ROPE.items(), sources.items()):
        path = folder / f"{arch}-rope-{name}.gguf".replace(" ", "-")
        made = edited(source, path, keys={f"{arch}.{k}": v for k, v in keys.items()})
        yield Case("rope", f"{arch} {name}", made, expands=False)
    for quant in ("F32", "Q8_0"):
        yield Case("qwen2", quant, model_file("tiny-qwen2", quant), expands=False)
    parts = edited(sources["qwen2"], folder / "parts.gguf", tensors_a_part=7)
    yield Case("parts", "by gguf", parts, expands=False)
    quantised(llama, parts, folder / "kept", "Q5_1", keep_split=True)
    (first,) = folder.glob("kept-00001-of-*.gguf")
    yield Case("parts", "by llama.cpp's quantiser", first)


def random_blocks(source: Path, folder: Path, kind: str) -> Path:
    """`source` with every matrix of the layers in random blocks of type `kind`."""
    choose: Callable[[str], str | None] = lambda name: kind if name.startswith("blk.") else None  # noqa: E731 # fmt: skip
    return retyped(source, folder / f"{source.stem}-{kind}.gguf", choose)


def compared(sides: dict[str, Worker], case: Case, scratch: Path) -> dict[str, Any]:
    """Both sides on one file, and how far each is from float64 and from the other."""
    found = summary(case.path)
    theirs, tokens = computed(sides[LLAMA], case.path, scratch)
    ours = {
        expand: computed(sides[OURS], case.path, scratch, expand=expand)[0]
        for expand in (EXPAND if case.expands else EXPAND[:1])
    }
    wanted = reference.forward(joined(case.path, scratch), tokens)
    peer, workbench = {"nmse": reference.nmse(theirs, wanted)}, {}
    if {t.dtype for t in found.types} == {"F32"}:
        exact, _ = computed(sides[LLAMA], case.path, scratch, exact=True)
        peer["nmse_exact"] = reference.nmse(exact, wanted)
    for expand, rows in ours.items():
        workbench[expand] = {
            "nmse": reference.nmse(rows, wanted), "nmse_llama.cpp": reference.nmse(rows, theirs),
            "decided_mismatches": reference.decided_argmax_mismatches(rows, wanted),
        }  # fmt: skip
    return {
        "kind": case.kind, "name": case.name,
        "types": {t.dtype: t.n_tensors for t in found.types}, "n_files": len(found.files),
        "hash": found.hash, "n_tokens": len(tokens), "llama.cpp": peer, "workbench": workbench,
    }  # fmt: skip


def joined(path: Path, scratch: Path) -> Path:
    """One file for the reference, which reads no parts."""
    import gguf

    found = summary(path)
    if len(found.files) == 1:
        return path
    tensors: dict[str, Any] = {}
    for name in found.files:
        for t in gguf.GGUFReader(name).tensors:
            tensors[t.name] = (np.asarray(t.data), t.tensor_type.name)
    whole = dict.fromkeys(("split.no", "split.count", "split.tensors.count"))
    return edited(Path(found.files[0]), scratch / "joined.gguf", keys=whole, tensors=tensors)


@app.default
def main(*, out: Path = RESULT, venv: Path = ROOT / ".venv-peer") -> None:
    """Compare, print a table, and write the result.

    Parameters
    ----------
    out: where the result goes.
    venv: the environment llama-cpp-python is built in.
    """
    with both(venv) as (sides, scratch, about), tempfile.TemporaryDirectory() as made:
        result = about | {"files": []}
        for case in cases(sides[LLAMA], Path(made)):
            row = compared(sides, case, scratch)
            result["files"].append(row)
            said = "  ".join(
                f"{expand} {found['nmse']:.1e} ({found['nmse_llama.cpp']:.1e})"
                for expand, found in row["workbench"].items()
            )
            print(f"{case.kind:10} {case.name:26} llama.cpp {row['llama.cpp']['nmse']:.1e}  {said}")
    write_text(out, json.dumps(result, indent=1) + "\n")
    print(f"wrote {out}")


if __name__ == "__main__":
    start(app)
