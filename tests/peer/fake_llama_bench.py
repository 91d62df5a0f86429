#!/usr/bin/env python3
"""Prints what llama-bench prints, with times that follow from its variables alone.

It takes part in tests as `llama-bench`, and as `llama-batched-bench`. Beside it lies `calls.jsonl`:
a line for each call, with the arguments and every variable of llama.cpp's. A file `fails` beside it
says how it misbehaves.
"""

import json
import os
import shutil
import sys
from pathlib import Path

BATCHED = "llama-batched-bench"
HERE = Path(__file__).resolve().parent
US = {"pp": 2.0, "tg": 1000.0}  # a token; the first repetition of a test takes ten times as long
MORE = {  # us a token
    "GGML_CUDA_DISABLE_GRAPHS": 200.0, "LLAMA_GRAPH_REUSE_DISABLE": 50.0,
    "GGML_CUDA_GRAPH_OPT": -100.0,
}  # fmt: skip


def install(folder: Path) -> Path:
    """As `build-cuda.sh` leaves a build in `folder`; returns the program."""
    made = folder / "bin" / "llama-bench"
    made.parent.mkdir(parents=True)
    made.write_text(Path(__file__).read_text().replace("/usr/bin/env python3", sys.executable, 1))
    made.chmod(0o755)
    shutil.copy(made, made.with_name(BATCHED))
    (folder / "build.json").write_text('{"nvcc": "13.0.88"}')
    return made


def main(arguments: list[str]) -> int:
    fails = HERE / "fails"
    how = fails.read_text().strip() if fails.exists() else ""
    if "--version" in arguments:
        print("version: 0.5.0-fake (build 7, commit fade)", file=sys.stderr)
        return 0
    given = dict(zip(arguments[::2], arguments[1::2], strict=True))
    own = {k: v for k, v in os.environ.items() if k.startswith(("GGML_", "LLAMA_"))}
    with open(HERE / "calls.jsonl", "a") as calls:
        calls.write(json.dumps({"given": given, "own": own}) + "\n")
    n_calls = len((HERE / "calls.jsonl").read_text().splitlines())
    if how == "exits" or how == f"exits at {n_calls}":
        print("noise\nllama_bench: error: failed to load model\nbye", file=sys.stderr)
        return 1
    if how == "prints text":
        print("no JSON at all")
        return 0
    add = sum(us for name, us in MORE.items() if own.get(name) == "1")
    if Path(sys.argv[0]).name == BATCHED:
        return batched(given, how)
    rows = []
    for flag, kind in (("-p", "pp"), ("-n", "tg")):
        for n in (int(n) for n in given[flag].split(",") if int(n)):
            us = US[kind] + (add if kind == "tg" else 0.0)
            ns = [round(us * 1e3 * n)] * int(given["-r"])
            of = {"n_prompt": n if kind == "pp" else 0, "n_gen": n if kind == "tg" else 0}
            about = {"build_commit": "fade", "gpu_info": ""}
            rows.append(about | of | {"samples_ns": [10 * ns[0], *ns[1:]]})
    if how == "a test is missing":
        rows.pop()
    if how == "a time is missing":
        rows[0]["samples_ns"].pop()
    print(json.dumps(rows))
    return 0


def batched(given: dict[str, str], how: str) -> int:
    """A step takes 1 ms and 0.1 ms for each sequence; a token of a prompt 2 us."""
    pp, tg = int(given["-npp"]), int(given["-ntg"])
    widths = [int(n) for n in given["-npl"].split(",")]
    print("main: n_kv_max = 8\n")
    for n in widths[:-1] if how == "a test is missing" else widths:
        t_pp, t_tg = 2e-6 * pp * n, tg * (1e-3 + 1e-4 * n)
        print(json.dumps({"pp": pp, "tg": tg, "pl": n, "t_pp": t_pp, "t_tg": t_tg}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
