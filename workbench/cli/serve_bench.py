"""`workbench serve-bench`: a load on a server, and the times that its requests saw."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter

from workbench.cli import flags as f
from workbench.cli.common import app, file_of, say
from workbench.cli.outputs import check_run_name
from workbench.common.errors import Kept, UsageError
from workbench.common.output import check_folder

if TYPE_CHECKING:
    from workbench.traffic.bench import BenchSpec

LOAD, CLIENT = Group("Load", sort_key=-2), Group("Client", sort_key=-1)


@dataclass(frozen=True)
class LoadSettings:
    """The requests, and when they are sent."""

    rate: Annotated[str | None, f.flag("requests a second, as 1,2.5,inf (all at once)")] = None
    concurrency: Annotated[
        str | None,
        f.flag("requests always in flight, as 1,8,32"),
    ] = None
    arrivals: Annotated[str, f.flag("how --rate is kept: poisson or constant")] = "poisson"
    n_prompt: Annotated[
        str,
        f.flag(
            "tokens of a prompt: 1024, uniform:16-512, or as llama.cpp's server-bench.py draws "
            "them, rng-0-19000",
            "--n-prompt -p",
        ),
    ] = "1024"
    n_gen: Annotated[
        str, f.flag("tokens of an answer, in the same words; the end token is no end", "--n-gen -n")
    ] = "128"
    n_requests: Annotated[f.Whole, f.flag("of each row", validator=f.AT_LEAST_1)] = 100
    warmup: Annotated[
        f.Whole, f.flag("requests before each row, not counted", validator=f.AT_LEAST_0)
    ] = 1
    max_seconds: Annotated[
        float | None, f.flag("of each row; what has not ended then is unfinished")
    ] = None
    shared_prefix: Annotated[
        f.Whole, f.flag("tokens that all prompts begin with", validator=f.AT_LEAST_0)
    ] = 0
    ids: Annotated[
        str | None,
        f.flag("token ids of prompts, as 100-10000; default: -m's normal tokens, or these"),
    ] = None
    temperature: Annotated[float, f.flag("0: the likeliest token")] = 0.0
    whole: Annotated[bool, f.flag("answers come whole, not streamed: no TTFT, TPOT or ITL")] = False
    seed: f.Seed = 0


@dataclass(frozen=True)
class ClientSettings:
    """The client that sends them."""

    client_processes: Annotated[
        f.Whole, f.flag("that share the requests", validator=f.AT_LEAST_1)
    ] = 1
    timeout: Annotated[float, f.flag("seconds of a request, to its end")] = 3600.0
    model_id: Annotated[
        str | None, f.flag("model's name in requests; default: the first that the server names")
    ] = None
    api_key_file: Annotated[Path | None, f.flag("file whose first line is the API key")] = None
    slo: Annotated[str | None, f.flag("what goodput counts, as ttft:200ms,tpot:30ms,e2e:5s")] = None


LoadFlags = Annotated[LoadSettings, Parameter(name="*", group=LOAD)]
ClientFlags = Annotated[ClientSettings, Parameter(name="*", group=CLIENT)]
DEFAULT_LOAD, DEFAULT_CLIENT = LoadSettings(), ClientSettings()


@app.command
def serve_bench(
    *,
    url: Annotated[str | None, f.flag("a running server, as http://127.0.0.1:8000")] = None,
    model: Annotated[
        f.OneModel | None,
        f.flag("GGUF file, or auto: begins `workbench serve` and stops it", "--model -m"),
    ] = None,
    slots: Annotated[
        f.Whole | None, f.flag("of the server; with -m it has 8", validator=f.AT_LEAST_1)
    ] = None,
    output: Annotated[
        Literal["table", "md", "json", "jsonl"],
        f.flag("format on standard output; table is vLLM's", "--output -o"),
    ] = "table",
    out: Annotated[Path | None, f.flag("run folder to write, too")] = None,
    load: LoadFlags = DEFAULT_LOAD,
    client: ClientFlags = DEFAULT_CLIENT,
    config: f.ServedFlags = f.DEFAULT_SERVED,
    toggles: f.ToggleFlags = f.DEFAULT_TOGGLES,
) -> None:
    """Put a load on a server, and time every token.

    Requests come at given rates or concurrencies, a row for each. With --url: any server with
    OpenAI's /v1/completions that takes token ids. With -m: a server of that file, with the
    flags of an engine and toggles. The client is a process of its own.
    """
    from workbench.common.tables import known_columns
    from workbench.traffic import bench, bench_text
    from workbench.traffic.load import arrivals, id_range, normal_ids
    from workbench.traffic.served import ServeCommand, Served, reached

    check_run_name(out)
    settings = arrivals(load.arrivals, load.rate, load.concurrency)
    if url is not None and model is not None:
        raise UsageError("--url and -m each name a server; leave one of them out")
    if url is None and model is None:
        raise UsageError(
            "name a server: --url http://127.0.0.1:8000, -m auto, or -m and a GGUF file"
        )
    given = tuple(_server_flags(config, toggles))
    if url is not None and given:
        raise UsageError(f"{given[0]} is the server's; give it where the server of --url begins")
    spec = _spec(load, client, slots)
    if out is not None:
        check_folder(out, new=True)
    path = None if model is None else file_of(model, config.device)
    if path is not None:
        served: Served = ServeCommand(path, slots or 8, config.device, given)
    else:
        assert url is not None
        served = _address(url)
    key = None if client.api_key_file is None else _key(client.api_key_file)
    with reached(
        served, model_id=client.model_id, key=key, processes=client.client_processes, say=say
    ) as target:
        if path is not None and load.ids is None:
            ids = normal_ids(path)
        else:
            ids = id_range(load.ids, target.n_vocab)
        spec = spec._replace(ids=ids, parallel=slots or target.n_slots)
        made = bench.serve_bench(
            target, settings, spec, about=target.about, out=out, on_row=_say_row
        )  # fmt: skip
    print(bench_text.format_rows(made.rows, output, known_columns()), end="")
    if made.interrupted:
        raise Kept


def _say_row(row: Any) -> None:
    found = row.figures
    say(
        f"{row.setting.name}: {found['completed']} requests in {found['duration']:.2f} s, "
        f"{found['output_throughput']:.1f} t/s"
    )
    for warning in row.warnings:
        say(f"note: {row.setting.name}: {warning}")


def _address(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"--url {url!r} is no address; write it as http://127.0.0.1:8000")
    return url


def _key(file: Path) -> str:
    """The first line of a file; it goes into a header, so it is ASCII."""
    try:
        return file.read_text(encoding="ascii").split("\n")[0].strip()
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} holds no API key: it is not ASCII") from error


def _spec(load: LoadSettings, client: ClientSettings, slots: int | None) -> BenchSpec:
    """The load, checked before it begins; all but the ids of prompts, which depend on the server's
    model."""
    import numpy as np

    from workbench.traffic.bench import BenchSpec
    from workbench.traffic.latency import Slo
    from workbench.traffic.load import id_range, lengths
    from workbench.traffic.targets import Asking

    for flag, value in (("--max-seconds", load.max_seconds), ("--timeout", client.timeout)):
        if value is not None and not 0 < value < math.inf:
            raise UsageError(f"{flag} {value} is no length of time; give seconds above 0")
    id_range(load.ids, None)
    made = BenchSpec(
        lengths("-p", load.n_prompt), lengths("-n", load.n_gen), np.empty(0, np.int32),
        n_requests=load.n_requests, n_warm_up=load.warmup, n_shared=load.shared_prefix,
        seed=load.seed, most_s=load.max_seconds or math.inf,
        slo=None if client.slo is None else Slo.of(client.slo),
        asking=Asking(not load.whole, load.temperature, client.timeout), parallel=slots,
    )  # fmt: skip
    made.check()
    return made


def _server_flags(config: f.EngineSettings, toggles: f.GivenToggles) -> Iterator[str]:
    """The flags of the engine and the toggles that were given, as typed."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        flag = f"--{field.name.replace('_', '-')}"
        if value == field.default:
            continue
        if isinstance(value, bool):
            yield flag
            continue
        for one in value if isinstance(value, tuple) else (value,):
            yield from (flag, str(one))
    for name, value in vars(toggles).items():
        if value is not None:
            yield from (f"--{name.replace('_', '-')}", str(value))
