"""`workbench serve`: serves a model over OpenAI's HTTP interface."""

from __future__ import annotations

import dataclasses
import gc
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter
from cyclopts.validators import Number

from workbench.cli import flags as f
from workbench.cli.common import app, file_of, say
from workbench.common.errors import UsageError

SERVER = Group("Server", sort_key=0)
MOST_PORT = 65535


@dataclass(frozen=True)
class ServerSettings:
    """Where a server listens, whom it serves, and the defaults of requests."""

    host: Annotated[str, f.flag("address to listen at; others than this machine's need a key")] = (
        "127.0.0.1"
    )
    port: Annotated[
        f.Whole, f.flag("0: any that is free", validator=Number(gte=0, lte=MOST_PORT))
    ] = 8000
    api_key_file: Annotated[
        Path | None,
        f.flag(
            "file with API keys, one a line, # before a comment; a request must have one of them"
        ),
    ] = None
    model_id: Annotated[
        str | None, f.flag("model's name for clients; default: the file's", "--model-id --alias -a")
    ] = None
    chat_template_file: Annotated[
        Path | None, f.flag("chat template (Jinja) in place of the model file's")
    ] = None
    max_waiting: Annotated[
        f.Whole, f.flag("requests that may wait for a slot; more get 503", validator=f.AT_LEAST_0)
    ] = 512
    max_body: Annotated[
        f.Whole, f.flag("most bytes of a request's body", validator=f.AT_LEAST_1)
    ] = 16 << 20
    timeout: Annotated[
        float | None, f.flag("seconds that a request may take; default: no limit")
    ] = None
    cors_origin: Annotated[
        tuple[str, ...],
        f.flag(
            "origin whose pages in a browser may ask, as https://chat.example; * for all; can be "
            "given again"
        ),
    ] = ()
    drain: Annotated[float, f.flag("seconds that what runs has when the server is told to end")] = (
        60.0
    )
    temperature: Annotated[
        float, f.flag("of requests that name none; 0: the likeliest token", "--temperature --temp")
    ] = 0.8
    top_k: Annotated[f.Whole, f.flag("of requests that name none; 0: all")] = 40
    top_p: Annotated[float, f.flag("of requests that name none")] = 0.95
    min_p: Annotated[float, f.flag("of requests that name none; 0: all")] = 0.0


ServerFlags = Annotated[ServerSettings, Parameter(name="*", group=SERVER)]
DEFAULT_SERVER = ServerSettings()


@app.command
def serve(
    *,
    model: f.ModelPath,
    slots: Annotated[
        f.Whole, f.flag("requests served at once", "--slots --parallel -np", validator=f.AT_LEAST_1)
    ] = 8,
    server: ServerFlags = DEFAULT_SERVER,
    config: f.ServedFlags = f.DEFAULT_SERVED,
    toggles: f.ToggleFlags = f.DEFAULT_TOGGLES,
) -> None:
    """Serve a model by HTTP, as OpenAI and llama.cpp do.

    Preset best also has what a server needs: a region of the cache for each slot, tokens drawn on
    the device, results that arrive while the next step runs.

    On Ctrl-C and SIGTERM running requests are finished first. A second signal ends the server at
    once. /openapi.json describes the interface, /metrics is for Prometheus.
    """
    from workbench.engine.slots.seats import check_cells
    from workbench.model.gguf.file import open_gguf
    from workbench.model.hparams import read_hparams
    from workbench.model.sampler import Sampling
    from workbench.model.tokenizer.tokenizer import load_tokenizer
    from workbench.server.api.reading import Defaults
    from workbench.server.chat import KEY
    from workbench.server.server import Listening
    from workbench.server.server import serve as serve_http
    from workbench.server.text import TokenTexts
    from workbench.server.wire.front import FrontSettings
    from workbench.server.wire.worker import WorkerSettings, start

    f.check_computes(config.device)
    wanted = toggles.wanted()
    if config.n_seqs not in (slots, f.DEFAULT_SERVED.n_seqs):
        raise UsageError("--n-seqs: a server has as many sequences as --slots; leave it out")
    if server.timeout is not None and not server.timeout > 0:
        raise UsageError(f"--timeout {server.timeout} must be above 0 seconds")
    if not server.drain >= 0:
        raise UsageError(f"--drain {server.drain} must be 0 or more seconds")
    sampling = Sampling(server.temperature, server.top_k, server.top_p, server.min_p)
    defaults = Defaults(sampling, server.timeout)
    keys, origins = _keys(server.api_key_file), tuple(map(_origin, server.cors_origin))
    template = _template(server.chat_template_file)
    path = file_of(model, config.device)
    with open_gguf(path) as file:
        texts = TokenTexts(load_tokenizer(file))
        trained = read_hparams(file).n_ctx_train
        if template is None:
            template = file.get(KEY, str, "") or None
    for note in config.notes:
        say(note)
    n_ctx = config.n_ctx or slots * min(trained, f.SERVED_TOKENS)
    check_cells(n_ctx, slots)
    engine = dataclasses.replace(config.plain(), n_seqs=slots, n_ctx=n_ctx)
    settings = WorkerSettings(str(path), engine, slots, wanted, server.max_waiting)
    # a vocabulary is many objects: to look through them would hold up tokens
    gc.collect()
    gc.freeze()

    stopped = serve_http(
        lambda n_fronts: start(settings, n_fronts),
        texts,
        template,
        FrontSettings(
            server.model_id or path.stem,
            defaults,
            keys,
            server.max_body,
            origins=origins,
            reads_at_once=True,
        ),
        Listening(server.host, server.port, server.drain),
        say,
    )
    if stopped is not None:
        raise SystemExit(128 + stopped)


def _text(path: Path | None) -> str | None:
    """The text of a file. Raises UsageError where it cannot be read."""
    if path is None:
        return None
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}; name another file") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is no UTF-8 at byte {error.start}; convert it") from None


def _template(path: Path | None) -> str | None:
    """The template in a file. Raises UsageError where it is no template."""
    from jinja2 import TemplateError

    from workbench.server.render import compiled

    text = _text(path)
    if text is not None:
        try:
            compiled(text)
        except (TemplateError, RecursionError) as error:
            line = getattr(error, "lineno", None)
            where = f"{path} line {line}" if line else f"{path}"
            raise UsageError(f"{where} is no chat template: {error}; mend it") from None
    return text


def _origin(text: str) -> str:
    """An origin as browsers write it. Raises UsageError for anything else."""
    if text != "*" and not re.fullmatch(r"https?://[^/\s?#@]+", text):
        raise UsageError(f"--cors-origin {text!r} is no origin; write it as https://chat.example")
    return text.lower()


def _keys(path: Path | None) -> tuple[bytes, ...]:
    """The API keys in a file. Raises UsageError where there are none."""
    text = _text(path)
    if text is None:
        return ()
    lines = map(str.strip, text.splitlines())
    keys = tuple(line.encode() for line in lines if line and not line.startswith("#"))
    if not keys:
        raise UsageError(f"{path} has no API key; write one a line")
    return keys
