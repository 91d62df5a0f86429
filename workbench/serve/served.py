"""One call for a load: an engine of this process, an engine process, or a server somewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from workbench.bench import provenance
from workbench.engine.engine import Engine
from workbench.serve import bench, load
from workbench.serve.bench import BenchSpec, ServeBench, ServedRow
from workbench.serve.child import id_range, model_facts
from workbench.serve.latency import Slo
from workbench.serve.messages import Finish
from workbench.serve.own_engine import OwnEngine
from workbench.serve.pipe_target import PipeTarget
from workbench.serve.serving import serving
from workbench.serve.targets import HttpTarget, LoadTarget, model_of
from workbench.serve.worker import WorkerSettings, start

END_S = 60.0
Served = Engine | WorkerSettings | str


@contextmanager
def engine_process(settings: WorkerSettings) -> Iterator[PipeTarget]:
    """An engine process of its own, as a server has it, reached over its pipe."""
    (pipe,), process = start(settings)
    try:
        yield PipeTarget(pipe)
        pipe.send(Finish())
    finally:
        pipe.close()
        process.join(END_S)
        if process.is_alive():
            process.terminate()
            process.join()


def serve_bench(
    served: Served,
    *,
    slots: int = 8,
    concurrency: str | None = None,
    rate: str | None = None,
    arrivals: str = load.POISSON,
    n_prompt: str = "1024",
    n_gen: str = "128",
    n_requests: int = 100,
    seed: int = 0,
    slo: str | None = None,
    out: str | Path | None = None,
    on_row: Callable[[ServedRow], None] | None = None,
    **asked: Any,
) -> ServeBench:
    """Offers the load of each setting, one after another, and times every token.

    served: an engine, which this process then serves with; or what an engine process is started
    with, and ended behind it; or the address of a server that runs. slots: of an engine, requests
    served together. concurrency: `"1,8,32"` requests in flight; rate: requests a second, as
    `"2,inf"`; arrivals: how these come, `"poisson"` or `"constant"`. n_prompt, n_gen: tokens of a
    request, as `"1024"`, `"uniform:16-512"` or `"rng-0-512"`. slo: what goodput counts, as
    `"ttft:200ms,tpot:30ms"`. out: a run folder.
    asked: more of `BenchSpec`. See `bench.serve_bench` for Ctrl-C, and what is raised.
    """
    settings = load.arrivals(arrivals, rate, concurrency)
    with ExitStack() as stack:
        target, about, n_vocab, parallel = _reached(served, slots, stack)
        spec = BenchSpec.of(
            n_prompt, n_gen, id_range(None, n_vocab), n_requests=n_requests, seed=seed,
            slo=None if slo is None else Slo.of(slo), parallel=parallel, **asked,
        )  # fmt: skip
        return bench.serve_bench(target, settings, spec, about=about, out=out, on_row=on_row)


def _reached(
    served: Served, slots: int, stack: ExitStack
) -> tuple[LoadTarget, dict[str, Any], int | None, int | None]:
    """The target, `model` and `engine` of run.json, the vocabulary, and requests at once."""
    if isinstance(served, Engine):
        found = provenance.collect(served)
        about = {name: found[name] for name in ("model", "engine")}
        about["engine"] |= {"toggles": served.toggles.to_dict(), "slots": slots}
        return PipeTarget(OwnEngine(served, slots)), about, served.model.n_vocab, slots
    if isinstance(served, WorkerSettings):
        target = stack.enter_context(engine_process(served))
        toggles = serving(served.config.device, served.toggles)
        engine = {
            "device": target.ready.device, "toggles": {"preset": toggles.name} | toggles.changes,
            "slots": served.n_slots,
        }  # fmt: skip
        about = {"model": model_facts(served.model), "engine": engine}
        return target, about, target.ready.n_vocab, served.n_slots
    name, n_vocab = model_of(served)
    about = {
        "model": {"name": name, "quant": None}, "engine": {"device": "unknown", "url": served},
    }  # fmt: skip
    return HttpTarget(served, name), about, n_vocab, None
