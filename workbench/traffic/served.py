"""One call for a load: on an engine of this process, an engine process, or a server.

`reached` starts an engine or a server for a load, and stops it afterwards. `serve_bench` measures.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from workbench.benchmarks.runs import provenance
from workbench.common.devices import is_gpu
from workbench.common.errors import UsageError, WorkbenchError
from workbench.common.nearest import choices
from workbench.engine.engine import Engine
from workbench.model.gguf.inspect import summary
from workbench.server.serving import serving
from workbench.server.wire.messages import Finish
from workbench.server.wire.worker import OwnEngine, WorkerSettings, start
from workbench.traffic import bench, load, rehearsed
from workbench.traffic.bench import BenchSpec, ServeBench, ServedRow
from workbench.traffic.latency import Slo
from workbench.traffic.targets import LoadTarget, over_http, over_pipe, without_proxy

# a thread of the server waits for the end of its standard input. The input ends with this process,
# even where this process is killed
ENDS_WITH_US = (
    "import os, signal, threading; threading.Thread(daemon=True, target=lambda: "
    "os.read(0, 1) or os.kill(os.getpid(), signal.SIGTERM)).start()"
)
POLL_S, STOP_S, END_S = 0.1, 30.0, 60.0
BEGIN_S = 900.0  # a large model comes from a slow disk


class ServeCommand(NamedTuple):
    """`workbench serve` on a free port of this machine.

    device: as run.json says; the server's own device is among the flags.
    flags: of the server's engine, as they are typed.
    begin_s: how long the server may take until it is healthy, s.
    """

    model: Path
    n_slots: int
    device: str
    flags: tuple[str, ...] = ()
    begin_s: float = BEGIN_S

    @property
    def arguments(self) -> list[str]:
        return ["-m", str(self.model), "--slots", str(self.n_slots), *self.flags]


Served = Engine | WorkerSettings | ServeCommand | LoadTarget | str


@contextmanager
def reached(
    served: Served, n_slots: int = 8, *, model_id: str | None = None, key: str | None = None,
    processes: int = 1, say: Callable[[str], None] = lambda line: None,
) -> Iterator[LoadTarget]:  # fmt: skip
    """A target for loads. A process that is started for the target is stopped at the end of the
    body.

    served: an engine, which this process then serves with; settings, to start an engine process; a
        command, to start a server; the address of a running server; or a target.
    n_slots: requests that an engine serves together.
    model_id, key, processes: of a load over HTTP, as in `over_http`.
    say: takes a line to print where a server is started.
    Raises WorkbenchError where a started process ends before it is ready, or the address is none.
    """
    if isinstance(served, LoadTarget):
        yield served
    elif isinstance(served, Engine):
        target, found = over_pipe(OwnEngine(served, n_slots)), provenance.collect(served)
        engine = {"toggles": served.toggles.to_dict(), "slots": n_slots}
        target.about = {"model": found["model"], "engine": found["engine"] | engine}
        yield target
    elif isinstance(served, WorkerSettings):
        with _engine_process(served) as target:
            toggles = serving(served.config.device, served.toggles)
            target.about["model"] = model_facts(served.model)
            target.about["engine"] |= {
                "toggles": {"preset": toggles.name} | toggles.changes, "slots": served.n_slots,
            }  # fmt: skip
            yield target
    elif isinstance(served, ServeCommand):
        facts = model_facts(served.model)
        say(f"{served.model} is loaded by a server with {served.n_slots} slots")
        with _server(served) as url:
            target = over_http(url, model_id, key, processes)
            engine = {"device": served.device, "command": ["serve", *served.arguments]}
            target.about, target.n_slots = {"model": facts, "engine": engine}, served.n_slots
            yield target
    else:
        _check_url(served)
        yield over_http(served, model_id, key, processes)


def _check_url(served: object) -> None:
    """Raises UsageError for anything but the address of a server. A path is what other functions
    take in place of an engine, so the line says what to give here."""
    if not str(served).lower().startswith(("http://", "https://")):
        what = repr(str(served)) if isinstance(served, str | Path) else type(served).__name__
        raise UsageError(
            f"{what} is no engine and no URL of a server; give wb.Engine.load(...), or a URL as "
            "http://127.0.0.1:8000"
        )


@contextmanager
def _engine_process(settings: WorkerSettings) -> Iterator[LoadTarget]:
    """An engine process as a server has it, reached over its pipe."""
    (pipe,), process = start(settings)
    try:
        yield over_pipe(pipe)
        pipe.send(Finish())
    finally:
        pipe.close()
        process.join(END_S)
        if process.is_alive():
            process.kill()
            process.join()


@contextmanager
def _server(command: ServeCommand) -> Iterator[str]:
    """The address of a server, once it is healthy.

    Raises WorkbenchError where the server ends before it is healthy, with its last line, or takes
    longer than command.begin_s.
    """
    with socket.socket() as found:  # a free port
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    with tempfile.TemporaryFile() as log:
        child = begin_server([*command.arguments, "--port", str(port)], log)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(url, child, log, time.monotonic() + command.begin_s)
            yield url
        finally:
            _stop(child)


def begin_server(arguments: Sequence[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    """Starts `workbench serve` in a process session of its own, so that Ctrl-C does not reach it:
    the server is stopped when the measuring has ended."""
    code = f"{ENDS_WITH_US}; from workbench.cli import main; main({['serve', *arguments]!r})"
    return subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {code}"],
        stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True,
    )  # fmt: skip


def _wait(url: str, child: subprocess.Popen[bytes], log: IO[bytes], until: float) -> None:
    while not is_healthy(url):
        if child.poll() is not None:
            log.seek(0)
            lines = log.read().decode(errors="replace").strip().splitlines()
            said = lines[-1].removeprefix("error: ") if lines else f"status {child.returncode}"
            raise WorkbenchError(f"the server did not begin: {said}")
        if time.monotonic() > until:
            raise WorkbenchError(f"{url}/health does not answer; begin the server, and give --url")
        time.sleep(POLL_S)


def is_healthy(url: str) -> bool:
    """Whether a server takes requests."""
    try:
        with without_proxy().open(f"{url}/health", timeout=10) as answer:
            return bool(answer.status == 200)
    except OSError:  # no listener yet, or 503 while the model is loaded
        return False


def _stop(child: subprocess.Popen[bytes]) -> None:
    """Asks a server to end; kills it with all its processes where it does not end."""
    child.terminate()
    try:
        child.wait(STOP_S)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)  # the session is its own
        child.wait()
    if child.stdin is not None:
        child.stdin.close()


def model_facts(path: str | Path) -> dict[str, Any]:
    """`model` of run.json: the facts that the file states."""
    found = summary(path)
    return {
        "file": Path(path).name,
        "hash": found.hash,
        "architecture": found.architecture,
        "name": found.name,
        "quant": found.types[0].dtype if found.types else None,
        "n_params": found.parameters,
        "file_bytes": found.file_bytes,
        "weight_bytes_per_token": found.weight_bytes_per_token,
    }


Listed = str | float | Sequence[float] | None


def _text(values: Listed) -> str | None:
    """Values as the command takes them: `1,8`."""
    if values is None or isinstance(values, str):
        return values
    several = values if isinstance(values, Sequence) else [values]
    return ",".join(map(str, several))


def _check(beside: Sequence[Engine], asked: Mapping[str, Any]) -> None:
    """Raises UsageError for engines beside that are none, and for a keyword that does not exist."""
    known = [name for name in BenchSpec._fields if name not in ("ids", "parallel", "slo")]
    for name in asked:
        if name not in known:
            own = ("slots", "concurrency", "rate", "arrivals", "beside", "out", "on_row")
            raise UsageError(f"keyword {name!r} does not exist; {choices(name, (*own, *known))}")
    if not isinstance(beside, Sequence) or not all(isinstance(one, Engine) for one in beside):
        raise UsageError(f"beside={beside!r} are no engines; give a list of engines")


def serve_bench(
    served: Served,
    *,
    slots: int = 8,
    concurrency: Listed = None,
    rate: Listed = None,
    arrivals: str = load.POISSON,
    n_prompt: str | int = "1024",
    n_gen: str | int = "128",
    n_requests: int = 100,
    seed: int = 0,
    slo: str | None = None,
    beside: Sequence[Engine] = (),
    out: str | Path | None = None,
    on_row: Callable[[ServedRow], None] | None = None,
    **asked: Any,
) -> ServeBench:
    """Offers the load of each setting, one after another, and times every token.

    served: an engine, an engine process, or a server, as in `reached`.
    slots: requests that an engine serves together.
    concurrency: `"1,8,32"` requests in flight; also a number, or a list of numbers.
    rate: requests a second, as `"2,inf"`, a number, or a list.
    arrivals: how requests at a rate come, `"poisson"` or `"constant"`.
    n_prompt, n_gen: tokens of a request, as 1024, `"uniform:16-512"` or `"rng-0-512"`.
    n_requests: of each setting.
    seed: of lengths, token ids and arrivals.
    slo: the objective that goodput counts, as `"ttft:200ms,tpot:30ms"`.
    beside: engines of this process that the same load comes to later. On a GPU the kernels of all
        of them are compiled together, before this load.
    out: a run folder to write.
    on_row(row): called as soon as a setting is finished.
    asked: more of `BenchSpec`.

    Returns a ServeBench: a row for each setting, with throughput (tokens/s) and latencies (ms).
    Ctrl-C ends the measuring, and what has ended is returned, marked interrupted. Raises UsageError
    for a setting or a length that is none and for a folder that exists, and WorkbenchError where
    nothing answers.
    """
    settings = load.arrivals(arrivals, _text(rate), _text(concurrency))
    _check(beside, asked)
    with reached(served, slots) as target:
        spec = BenchSpec.of(
            str(n_prompt), str(n_gen), load.id_range(None, target.n_vocab),
            n_requests=n_requests, seed=seed, slo=None if slo is None else Slo.of(slo),
            parallel=target.n_slots, **asked,
        )  # fmt: skip
        if isinstance(served, Engine) and is_gpu(served.device):
            rehearsed.make_ready([served, *beside], slots, settings, spec)
        return bench.serve_bench(
            target, settings, spec, about=target.about, out=out, on_row=on_row
        )  # fmt: skip
