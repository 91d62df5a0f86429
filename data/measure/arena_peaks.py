"""What lifetimes cost in memory: `python -m data.measure.arena_peaks` writes
data/results/arena-peaks.json, which README's table is made of and `make test` computes again.

Nothing is measured and no device is needed: graphs of real shapes are laid out as on a GPU, with
the scratch of its kernels. A row has the arena's bytes by kind of lifetimes, and how many ranges
that kind would overwrite while they are in use.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, product
from typing import Any, NamedTuple

from data.measure.recorded import Recorded, commit_of
from data.measure.sources import ROOT
from data.measure.tables import Line, Part, Table
from tests.graphs import Decoder
from workbench.backend.cuda.kernels.op_table import scratch_bytes
from workbench.benchmarks.runs import provenance
from workbench.common.output import write_text
from workbench.common.sizes import round_up
from workbench.config import AttnKernel, BranchFusion, Fork, KVParts, Lifetimes, Results, SyncMode
from workbench.graph.arena import ArenaLayout
from workbench.graph.attend import attend_by
from workbench.graph.branch_fusion import fused
from workbench.graph.forks import Branches, chained
from workbench.graph.fuse import FUSIONS
from workbench.graph.ir import ALIGN, BF16, F16, Q4_0, Q4_K, DType, Graph, Node, Tensor
from workbench.graph.lifetimes import Lifetime, alive_together, lifetimes, overwritten
from workbench.program.branches import forked
from workbench.program.commands import DEVICE, HOST
from workbench.program.layout import Layout, Target, lay_out
from workbench.program.split import Split, split
from workbench.program.sync_modes import Ordering

NAME = "arena-peaks"
OUT = ROOT / "data" / "results" / f"{NAME}.json"
# shapes and types of the thread (#16991)
MODELS: dict[str, DType] = {
    "llama-3.2-1b": BF16, "llama-3-8b": Q4_0, "qwen3-4b": Q4_K, "qwen3-8b": F16,
}  # fmt: skip
STEPS = {"decode": 1, "pp512": 512}  # tokens
N_KV = 512
N_STREAMS = (3, 8)
RULES = (Fork.QKV, Fork.ANY)
FUSED: dict[str, tuple[str, ...]] = {"none": (), "inside": FUSIONS}  # which patterns, in branches
KINDS = (Lifetimes.SERIAL, Lifetimes.INTERLEAVED, Lifetimes.VISIBILITY)
TARGETS = [Target("host", lambda node: 0), Target("cuda", scratch_bytes)]
# logits land in the host's memory; so the arena holds activations alone
ORDERING = Ordering(SyncMode.COPY_BOUNDARY, results=Results.DIRECT)
WHAT = (
    f"KiB of the device's arena in a step on {N_KV} cells: inputs, activations and scratch. least: "
    "no arena that is right for these branches is smaller, however it is laid out. overwritten: "
    "pairs of ranges that share bytes while both may be in use. fused: no pattern, or every one "
    "inside branches. Steps without branches are left out, for there all lifetimes are equal."
)


class Step(NamedTuple):
    """A step with the branches of its device: the input of a layout."""

    graph: Graph
    splits: list[Split]
    branches: Branches


def steps(model: str, n_tokens: int, patterns: Iterable[str], rule: str) -> Iterator[Step]:
    """The steps of an engine with kv_parts=parallel_blocks, for each of N_STREAMS. The host looks
    up embeddings."""
    decoder = Decoder(model, MODELS[model])

    def backend_of(node: Node) -> int:
        return HOST if node.op == "get_rows" and node.inputs[0] is decoder.embedding else DEVICE

    plain, inside = decoder.graph(n_tokens, 1, N_KV, n_cells=N_KV), BranchFusion.INSIDE
    unfused = attend_by(plain, AttnKernel.AUTO, KVParts.PARALLEL_BLOCKS)
    graph = fused(unfused, frozenset(patterns), backend_of, inside, max(N_STREAMS), rule)
    for n in N_STREAMS:
        splits = forked(split(graph, backend_of), n, rule)
        own = [part.branches for part in splits if part.backend == DEVICE]
        yield Step(graph, splits, chained(own))


def in_arena(layout: Layout, backend: int) -> ArenaLayout:
    """The arena of a backend, as `graph/lifetimes.py` wants it. It is as large as the largest step
    so far."""
    memory = layout.known[f"arena.{backend}"]
    mine, both = layout.ranges[backend].items(), layout.scratch.items()
    return ArenaLayout(
        {t: r.offset for t, r in mine if r.buffer is memory},
        {node: (r.offset, r.nbytes) for node, r in both if r.buffer is memory},
        memory.nbytes,
    )


def least_bytes(found: Sequence[Lifetime], branches: Branches) -> int:
    """The bytes that every arena needs which overwrites nothing: the most bytes of ranges that are
    pairwise in use together. The search is exhaustive, with bounds. It is quick where few ranges
    are in use together, as in decoders."""
    nbytes = {one.of: round_up(one.nbytes, ALIGN) for one in found}
    beside: dict[Tensor | Node, list[Tensor | Node]] = {one.of: [] for one in found}
    for lost, by in alive_together(found, branches):
        beside[by.of].append(lost.of)

    def most(all_of: int, others: Sequence[Tensor | Node], known: int) -> int:
        """The bytes of the heaviest set, or `known` where no set has more."""
        known, left = max(known, all_of), sum(map(nbytes.__getitem__, others))
        for one in reversed(others):
            if all_of + left <= known:
                break
            left -= nbytes[one]
            with_one = set(beside[one])
            known = most(all_of + nbytes[one], [t for t in others if t in with_one], known)
        return known

    least = 0
    for of, others in beside.items():
        least = most(nbytes[of], others, least)
    return least


def figures(step: Step) -> dict[str, Any]:
    """The arena's bytes by kind of lifetimes, the least bytes that would do, and the pairs of
    ranges that are overwritten. Weights and caches lie outside the arena."""
    crossing = [s for part in step.splits for s in part.inputs]
    found: dict[str, Any] = {"used": step.branches.n_streams, "bytes": {}, "overwritten": {}}
    for kind in KINDS:
        layout = lay_out(step.graph, step.splits, [{}, {}], TARGETS, ORDERING, lifetimes=kind)
        made = in_arena(layout, DEVICE)
        ranges = lifetimes(made, step.branches, [*crossing, *step.graph.outputs])
        found["bytes"][kind.value] = made.nbytes
        found["overwritten"][kind.value] = len(overwritten(ranges, step.branches))
    found["least"] = least_bytes(ranges, step.branches)
    return found


def peaks(models: Iterable[str] = MODELS) -> Iterator[dict[str, Any]]:
    """A row for each model, step, fusion, rule and number of streams."""
    for model, (test, n_tokens), (how, patterns), rule in product(
        models, STEPS.items(), FUSED.items(), RULES
    ):
        named = {"model": f"{model} {MODELS[model].name}", "test": test, "fused": how,
                 "fork": rule.value}  # fmt: skip
        for n, step in zip(N_STREAMS, steps(model, n_tokens, patterns, rule), strict=True):
            yield {**named, "streams": n, **figures(step)}


def lines(recorded: Recorded) -> Iterator[Line]:
    """The rows that have branches. Rows that differ in `streams` alone are one line."""
    rows = [row for row in (recorded.alone(NAME) or {"rows": ()})["rows"] if row["used"] > 1]
    for values, some in groupby(rows, lambda row: row | {"streams": 0, "used": 0}):
        sizes = {**values["bytes"], "least": values["least"]}
        serial, seen = (values["bytes"][kind] for kind in (Lifetimes.SERIAL, Lifetimes.VISIBILITY))
        lost = values["overwritten"]
        yield Line({
            **{name: values[name] for name in ("model", "test", "fused", "fork")},
            "streams": " or ".join(str(row["streams"]) for row in some),
            **{name: f"{nbytes / 1024:.0f}" for name, nbytes in sizes.items()},
            "visibility over serial": f"{100 * (seen / serial - 1):+.1f} %",
            "overwritten by serial": lost[Lifetimes.SERIAL],
            "by interleaved": lost[Lifetimes.INTERLEAVED],
            "by visibility": lost[Lifetimes.VISIBILITY],
        })  # fmt: skip


def said(recorded: Recorded) -> str:
    found = recorded.alone(NAME) or {}
    return f"{WHAT} Commit {commit_of(found)}; {found['date'][:10]}."


BLOCKS: dict[str, list[Part]] = {NAME: [Table("Memory by lifetimes", lines, said=said)]}


if __name__ == "__main__":
    record = {"date": provenance.utc_now(), "commit": provenance.commit(), "rows": list(peaks())}
    write_text(OUT, json.dumps(record, indent=1) + "\n")
    print(f"wrote {OUT}")
