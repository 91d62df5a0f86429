"""What kernels and decode are meant to reach on one H100, and whether the recorded runs do.

`python -m data.measure.targets [DIR]` prints the table that README has. A target has a part for
each model, type or size it is about; one that is missed is shown as missed, one without a run as
not measured. The numbers of llama.cpp that some are held against are its best on the same kind of
card (one H100 80GB HBM3, driver 580, 8 repetitions, random weights of the same shapes).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from data.measure import binds
from data.measure import recorded as figures
from data.measure.binds import Bind
from data.measure.recorded import (
    BATCHED,
    LARGE,
    NOT_MEASURED,
    SCORED,
    SMALL,
    TYPES,
    Recorded,
)
from workbench.bench.bounds import FEW
from workbench.report.tables import markdown


class Part(NamedTuple):
    """One of the things a target is about; value: None where it was not measured."""

    label: str
    value: str | None = None
    met: bool = False


class Target(NamedTuple):
    what: str
    parts: tuple[Part, ...]

    @property
    def measured(self) -> str:
        found = [f"{p.label} {p.value}".strip() for p in self.parts if p.value is not None]
        return ", ".join(found) or NOT_MEASURED

    @property
    def met(self) -> str:
        """`yes`, or which parts are missed and which were not measured."""
        missed = [p.label for p in self.parts if p.value is not None and not p.met]
        absent = [p.label for p in self.parts if p.value is None]
        if len(absent) == len(self.parts):
            return NOT_MEASURED
        said = [f"{word}: {', '.join(filter(None, of))}".rstrip(": ")
                for word, of in (("**missed**", missed), (NOT_MEASURED, absent)) if of]  # fmt: skip
        return "; ".join(said) or "yes"


def targets(recorded: Recorded) -> list[Target]:
    """Every target, computed from the run folders."""
    return [target for group in GROUPS for target in group(recorded)]


def _of(what: str, labels: Iterable[str], part: Callable[[str], tuple[str, bool] | None]) -> Target:
    """part(label): value and whether it is met, or None."""
    return Target(what, tuple(Part(label, *(part(label) or ())) for label in labels))


def at_least(share: float, least: float, where: str = "") -> tuple[str, bool]:
    """A share as text, and whether it reaches `least`; rounding never lifts it there."""
    return f"{100 * share:.1f} %" + (f" ({where})" if where else ""), share >= least


# Share of the read bandwidth, batch 1: shapes, way to launch, types, the least.
KERNELS = (
    ("gate/up and head of 8B, plain", LARGE, "plain", TYPES[:4], 0.88),
    ("gate/up and head of 8B, plain", LARGE, "plain", TYPES[4:], 0.80),
    ("gate/up and head of 8B, `pdl`", LARGE, "pdl", TYPES[:4], 0.88),
    ("gate/up and head of 8B, `pdl`", LARGE, "pdl", TYPES[4:], 0.80),
    ("qkv, o and down of 8B, plain", SMALL, "plain", TYPES, 0.55),
    ("qkv, o and down of 8B, `pdl`", SMALL, "pdl", TYPES, 0.70),
)


def kernels(recorded: Recorded) -> Iterator[Target]:
    rows = figures.kernel_rows(recorded.run("kernels"))
    for what, shapes, launch, types, least in KERNELS:

        def part(
            dtype: str,
            shapes: tuple[str, ...] = shapes,
            launch: str = launch,
            least: float = least,
        ) -> tuple[str, bool] | None:
            found = figures.worst_share(rows, dtype, shapes, launch)
            return at_least(found[0], least, found[1][3:]) if found else None

        yield _of(f"{what}: {100 * least:.0f} % of the read bandwidth", types, part)


# tg128, everything on but plans: share of the read bandwidth; llama.cpp's best t/s
DECODE = {
    "llama-3-8b-f16": (0.86, 169.5),
    "llama-3-8b-q8_0": (0.70, 236.1),
    "llama-3-8b-q4_0": (0.60, 325.1),
    "llama-3.2-1b-bf16": (0.62, 700.2),
    "qwen3-4b-q4_k_m": (0.45, 346.1),
}
MOST_LAUNCHES = {"llama": 7, "qwen3": 8}  # of a layer, by architecture


def kernel_binds(recorded: Recorded) -> Iterator[Bind]:
    for _, shapes, launch, types, least in KERNELS:
        yield from binds.of_products(recorded, types, shapes, launch, least)


def decode(recorded: Recorded) -> Iterator[Target]:
    for name, (least, _) in DECODE.items():
        found = figures.decode(recorded, name)
        part = Part("")
        if found is not None:
            said = f"{100 * found.share:.1f} %, {found.tg:.1f} t/s"
            part = Part("", said, found.share >= least)
        yield Target(f"tg128 {name}: {100 * least:.0f} % of the read bandwidth", (part,))


def decode_binds(recorded: Recorded) -> Iterator[Bind]:
    for name, (least, _) in DECODE.items():
        found = figures.decode(recorded, name)
        if found is not None and found.share < least:
            said = f"{100 * found.share:.1f} %"
            yield binds.of_step(recorded, f"decode-{name}", name, 1, said)


def decode_beside_llama_cpp(recorded: Recorded) -> Iterator[Target]:
    def part(name: str) -> tuple[str, bool] | None:
        found, theirs = figures.decode(recorded, name), DECODE[name][1]
        return (f"{found.tg:.1f} ({theirs})", found.tg > theirs) if found else None

    yield _of("tg128: more t/s than llama.cpp's best", DECODE, part)


def launches(recorded: Recorded) -> Iterator[Target]:
    def part(name: str) -> tuple[str, bool] | None:
        found = figures.decode(recorded, name)
        if found is None:
            return None
        n = found.launches // found.n_layer  # the rest are the embedding, last norm and head
        return str(n), n <= MOST_LAUNCHES[found.run.run["model"]["architecture"]]

    yield _of("launches of a layer: 7 for llama, 8 for qwen3", DECODE, part)


# pp512: t/s at least, llama.cpp's times what
PROMPTS = {"llama-3-8b-f16": (24_100, 1.0), "llama-3-8b-q4_0": (11_200, 1.3)}


def prompts(recorded: Recorded) -> Iterator[Target]:
    for name, (theirs, times) in PROMPTS.items():
        found, part = figures.decode(recorded, name), Part("")
        if found is not None:
            share = figures.percent(found.product_share)
            more = f", {share} % of a large product's rate" if share else ""
            part = Part("", f"{found.pp:.0f} t/s{more}", found.pp >= theirs * times)
        yield Target(f"pp512 {name}: {theirs * times:.0f} t/s, {times:g}x llama.cpp's", (part,))


LEAST_OF_BOUND = 0.5


def batches(recorded: Recorded) -> Iterator[Target]:
    def step(name: str) -> tuple[str, bool] | None:
        steps = figures.batch_steps(recorded, name)
        if not steps:
            return None
        worst = min(steps, key=lambda step: step.share)
        return at_least(worst.share, LEAST_OF_BOUND, f"{worst.n_tokens} tokens")

    def product(dtype: str) -> tuple[str, bool] | None:
        found = figures.worst_batch(recorded.run("kernels-batches"), dtype)
        return at_least(found[0], LEAST_OF_BOUND, f"{found[1][3:]}, {found[2]}") if found else None

    bound = "half of the bandwidth or tensor-core bound"
    yield _of(f"steps of 9 to 128 tokens: {bound}", BATCHED, step)
    yield _of(f"products of 9 to 128 tokens, each of 8B: {bound}", TYPES, product)


def batch_binds(recorded: Recorded) -> Iterator[Bind]:
    for name in BATCHED:
        steps = figures.batch_steps(recorded, name)
        missed = [step for step in steps if step.share < LEAST_OF_BOUND]
        if missed:
            said = ", ".join(f"{step.n_tokens} tokens {100 * step.share:.1f} %" for step in missed)
            worst = min(missed, key=lambda step: step.share)
            yield binds.of_step(recorded, f"batches-{name}", name, worst.n_tokens, said)
    run = recorded.run("kernels-batches")
    for dtype in TYPES:
        found = figures.worst_batch(run, dtype)
        if found is not None and found[0] < LEAST_OF_BOUND:
            yield from binds.of_batched_product(recorded, dtype, *found)


MOST_DEPTH, MOST_LOAD_S = 1.35, 10.0


def depth_and_load(recorded: Recorded) -> Iterator[Target]:
    ratio, seconds = figures.depth_ratio(recorded), recorded.load_seconds()
    part = Part("") if ratio is None else Part("", f"{ratio:.2f} times", ratio <= MOST_DEPTH)
    yield Target(
        f"depth 16384 of llama-3-8b: adds {MOST_DEPTH} times what reading its cache takes", (part,)
    )
    part = Part("")
    if seconds:
        said = ", ".join(f"{s:.2f}" for s in seconds)
        part = Part("", f"{said} s", max(seconds) < MOST_LOAD_S)
    yield Target(f"llama-3-8b Q4_0 ready from the page cache in {MOST_LOAD_S:.0f} s", (part,))


# What computes so many tokens at once.
WAYS: dict[str, Callable[[int], bool]] = {
    "prefill kernels": lambda n_ubatch: n_ubatch > FEW,
    "decode kernels": lambda n_ubatch: n_ubatch == 1,
}


def answers(recorded: Recorded) -> Iterator[Target]:
    for way, belongs in WAYS.items():

        def part(quant: str, belongs: Callable[[int], bool] = belongs) -> tuple[str, bool] | None:
            """The worst of the sizes that belong to a way."""
            found = [a for a in figures.scored(recorded, quant) if belongs(a.n_ubatch)]
            if not found:
                return None
            pairs = [(a.kl, a.nmse) for a in found if a.kl is not None and a.nmse is not None]
            if len(pairs) < len(found):
                return "no number", False
            kl, nmse = (max(values) for values in zip(*pairs, strict=True))
            return f"{kl:.0e}/{nmse:.0e}", all(a.holds for a in found)

        what = f"{way} against the float path, 2,048 tokens: mean KL / NMSE in bounds"
        yield _of(what, SCORED, part)


LEAST_OF_PEER = 0.9
CPU_MODELS = ("llama-3.2-1b Q8_0", "llama-3.2-1b Q4_0")


def on_a_cpu(recorded: Recorded) -> Iterator[Target]:
    """Decode beside llama.cpp's CPU backend, from `make peer`."""
    found = recorded.alone("peer-cpu") or {}
    ratios = {f"{row['preset']} {row['quant']}": row["ratio"] for row in found.get("decode", ())}

    def part(name: str) -> tuple[str, bool] | None:
        ratio = ratios.get(name)
        return None if ratio is None else (f"{100 * ratio:.0f} %", ratio >= LEAST_OF_PEER)

    yield _of(f"decode on two CPU threads: {100 * LEAST_OF_PEER:.0f} % of llama.cpp's", CPU_MODELS,
              part)  # fmt: skip


