"""The tables of what was recorded, as data: decode, kernels, batches, fusion, answers, mechanisms.

`recorded.py` has the numbers and `tables.py` the way from lines to Markdown. A table without runs
is a line that says so.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from data.measure import recorded as figures
from data.measure.matrix import DECODED, SCORED
from data.measure.recorded import LARGE, SMALL, TYPES, Answer, Recorded, Toggled, model_of, told
from data.measure.sources import TESTS, age
from data.measure.tables import Line, Part, Table
from workbench.benchmarks.scores.bounds import FEW, FEW_BOUNDS, MANY_BOUNDS, Bound

SWITCHED_OFF = ("unfused", "plain")  # suffixes of folders


def decodes(recorded: Recorded) -> Iterator[Line]:
    """A line for each model: decode with everything on except plans, without fusion, and without
    pdl; and its prompt."""
    for name in DECODED:
        full = figures.decode(recorded, name)
        if full is not None:
            others = {
                suffix: figures.decode(recorded, f"{name}-{suffix}") for suffix in SWITCHED_OFF
            }
            folders = (name, *(f"{name}-{suffix}" for suffix, found in others.items() if found))
            runs = [run for of in folders if (run := recorded.run(f"decode-{of}"))]
            yield Line(full | {suffix: of and of["tg"] for suffix, of in others.items()}, runs)


def batches(recorded: Recorded) -> Iterator[Line]:
    """A line for each model and number of tokens computed at once: the speed, and the share of its
    bound."""
    for row, run in recorded.of("batches"):
        for step in figures.batch_steps(recorded, row.model):
            derived = {"share": step.share, "bound": step.bound}
            yield Line({"model": model_of(run.run)} | step._asdict() | derived, [run])


def sequences(recorded: Recorded) -> Iterator[Line]:
    """A line for each number of sequences side by side: the tokens of all of them, beside the
    bound."""
    for _, run in recorded.of("together"):
        yield Line(figures.together(run), [run])


def kernels(recorded: Recorded) -> Iterator[Line]:
    """A line for each type: its share of the read bandwidth for one token, by shape of llama-3-8b;
    plain / pdl."""
    shapes = (*LARGE, *SMALL)
    for _, run in recorded.of("kernels"):
        rows = figures.kernel_rows(run)
        rows = rows[(rows["batch"] == 1) & rows["shape"].isin(shapes)]
        for dtype, ours in rows.groupby("type", sort=False):
            shares = {s: ours.loc[ours["shape"] == s, "share"] for s in shapes}
            cells = {s[3:]: " / ".join(f"{100 * x:.0f}" for x in of) for s, of in shares.items()}
            yield Line({"type": dtype} | cells, [run])


def products(recorded: Recorded) -> Iterator[Line]:
    """A line for each type: its share of the bound by number of tokens, the least and the most of
    the shapes of llama-3-8b."""
    for (_, run), dtype in itertools.product(recorded.of("kernels-batches"), TYPES):
        shares = figures.as_launched(run, dtype).groupby("batch")["of_bound"]
        cells = {str(n): f"{100 * of.min():.0f}..{100 * of.max():.0f}" for n, of in shares}
        if cells:
            yield Line({"type": dtype} | cells, [run])


def fusion(recorded: Recorded) -> Iterator[Line]:
    """A line for each model and toggle: its gain alone, and its gain beside all other toggles."""
    found: dict[tuple[str, str], list[Toggled]] = {}
    for one in recorded.toggled("fusion"):
        found.setdefault((one.model, one.ab.run["result"]["toggle"]), []).append(one)
    for (model, toggle), comparisons in sorted(found.items(), key=lambda item: item[0]):
        cells = {"Model": model, "toggle": toggle}
        for one in comparisons:
            beside = "alone" if one.row.toggles == "kept" else "with all"
            counts = [next(iter(a["program"].values()))["counts"] for a in one.ab.run["arms"][:2]]
            cells |= {
                f"launches {beside}": " -> ".join(str(count["launches"]) for count in counts),
                f"speedup {beside}": one.speedup(),
                f"verdict {beside}": one.found["verdict"],
            }
        yield Line(cells, [one.ab for one in comparisons])


def perplexities(recorded: Recorded) -> Iterator[Line]:
    """A line for each type: the fast path against the float path on tokens drawn from the model, by
    the number of tokens that the fast path computed at once."""
    every = [found for quant in SCORED if (found := figures.scored(recorded, quant))]
    sizes = sorted({answer.n_ubatch for found in every for answer in found}, reverse=True)
    for found in every:
        by_size, first = {a.n_ubatch: a for a in found}, found[0].run.run
        many, few = (table[first["model"]["quant"]] for table in (MANY_BOUNDS, FEW_BOUNDS))
        same = min(a.run.run["result"]["agreement"]["same_argmax"] for a in found)
        cells = (
            {"Model": model_of(first)}
            | {f"{n} at once": _both(by_size.get(n)) for n in sizes}
            | {"bound": _both(many, 0), f"bound to {FEW}": _both(few, 0)}
            | {"same argmax": f"{100 * same:.2f} %"}
        )
        yield Line(cells, [answer.run for answer in found])


def _both(found: Answer | Bound | None, digits: int = 1) -> str:
    """`KL / NMSE` of an answer or of a bound; empty without one."""
    if found is None:
        return ""
    values = (found.kl, found.nmse)
    return " / ".join("no number" if v is None else f"{v:.{digits}e}" for v in values)


# what each run of gpu-sanitizer.json looks for
CHECKS = {
    "before": "the tests that the tools run, without a tool",
    "memcheck": "reads and writes outside a tensor, or of one that was freed",
    "initcheck": "reads of device memory that nothing has written",
    "racecheck": "shared memory written and read without a barrier between",
    "synccheck": "barriers that not every thread reaches",
    "repetitions": "results that change, over poisoned repetitions: ordering through global memory",
}
# what ran the GPU tests of each file, and what they look at
GPU_TESTS = {
    "gpu-tests": ("make test-gpu", "`tests/gpu`: every kernel beside its slow twin, every op, the "
                  "engine"),
    "gpu-tests-two": ("record.py --two", "layers over two GPUs: bit-equal under every safe "
                      "ordering, CUPTI of both"),
}  # fmt: skip


def checks(recorded: Recorded) -> Iterator[Line]:
    """The GPU tests, and what compute-sanitizer and the poisoned repetitions found."""
    rows = []
    for name, (run, what) in GPU_TESTS.items():
        if tests := recorded.alone(name):
            n, errors = tests["passed"] + tests["failed"], tests["failed"]
            rows.append((run, what, n, errors, tests["duration_s"]))
    for name, of in (recorded.alone("gpu-sanitizer") or {"runs": {}})["runs"].items():
        rows.append((name, CHECKS.get(name, ""), of["tests"], of["errors"], of["seconds"]))
    for run, what, n, errors, seconds in rows:
        yield Line({"run": run, "looks for": what, "tests": str(n),
                    "errors": "none told" if errors is None else str(errors),
                    "seconds": f"{seconds:.1f}"})  # fmt: skip


def checked_where(recorded: Recorded) -> str:
    """Device and sources of the tests and of the tools."""
    said = []
    for name, (run, _) in GPU_TESTS.items():
        if tests := recorded.alone(name):
            skipped = f", {tests['skipped']} skipped" if tests["skipped"] else ""
            said.append(f"{run}: {tests['device']}, {age(tests, TESTS)}{skipped}")
    if tools := recorded.alone("gpu-sanitizer"):
        took = f"{tools['duration_s']:.0f} s in all"
        said.append(f"tools: {tools['device']}, {took}, {age(tools, TESTS)}")
        said.append(f"compute-sanitizer {tools['tool']}")
    return f"{'; '.join(said)}."


MADE = {
    "quantised": "{name}, by llama.cpp's quantiser",
    "blocks": "{name}, random blocks",
    "rope": "keys of linear RoPE scaling",
    "qwen2": "qwen2 {name}",
    "parts": "in parts, {name}",
}
SIDES = {"llama.cpp": "llama.cpp", "f16": "workbench", "q8_0": "with --expand q8_0"}


def peer(recorded: Recorded) -> Iterator[Line]:
    """Decode and prefill on two CPU threads beside llama.cpp's, from `make peer`."""
    found = recorded.alone("peer-cpu") or {}
    for row in [*found.get("decode", ()), *found.get("prefill", ())]:
        theirs, ours = (row["median_t_s"][side] for side in ("llama.cpp", "workbench"))
        low, high = row["ci95"]
        yield Line(row | {"theirs": theirs, "ours": ours, "low": low, "high": high})


