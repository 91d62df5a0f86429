"""What a plan costs the host, and a replay of it the device: one JSON file.

    python -m data.measure.plan_costs [--models DIR] [--out FILE] [--only MODELS] [--rounds N]
                                      [--quick]

The plan of a step of one token, with everything on, is captured, made executable and uploaded,
updated by another capture and node by node, and launched; several times each, in us.

    issue_us             the parts of the step, issued one by one
    capture_us           calls of all parts while the stream is captured
    instantiate_us, upload_us   the upload to its end on the device
    exec_update_us       an update with the parameters of another capture; without that capture
    refused_update_us    an update with another topology; without that capture
    set_kernel_us, set_copy_us   one node; `_first`: the first time, when its parameters are read
    launch_us            on an idle device; launch_behind_us: after another launch that still runs
    device_us            from the end of one replay to the end of the next
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cyclopts import App

import workbench as wb
from data.measure.command import start
from data.measure.launches import spread
from data.measure.matrix import ONE_COPY, STEP
from data.measure.session import ROOT, Session, toggles_of
from workbench.backend.cuda.device.backend import CudaBackend
from workbench.backend.cuda.device.graph_nodes import COPIES, GraphArguments, commands_of
from workbench.backend.cuda.device.graphs import CudaGraph
from workbench.backend.issue.issued import Issued, Plannable, in_order
from workbench.benchmarks.runs import provenance
from workbench.common.errors import UsageError
from workbench.common.output import write_text

MODELS = ("llama-3.2-1b-bf16", "llama-3-8b-q4_0", "llama-3-8b-q8_0")
SPECS = (f"all {ONE_COPY} {STEP}", "all plans=ours plan_scope=split")
ROUNDS, LAUNCHES = 9, 20  # launches of each kind in a round

Costs = dict[str, list[float]]  # us of each time

app = App(help=__doc__, result_action="return_none")


@app.default
def measure(
    models: Path = ROOT / "data" / "models",
    out: Path = ROOT / "data" / "results" / "cuda-plan-costs.json",
    only: str = "",
    rounds: int = ROUNDS,
    quick: bool = False,
) -> None:
    """Measures the models. Raises UsageError for fewer than one round."""
    if rounds < 1:
        raise UsageError(f"--rounds {rounds} measures nothing; give 1 or more")
    session = Session(out.parent, models, "cuda", 40.0, quick, only)
    wanted = filter(session.takes, only.split(",") if only else MODELS)
    rows: list[dict[str, Any]] = []
    described = ""
    for model in wanted:
        kept = wb.Toggles(graph_reuse="set_rows")
        with wb.Engine.load(session.path(model), device="cuda", n_ctx=1024, toggles=kept) as engine:
            described = engine.backend.description
            for spec in SPECS:
                toggles = toggles_of(spec, engine)
                with engine.variant(toggles) as side:
                    row = of_engine(side, 2 if quick else rounds)
                about = {"model": model, "scope": toggles.plan_scope, "toggles": toggles.changed()}
                rows.append(about | row)
                said = ", ".join(f"{n[:-3]} {row[n]['median']:.1f}" for n in row["costs"])
                scope, n = toggles.plan_scope, row["nodes"]
                print(f"{model} {scope}: {n} nodes; us: {said}", flush=True)
    found = {"device_description": described, "quick": quick, "rows": rows}
    record = {"date": provenance.utc_now()} | provenance.collect() | found
    write_text(out, json.dumps(record, indent=1) + "\n", parents=True)


def of_engine(engine: Any, rounds: int) -> dict[str, Any]:
    """The costs of the plan of one token, on an engine with plans."""
    for token in (1, 2):
        engine.step([token])
    engine.synchronize()
    plans = [plan for plan in engine.issuer.plans if plan.captured is not None]
    work = plans[-1].work()
    costs = plan_costs(engine.backend, work, rounds)
    captured: CudaGraph = plans[-1].captured
    edges, programmatic = captured.edges()
    return {
        "parts": len(work.parts), "nodes": len(captured.nodes), "edges": edges,
        "programmatic_edges": programmatic, "costs": list(costs),
        **{name: spread(values) for name, values in costs.items()},
    }  # fmt: skip


def plan_costs(backend: CudaBackend, work: Plannable, rounds: int) -> Costs:
    """Each cost, `rounds` times or more. Every round computes the same values into the same
    memory."""
    found: Costs = defaultdict(list)
    more = _longer(work)
    _round(backend, work, more, defaultdict(list))  # warm
    for _ in range(rounds):
        _round(backend, work, more, found)
    return dict(found)


def _round(backend: CudaBackend, work: Plannable, more: Plannable, found: Costs) -> None:
    driver, stream, what = backend._driver, backend._stream(work.stream), "a plan's costs"
    api = driver.api

    def timed(name: str, call: Callable[[], Any]) -> Any:
        start = time.perf_counter_ns()
        made = call()
        found[name].append((time.perf_counter_ns() - start) / 1e3)
        return made

    backend.synchronize()
    timed("issue_us", work.call)
    backend.synchronize()
    graph = backend.capture(work)
    found["capture_us"].append(graph.capture_ns / 1e3)
    template = graph.template
    assert template is not None, "it has just been captured"
    try:
        executable = timed(
            "instantiate_us", lambda: driver.call("cuGraphInstantiate", what, template.graph, 0)
        )
        upload = [
            lambda: driver.call("cuGraphUpload", what, executable, stream), backend.synchronize,
        ]  # fmt: skip
        timed("upload_us", in_order(upload))
        api.cuGraphExecDestroy(executable)
        for name, other in (("exec_update_us", work), ("refused_update_us", more)):
            again, _ = graph.owner.record(what, other)
            timed(name, partial(api.cuGraphExecUpdate, graph._executable, again))
            api.cuGraphDestroy(again)
        _set(graph, work, found)
        _launch(backend, graph, found)
    finally:
        backend.synchronize()
        graph.destroy()


def _set(graph: CudaGraph, work: Plannable, found: Costs) -> None:
    for kind, wanted in (("kernel", _is_kernel), ("copy", _is_copy)):
        parts = [i for i, part in enumerate(work.parts) if all(map(wanted, commands_of(part)))]
        n = sum(node in set(parts) for node in graph.nodes)
        if not n:
            continue
        for name in (f"set_{kind}_first_us", f"set_{kind}_us"):
            before, start = graph.nodes_set, time.perf_counter_ns()
            graph.update(work, parts)
            if graph.nodes_set > before:  # else the driver needs such nodes captured anew
                found[name].append((time.perf_counter_ns() - start) / 1e3 / n)


def _is_kernel(issued: Issued) -> bool:
    return isinstance(issued.block, GraphArguments)


def _is_copy(issued: Issued) -> bool:
    return issued.same[:1] != () and issued.same[0] in COPIES


def _launch(backend: CudaBackend, graph: CudaGraph, found: Costs) -> None:
    driver = backend._driver
    stream, clock = graph._there, time.perf_counter_ns
    begin, end = (driver.event(timing=True) for _ in range(2))
    for _ in range(LAUNCHES):
        backend.synchronize()
        start = clock()
        graph.launch()
        launched = clock()
        driver.call("cuEventRecord", "a replay's end", begin.handle, stream)
        behind = clock()
        graph.launch()
        found["launch_behind_us"].append((clock() - behind) / 1e3)
        found["launch_us"].append((launched - start) / 1e3)
        driver.call("cuEventRecord", "a replay's end", end.handle, stream)
        backend.synchronize()
        ms = driver.call("cuEventElapsedTime", "a replay", begin.handle, end.handle)
        found["device_us"].append(ms * 1e3)


def _longer(work: Plannable) -> Plannable:
    """`work` with its last kernel launched once more: another topology."""
    again: Sequence[int] = [
        i for i, part in enumerate(work.parts) if all(map(_is_kernel, commands_of(part)))
    ]
    parts = (*work.parts, work.parts[again[-1]])
    return Plannable(
        in_order([part.call for part in parts]), work.same, parts=parts, backend=work.backend,
        stream=work.stream, streams=(*work.streams, work.stream),
    )  # fmt: skip


if __name__ == "__main__":
    start(app)