MOST_CHECKS_S = 480
TOOLS = ("memcheck", "initcheck", "racecheck", "synccheck", "repetitions")


def checks(recorded: Recorded) -> Iterator[Target]:
    """What compute-sanitizer and the poisoned repetitions found."""
    found, part = recorded.alone("gpu-sanitizer"), Part("")
    if found is not None:
        runs, seconds = found["runs"], found["duration_s"]
        clean = all(
            tool in runs and runs[tool]["errors"] == runs[tool]["exit"] == 0 < runs[tool]["tests"]
            for tool in TOOLS
        )
        told = (f"{tool} {runs[tool]['errors']}" if tool in runs else f"{tool} not run"
                for tool in TOOLS)  # fmt: skip
        part = Part("", f"{', '.join(told)}; {seconds:.0f} s", clean and seconds < MOST_CHECKS_S)
    what = f"errors that compute-sanitizer and poisoned repetitions find in {MOST_CHECKS_S} s: none"
    yield Target(what, (part,))


GROUPS: tuple[Callable[[Recorded], Iterator[Target]], ...] = (
    kernels, decode, decode_beside_llama_cpp, launches, prompts, batches, depth_and_load, answers,
    checks, on_a_cpu,
)  # fmt: skip

BINDS: dict[str, Callable[[Recorded], Iterator[Bind]]] = {
    "products of one token": kernel_binds,
    "decode": decode_binds,
    "9 to 128 tokens, shares of the bound": batch_binds,
}