def peer_where(recorded: Recorded) -> str:
    found = recorded.alone("peer-cpu") or {}
    cpu, version = found["machine"]["cpu"]["name"], found["versions"]["llama-cpp-python"]
    how = f"{cpu}, 2 threads each, alternating in one run"
    return told(found, how, f"llama-cpp-python {version}")


def peer_files(recorded: Recorded) -> Iterator[Line]:
    """How far llama.cpp and the engine are from float64 on files of each kind, from `make peer`."""
    worst: dict[str, dict[str, float]] = {}
    for row in (recorded.alone("peer-files") or {"files": ()})["files"]:
        name = row["name"].split()[-1] if row["kind"] in ("quantised", "blocks") else row["name"]
        said = worst.setdefault(MADE[row["kind"]].format(name=name), {})
        each = {"llama.cpp": row["llama.cpp"]["nmse"]}
        each |= {expand: of["nmse"] for expand, of in row["workbench"].items()}
        for side, nmse in each.items():
            said[side] = max(nmse, said.get(side, 0.0))
    for name, of in worst.items():
        shown = {title: f"{of[side]:.1e}" if side in of else "" for side, title in SIDES.items()}
        yield Line({"File": name} | shown)


def peer_files_where(recorded: Recorded) -> str:
    found = recorded.alone("peer-files") or {}
    return told(
        found,
        f"NMSE of {found['files'][0]['n_tokens']} tokens, one by one, against float64 of the "
        "file's own values; the worst of tiny-llama, tiny-qwen2 and tiny-qwen3. "
        f"llama-cpp-python {found['versions']['llama-cpp-python']}",
    )


