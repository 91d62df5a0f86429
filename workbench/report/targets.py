"""What kernels and decode are meant to reach on one H100, and whether the recorded runs do.

`python -m workbench.report.targets [DIR]` prints the table that README has. A target has a part for
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

from workbench.bench.bounds import FEW
from workbench.report import binds
from workbench.report import recorded as figures
from workbench.report.binds import Bind
from workbench.report.recorded import LARGE, NOT_MEASURED, SCORED, SMALL, TYPES, Recorded
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
    ("gate/up and head of 8B", LARGE, "plain", TYPES[:4], 0.88),
    ("gate/up and head of 8B", LARGE, "plain", TYPES[4:], 0.80),
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
            yield binds.of_step(recorded, name, 1, f"{100 * found.share:.1f} %")


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
BATCHED = ("llama-3-8b-f16", "llama-3-8b-q8_0", "llama-3-8b-q4_0")


def batches(recorded: Recorded) -> Iterator[Target]:
    def step(name: str) -> tuple[str, bool] | None:
        shares = figures.batch_shares(recorded, name)
        if not shares:
            return None
        worst = min(shares, key=shares.__getitem__)
        return at_least(shares[worst], LEAST_OF_BOUND, f"{worst} tokens")

    def product(dtype: str) -> tuple[str, bool] | None:
        found = figures.worst_batch(recorded.run("kernels-batches"), dtype)
        return at_least(found[0], LEAST_OF_BOUND, f"{found[1][3:]}, {found[2]}") if found else None

    bound = "half of the bandwidth or tensor-core bound"
    yield _of(f"steps of 9 to 128 tokens: {bound}", BATCHED, step)
    yield _of(f"products of 9 to 128 tokens, each of 8B: {bound}", TYPES, product)


def batch_binds(recorded: Recorded) -> Iterator[Bind]:
    for name in BATCHED:
        shares = figures.batch_shares(recorded, name) or {}
        missed = {n: share for n, share in shares.items() if share < LEAST_OF_BOUND}
        if missed:
            said = ", ".join(f"{n}: {100 * share:.1f} %" for n, share in sorted(missed.items()))
            worst = min(missed, key=missed.__getitem__)
            yield binds.of_step(recorded, name, worst, said)
    run = recorded.run("kernels-batches")
    for dtype in TYPES:
        found = figures.worst_batch(run, dtype)
        if found is not None and found[0] < LEAST_OF_BOUND:
            yield from binds.of_batched_product(recorded, dtype, *found[1:])


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


GROUPS: tuple[Callable[[Recorded], Iterator[Target]], ...] = (
    kernels, decode, decode_beside_llama_cpp, launches, prompts, batches, depth_and_load, answers,
)  # fmt: skip

BINDS: tuple[Callable[[Recorded], Iterator[Bind]], ...] = (kernel_binds, decode_binds, batch_binds)


def binds_table(recorded: Recorded) -> str:
    """For each missed target of the kernels and of steps what binds; empty where none is missed."""
    rows = [bind._asdict() for group in BINDS for bind in group(recorded)]
    if not rows:
        return ""
    titles = {"missed": "missed", "measured": "measured", "binds": "what binds"}
    return markdown(pd.DataFrame(rows).rename(columns=titles))


def table(folder: Path, device: str = "cuda") -> str:
    """Target, measured, met, as Markdown; below it what binds where one is missed, and the runs
    that count for nothing, and why."""
    recorded = Recorded(folder, device)
    rows = [
        {"target": target.what, "measured": target.measured, "met": target.met}
        for target in targets(recorded)
    ]
    parts = [markdown(pd.DataFrame(rows)), binds_table(recorded), *recorded.left_out()]
    return "\n\n".join(part for part in parts if part)


if __name__ == "__main__":
    print(table(Path(sys.argv[1] if len(sys.argv) > 1 else "data/results"), *sys.argv[2:3]))
