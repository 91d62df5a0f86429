"""Commands about model files."""

import json
from pathlib import Path
from typing import Annotated, Literal

from workbench.cli import flags as f
from workbench.cli.common import MODELS, model_app, say
from workbench.common.output import check_extension
from workbench.model.synth.shapes import PRESETS, QUANTS


@model_app.command
def synth(
    preset: Annotated[str, f.flag(f"shape: {', '.join(PRESETS)}")],
    quant: Annotated[str, f.flag(f"type of the weights: {', '.join(QUANTS)}")],
    /,
    out: Annotated[Path, f.flag("GGUF file to write", "--out")],
    *,
    head: Annotated[str | None, f.flag("type of the head alone")] = None,
    seed: f.Seed = 0,
    force: Annotated[bool, f.flag("write over a file that exists")] = False,
) -> None:
    """Write a model of a real shape with random weights."""
    from workbench.model.synth.models import write_model

    check_extension(out, ".gguf")
    say(f"wrote {write_model(preset, quant, out, head=head, seed=seed, force=force)}")


@model_app.command
def tiny(out: Annotated[Path, f.flag("folder to write them in", "--out")] = MODELS) -> None:
    """Write the tiny models that tests and notebooks use."""
    from workbench.model.synth.models import write_tiny_models

    say(f"{len(write_tiny_models(out))} tiny models in {out}")


@model_app.command
def inspect(
    file: Annotated[Path, f.flag("GGUF file")],
    /,
    *,
    as_json: f.AsJson = False,
    expand: Annotated[
        Literal["f16", "q8_0"], f.flag("what types without kernels become when loaded")
    ] = "f16",
    cache_type_k: Annotated[
        f.CachedAs, f.flag("type of K in the cache", "--cache-type-k -ctk")
    ] = "f16",
    cache_type_v: Annotated[
        f.CachedAs, f.flag("type of V in the cache", "--cache-type-v -ctv")
    ] = "f16",
) -> None:
    """Print shapes, types and sizes of a model file.

    Also what is expanded at load, and the bytes of weights and KV cache that a token reads."""
    from workbench.model.gguf.inspect import summary

    found = summary(file, expand, (cache_type_k, cache_type_v))
    print(json.dumps(found.to_dict(), indent=1) if as_json else "\n".join(found.lines()))
