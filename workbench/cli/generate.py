"""Commands that compute tokens, or show what computing one takes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts.validators import Number

from workbench.cli import flags as f
from workbench.cli.common import app, as_typed, load, parse_ids, say, say_replays, wrapped
from workbench.common.errors import Kept, UsageError
from workbench.common.output import check_extension, check_writable, writing
from workbench.common.progress import bar
from workbench.common.sizes import counted
from workbench.config import BASELINE

if TYPE_CHECKING:
    from workbench.engine.cache.room import Room
    from workbench.engine.load import Loaded
    from workbench.program.commands import Program, Replay


@app.command
def run(
    *,
    model: f.ModelPath,
    prompt: Annotated[str | None, f.flag("text to continue", "--prompt -p")] = None,
    tokens: f.Ids = None,
    n_predict: Annotated[
        f.Whole,
        f.flag(
            "tokens to make; -1 or -2: until the text ends or the context is full",
            "--n-predict --predict -n",
            validator=Number(gte=-2),
        ),
    ] = 32,
    temperature: Annotated[
        float, f.flag("0: always the likeliest token", "--temperature --temp")
    ] = 0.0,
    top_k: Annotated[f.Whole, f.flag("draw among so many of the likeliest; 0: all")] = 40,
    top_p: Annotated[float, f.flag("draw among the likeliest of this total")] = 0.95,
    min_p: Annotated[
        float, f.flag("draw among those with this share of the largest probability; 0: all")
    ] = 0.0,
    seed: f.Seed = 0,
    config: f.EngineFlags = f.DEFAULT_CONFIG,
    toggles: f.ToggleFlags = f.DEFAULT_TOGGLES,
) -> None:
    """Continue a prompt, or token ids.

    Text appears as it is made; with --tokens ids are printed."""
    from workbench.engine.batch import check_prompt
    from workbench.engine.generation import CONTEXT_FULL
    from workbench.model.sampler import Sampling

    ids = None if tokens is None else parse_ids(tokens)
    prompt = None if prompt is None else as_typed("-p", prompt)
    sampling = Sampling(temperature, top_k, top_p, min_p)
    if (prompt is None) == (ids is None):
        raise UsageError("give either a prompt (-p) or token ids (--tokens)")

    def check(opened: Loaded, room: Room) -> None:
        given = opened.tokenizer.encode(str(prompt)) if ids is None else ids
        check_prompt(given, opened.model.n_vocab, room)

    with load(model, config, toggles, check=check) as engine:
        made = engine.generate(
            prompt,
            tokens=ids,
            max_tokens=None if n_predict < 0 else n_predict,
            sampling=sampling,
            seed=seed,
            on_text=None if prompt is None else lambda s: print(s, end="", flush=True),
        )
        print("" if prompt is not None else ",".join(map(str, made.tokens)), flush=True)
        say(
            f"prompt {made.prefill_us / 1e3:.1f} ms; {len(made.tokens)} tokens, "
            f"{made.tokens_per_second:.1f} t/s; "
            f"{counted(engine.counters['programs_built'], 'program')} built, "
            f"{engine.counters['programs_reused']} reused{engine.steps.programs.refusals}"
        )
        say(f"the host's us a step: {engine.phases().words}")
        say_replays(engine.counters)
    if made.stopped == CONTEXT_FULL:
        say(engine.cache.room.is_full)
    if made.interrupted:
        raise Kept if made.tokens else KeyboardInterrupt


@app.command
def logits(
    *,
    model: f.ModelPath,
    tokens: Annotated[str, f.flag("token ids, as 1,2,3")],
    out: Annotated[Path, f.flag("file to write, .npy")],
    config: f.EngineFlags = f.DEFAULT_CONFIG,
    toggles: f.ToggleFlags = f.DEFAULT_TOGGLES,
) -> None:
    """Write the logits of every token to a file.

    float32, a row for each token, as wide as the vocabulary. Rows that are not finite are written
    too; a note on stderr names the first, and its cause.
    """
    import numpy as np

    from workbench.engine.batch import check_prompt
    from workbench.engine.finite import first_bad_row, not_finite

    ids = parse_ids(tokens)
    check_extension(out, ".npy")
    check_writable(out)

    def check(opened: Loaded, room: Room) -> None:
        check_prompt(ids, opened.model.n_vocab, room)

    with load(model, config, toggles, check=check) as engine:
        with bar("logits", len(ids), "tokens") as left:
            rows = engine.prefill(ids, outputs="all", left=left)
        bad = first_bad_row(rows)
        if bad is not None:  # written all the same, to be looked at
            say(f"note: {not_finite(engine.model, bad)}")
    with writing(out) as file:
        np.save(file, rows)
    say(f"wrote {rows.shape[0]} x {rows.shape[1]} float32 to {out}")


@app.command
def program(
    *,
    model: f.ModelPath,
    n_tokens: Annotated[f.Whole, f.flag("tokens of the step", validator=f.AT_LEAST_1)] = 1,
    n_past: Annotated[f.Whole, f.flag("tokens cached before it", validator=f.AT_LEAST_0)] = 0,
    as_json: f.AsJson = False,
    config: f.EngineFlags = f.DEFAULT_CONFIG,
    toggles: f.ToggleFlags = f.DEFAULT_TOGGLES,
) -> None:
    """Print the program of one step: its pattern and counts.

    The counts are of waits, copies, launches and their like in the step. What has no letter: all
    outside of its splits, as results that come to the host after the last one, and the records and
    stream waits that order the streams of a split."""
    from workbench.engine.batch import step_shape
    from workbench.engine.cache.growth import Growth
    from workbench.engine.cache.room import Room
    from workbench.program.as_json import program_as_json
    from workbench.program.commands import Replay
    from workbench.program.letters import legend

    if config.n_ctx:  # else the model says how much there is
        growth = Growth(config.n_kv_pad, config.n_ctx)
        # what no layout has room for is refused before a model is opened
        step_shape(n_tokens, 1, n_past, config.n_ubatch, growth, Room(config.n_ctx))
    with load(model, config, toggles, start=BASELINE, computes=False) as engine:
        made = engine.program(n_tokens, 1, n_past)
    if as_json:
        print(json.dumps(program_as_json(made), indent=1))
        return
    print(f"pattern   {made.pattern()}")
    print(f"folded    {(folded := made.pattern(fold=True))}")
    print("\n".join(wrapped(f"letters   {legend(folded)}", 10)))
    lettered = made.counts(lettered=True)
    for name, n in made.counts().items():
        fewer = f"  ({n - lettered[name]} without a letter)" if n > lettered[name] else ""
        print(f"{name:<15}{n:>10}{fewer}")
    for at, command in enumerate(made.commands):
        if isinstance(command, Replay):
            print(f"{f'plan #{at}':<15}{_in_words(command, made)}")


def _in_words(replay: Replay, program: Program) -> str:
    """The contents of a plan, as `6 copies, 35 launches on embedded:0`."""
    kinds = Counter(part.kind for part in replay.parts)
    said = [f"{n} {kind if n == 1 else _PLURALS[kind]}" for kind, n in kinds.items()]
    streams = dict.fromkeys(s for s in [replay.stream, *(p.stream for p in replay.parts)] if s)
    on = ", ".join(stream.describe(program.backends) for stream in streams)
    return f"{', '.join(said)} on {on}"


_PLURALS = {"copy": "copies", "launch": "launches", "record": "records", "wait": "waits"}