def binds_lists(recorded: Recorded) -> str:
    """For each missed target of the kernels and of steps what binds, a list for each kind; empty
    where none is missed."""
    parts = []
    for title, group in BINDS.items():
        lines = [line for bind in group(recorded) for line in _item(bind)]
        parts += [f"What binds, {title}:", "\n".join(lines)] if lines else []
    told = binds.origins(recorded) if parts else []
    return "\n\n".join([*parts, *([f"{'; '.join(told)}."] if told else [])])


def _item(bind: Bind) -> Iterator[str]:
    first, *rest = bind.binds
    yield f"- **{bind.missed}: {bind.measured}**. {first[:1].upper()}{first[1:]}"
    yield from (f"  - {statement}" for statement in rest)


def table(folder: Path, device: str = "cuda") -> str:
    """Target, measured, met, as Markdown; below it what binds where one is missed, and the runs
    that count for nothing, and why."""
    recorded = Recorded(folder, device)
    rows = [
        {"target": target.what, "measured": target.measured, "met": target.met}
        for target in targets(recorded)
    ]
    parts = [markdown(pd.DataFrame(rows)), binds_lists(recorded), *recorded.left_out()]
    return "\n\n".join(part for part in parts if part)


if __name__ == "__main__":
    print(table(Path(sys.argv[1] if len(sys.argv) > 1 else "data/results"), *sys.argv[2:3]))
