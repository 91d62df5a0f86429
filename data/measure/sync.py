"""Runs of the sync modes for data/results: speed, gaps between tokens, timelines.

Every function is one step of `data.measure`; names in brackets are those of its folders.
"""

from __future__ import annotations

import workbench as wb
from data.measure.models import compare
from data.measure.session import Session, everything, slug
from workbench.backend.base import open_backend
from workbench.bench.gaps import host_gaps
from workbench.bench.llama_bench import bench, format_rows
from workbench.config import CopyStream, SyncMode, Toggles
from workbench.errors import DeviceError, UsageError

# preset, type, rounds of each comparison
SYNC_MODELS = [
    ("llama-3.2-1b", "F16", 5), ("llama-3.2-3b", "Q4_K_M", 5), ("qwen3-4b", "Q4_K_M", 5),
]  # fmt: skip
TESTS = "tg128,tg256,tg512"
MODES = [mode for mode in SyncMode if mode != SyncMode.AUTO]


def backgrounds(engine: wb.Engine) -> dict[str, Toggles]:
    """Programs kept, and all else off, or all else on."""
    return {"off": Toggles(graph_reuse="set_rows"), "on": everything(engine)}


def modes_on(stream: str) -> list[str]:
    """The sync modes that are safe with copies on `stream`, the baseline first."""
    safe = []
    for mode in MODES:
        try:
            Toggles(sync=mode, copy_stream=stream)
        except UsageError:  # clashes
            continue
        if (mode, stream) != (SyncMode.IMPLICIT, CopyStream.OWN):  # races
            safe.append(str(mode))
    return safe


def sync(session: Session) -> None:
    """Every sync mode on both copy streams and both backgrounds; graph reuse; then timelines of
    some tokens of the first model [sync-STREAM-BACKGROUND-MODEL, graph-reuse-..., bench-...]."""
    for preset, quant, rounds in SYNC_MODELS:
        if not session.takes(preset, quant):
            continue
        model = slug(preset, quant)
        with session.engine(preset, quant) as engine:
            for name, background in backgrounds(engine).items():
                for stream in (CopyStream.OWN, CopyStream.COMPUTE):
                    toggles = background.switched("copy_stream", stream).switched(
                        "sync", "per_copy"
                    )
                    spec = f"sync={','.join(modes_on(stream))}"
                    run = f"sync-{stream}-{name}-{model}"
                    compare(session, engine, run, spec, TESTS, rounds, toggles)
            if (preset, quant) != SYNC_MODELS[0][:2]:
                continue
            reuse = "graph_reuse=rebuild,set_rows"
            compare(session, engine, f"graph-reuse-{model}", reuse, "tg32", rounds, Toggles())
            folder = session.folder(f"bench-{model}")
            if folder is not None:
                with engine.variant(Toggles(graph_reuse="set_rows")) as kept:
                    print(format_rows(bench(kept, out=folder)), flush=True)
            _trace_both(engine, session, model)


def gaps(session: Session) -> None:
    """The time between a token's last kernel and the next one's first, by mode and copy stream, and
    what one wait adds to it [gaps-BACKGROUND-MODEL]."""
    for preset, quant, _ in SYNC_MODELS:
        if not session.takes(preset, quant):
            continue
        with session.engine(preset, quant) as engine:
            for name, background in backgrounds(engine).items():
                folder = session.folder(f"gaps-{name}-{slug(preset, quant)}")
                if folder is None:
                    continue
                arms = {
                    f"{mode}, {stream}": background.switched("copy_stream", stream).switched(
                        "sync", mode
                    )
                    for stream in (CopyStream.OWN, CopyStream.COMPUTE)
                    for mode in modes_on(stream)
                }
                some = {"rounds": 2} if session.quick else {}
                found = host_gaps(engine, arms, out=folder, name=folder.name, **some)
                print(f"{folder.name}:\n{found}", flush=True)


PIPELINED = ("llama-3-8b", "Q4_0", 5)
N_PROMPT = 4096  # eight ubatches


def pipeline(session: Session) -> None:
    """A prompt of eight ubatches over two GPUs: the host waiting for each or for the last alone,
    with one place for inputs and with four, where stream order makes up for places and where only
    waits of the host do; and on one GPU [pipeline-step-wait-MODEL, pipeline-n-copies-MODEL,
    pipeline-n-copies-per-copy-MODEL, pipeline-one-device-MODEL]."""
    preset, quant, rounds = PIPELINED
    if not session.takes(preset, quant):
        return
    model, test = slug(preset, quant), f"pp{N_PROMPT}"
    n_ctx = N_PROMPT + 64
    try:
        open_backend(session.device, **({"device": 1} if session.device == "cuda" else {})).close()
    except DeviceError as reason:
        print(f"pipeline: left out ({reason})", flush=True)
        return
    with session.engine(preset, quant, n_ctx, n_devices=2) as engine:
        ring = everything(engine).switched("host_source", "pinned_ring_4")
        four = ring.switched("n_copies", "4")
        train = ring.switched("step_wait", "outputs")
        spec = "step_wait=every,outputs"
        compare(session, engine, f"pipeline-step-wait-{model}", spec, test, rounds, four)
        compare(session, engine, f"pipeline-n-copies-{model}", "n_copies=1,4", test, rounds, train)
        own = train.switched("sync", "per_copy").switched("copy_stream", "own")
        run = f"pipeline-n-copies-per-copy-{model}"
        compare(session, engine, run, "n_copies=1,4", test, rounds, own)
    with session.engine(preset, quant, n_ctx) as engine:
        compare(session, engine, f"pipeline-one-device-{model}", spec, test, rounds, four)


def _trace_both(engine: wb.Engine, session: Session, model: str) -> None:
    """A few tokens with every wait, and with none but the logits', as traces beside their runs."""
    kept = Toggles(graph_reuse="set_rows")
    sides = {
        "sync-own-off": kept,
        "sync-compute-off": kept.switched("sync", "implicit").switched("copy_stream", "compute"),
    }
    for name, toggles in sides.items():
        with engine.variant(toggles) as side:
            side.generate(tokens=[1, 2, 3], max_tokens=8)
            with wb.profile(side, window=(8, 8)) as trace:
                side.generate(tokens=[1, 2, 3], max_tokens=20)
            trace.save(session.out / f"{session.prefix}-{name}-{model}" / "timeline.pftrace.gz")