# gaps between tokens beside large bodies; `tests/bench/stalls.py` records them
STALLS = "stalls"
STALL_CELLS = {
    "served": "{load}", "body": "{body}", "its request takes s": "{seconds:.2f}",
    "gaps": "{n}", "median ms": "{median:.2f}", "P99 ms": "{p99:.2f}",
    "P99 over alone": "{ratio:.2f}", "longest ms": "{most:.1f}",
}  # fmt: skip


def stalls(recorded: Recorded) -> Iterator[Line]:
    for load, found in (recorded.alone(STALLS) or {}).items():
        alone = found["rows"]["alone"]
        for body, row in found["rows"].items():
            beside = body != "alone"
            yield Line({
                **row, "load": load, "body": body if beside else "none",
                "ratio": row["p99"] / alone["p99"] if beside else None,
                "seconds": row["seconds"] if beside else None,
            })  # fmt: skip


def stalls_where(recorded: Recorded) -> str:
    said = []
    for load, found in (recorded.alone(STALLS) or {}).items():
        mib = found["body_bytes"] / 2**20
        gpus = [gpu["name"] for gpu in found["machine"]["gpus"]]
        on = ", ".join([f"{found['cores']} cores of {found['machine']['cpu']['name']}", *gpus])
        what = (
            f"{load}: {found['streams']} streams, bodies of {mib:.0f} MiB, {found['rounds']} rounds"
        )
        said.append(told(found, what, on))
    return " ".join(said)


BLOCKS: dict[str, list[Part]] = {
    "decode-cuda": [Table(
        "Decode", decodes,
        {"Model": "{model}", "GB a token": "{gb:.2f}", "t/s tg128": "{tg:.1f}",
         "% of read": "{share:.1f}", "unfused": "{unfused:.1f}", "no pdl": "{plain:.1f}",
         "launches": "{launches}", "t/s pp512": "{pp:.0f}", "% of product": "{product_share:.1f}"},
        "read bandwidth {read} GB/s, medians of 5 repetitions",
    )],
    "batches-cuda": [Table(
        "Batches", batches,
        {"Model": "{model}", "tokens": "{n_tokens}", "t/s": "{tps:.0f}", "% of read": "{read:.1f}",
         "% of product": "{product:.1f}", "bound": "{bound}", "% of bound": "{share:.1f}"},
        "read bandwidth {read} GB/s, large product {peak} TFLOP/s",
    )],
    "together-cuda": [Table(
        "Sequences together", sequences,
        {"Model": "{model}", "sequences": "{n_seqs}", "t/s prompts": "{pp:.0f}",
         "t/s generated": "{tg:.0f}", "of each": "{each:.1f}", "ms a step": "{step_ms:.2f}",
         "GB a step": "{step_gb:.2f}", "t/s bound": "{bound:.0f}", "% of bound": "{share:.1f}"},
        "{tests}; read bandwidth {read} GB/s; the bound reads the weights once and every cell once",
    )],
    "kernels-cuda": [
        Table("Kernels", kernels, None, "% of {read} GB/s, launched plainly / with pdl"),
    ],
    "kernels-batches-cuda": [Table(
        "Kernels of many tokens", products, None,
        "% of the bound by tokens, the worst and the best of {shapes}; {read} GB/s, {peak} TFLOP/s",
    )],
    "fusion-cuda": [
        Table("Fusion", fusion, None, "off -> on, {tests}, {n} interleaved repetitions"),
    ],
    "perplexity-cuda": [Table(
        "Perplexity", perplexities, None,
        "{scored} tokens: mean KL in nats a token / NMSE of the logits",
    )],
    "correctness-cuda": [Table("Correctness", checks, said=checked_where)],
    "peer-cpu": [Table(
        "Beside llama.cpp", peer,
        {"Model": "{preset} {quant}", "Test": "{test}", "t/s llama.cpp": "{theirs:.1f}",
         "t/s workbench": "{ours:.1f}", "Ratio": "{ratio:.2f}",
         "95% CI": "{low:.2f}..{high:.2f}"},
        said=peer_where,
    )],
    "peer-files": [Table("Files of others", peer_files, said=peer_files_where)],
    STALLS: [
        Table("Gaps between tokens beside large bodies", stalls, STALL_CELLS, said=stalls_where)
    ],
}  # fmt: skip
