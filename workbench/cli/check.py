"""The command that proves a program free of races, and says which of its waits are superfluous."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

from workbench.cli import flags as f
from workbench.cli.common import app, load
from workbench.config import BASELINE

RACES = 3  # exit status where commands race


@app.command
def check(
    *,
    model: f.ModelPath,
    n_tokens: Annotated[
        f.Whole, f.flag("tokens of a prompt; 1: a decode", validator=f.AT_LEAST_1)
    ] = 1,
    n_decoded: Annotated[
        f.Whole, f.flag("single tokens after each prompt", validator=f.AT_LEAST_0)
    ] = 0,
    as_json: f.AsJson = False,
    config: f.EngineFlags = f.DEFAULT_CONFIG,
    toggles: f.ToggleFlags = f.DEFAULT_TOGGLES,
) -> None:
    """Prove steps free of races; list superfluous waits.

    The steps are a decode, or prompts with tokens after each. Nothing is computed. Orderings that
    an engine refuses without --unsafe can be checked too. Exit status 3 where commands race."""
    from workbench.benchmarks.proof import prove
    from workbench.engine.cache.room import Room

    if config.n_ctx:  # else the model says how much there is
        Room(config.n_ctx).check(0, n_tokens + n_decoded)
    unsafe = dataclasses.replace(config, unsafe=True)
    with load(model, unsafe, toggles, start=BASELINE, computes=False) as engine:
        proof, period = prove(engine, n_tokens, n_decoded), engine.period
    cycle, found = proof.cycle, proof.found
    if as_json:
        patterns = [program.pattern() for program in cycle]
        print(json.dumps({"patterns": patterns, **found.to_dict()}, indent=1))
    else:
        n_ubatches = -(-n_tokens // config.n_ubatch)
        print("\n".join(proof.lines()))
        if 1 < n_ubatches <= period and not cycle[0].waited:  # a train
            print(
                f"note         of prompts of {n_ubatches} ubatches; the next would overwrite what "
                f"the first used: ask for --n-tokens {period * config.n_ubatch + 1} or more"
            )
    if not found.safe:
        raise SystemExit(RACES)
