"""What kernels and decode are meant to reach on one H100, and whether the recorded runs do.

`python -m data.measure.targets [DIR]` prints the table of the results page. A target is a row of
`TARGETS`: a figure for each model, type or size it is about, and its bound. One that is missed is
shown as missed, one without a run as not measured. The numbers of llama.cpp that some are held
against are its best on the same kind of card (one H100 80GB HBM3, driver 580, 8 repetitions, random
weights of the same shapes).
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from data.measure import binds
from data.measure import recorded as figures
from data.measure.binds import Bind
from data.measure.matrix import BATCHED, DECODED, SCORED
from data.measure.recorded import LARGE, NOT_MEASURED, SMALL, TYPES, Recorded, Share
from data.measure.tables import Line, Part, Table, block
from workbench.bench.bounds import FEW


class Figure(NamedTuple):
    """value: what the bound is held against; said: how the table says it."""

    value: float
    said: str


class Verdict(NamedTuple):
    """One of the things a target is about; value: None where it was not measured."""

    label: str
    value: str | None = None
    met: bool = False


class Target(NamedTuple):
    """labels: the models, types or sizes it is about, to the bound of each; a single one is not
    named in the table. figure: what was measured of a label, None where it was not. meets: figure
    and bound, whether the target is met."""

    what: str
    bounds: Mapping[str, float]
    figure: Callable[[Recorded, str], Figure | None]
    meets: Callable[[float, float], bool] = operator.ge

    def verdicts(self, recorded: Recorded) -> list[Verdict]:
        """What was measured of each label, and whether it is enough."""
        found = {label: self.figure(recorded, label) for label in self.bounds}
        names = dict.fromkeys(self.bounds, "") if len(self.bounds) == 1 else {}
        return [
            Verdict(names.get(label, label))
            if figure is None
            else Verdict(
                names.get(label, label), figure.said,
                bool(self.meets(figure.value, self.bounds[label])),
            )
            for label, figure in found.items()
        ]  # fmt: skip


class Result(NamedTuple):
    """A target and its verdicts, in words."""

    what: str
    verdicts: tuple[Verdict, ...]

    @property
    def measured(self) -> str:
        found = [f"{v.label} {v.value}".strip() for v in self.verdicts if v.value is not None]
        return ", ".join(found) or NOT_MEASURED

    @property
    def met(self) -> str:
        """`yes`, or which parts are missed and which were not measured."""
        missed = [v.label for v in self.verdicts if v.value is not None and not v.met]
        absent = [v.label for v in self.verdicts if v.value is None]
        if len(absent) == len(self.verdicts):
            return NOT_MEASURED
        said = [f"{word}: {', '.join(filter(None, of))}".rstrip(": ")
                for word, of in (("**missed**", missed), (NOT_MEASURED, absent)) if of]  # fmt: skip
        return "; ".join(said) or "yes"


def targets(recorded: Recorded) -> list[Result]:
    """Every target, held against the run folders."""
    return [Result(target.what, tuple(target.verdicts(recorded))) for target in TARGETS]


# figures ------------------------------------------------------------------------------------------


def at_least(share: float, where: str = "") -> Figure:
    """A share as text; rounding never lifts it over its bound."""
    return Figure(share, f"{Share(share):.1f} %" + (f" ({where})" if where else ""))


def kernel(recorded: Recorded, dtype: str, shapes: tuple[str, ...], launch: str) -> Figure | None:
    """The least share of the read bandwidth, one token."""
    found = figures.worst_share(figures.kernel_rows(recorded.run("kernels")), dtype, shapes, launch)
    return at_least(found[0], found[1][3:]) if found else None


def decode(recorded: Recorded, name: str) -> Figure | None:
    found = figures.decode(recorded, name)
    return found and Figure(found.share, f"{found.share:.1f} %, {found.tg:.1f} t/s")


def beside_llama_cpp(recorded: Recorded, name: str) -> Figure | None:
    found = figures.decode(recorded, name)
    return found and Figure(found.tg, f"{found.tg:.1f} ({LLAMA_CPP[name]})")


def launches(recorded: Recorded, name: str) -> Figure | None:
    """Of a layer; the rest are the embedding, last norm and head."""
    found = figures.decode(recorded, name)
    n = found.launches // found.n_layer if found else 0
    return Figure(n, str(n)) if found else None


def prompt(recorded: Recorded, name: str) -> Figure | None:
    found = figures.decode(recorded, name)
    if found is None:
        return None
    share = found.product_share
    more = "" if share is None else f", {share:.1f} % of a large product's rate"
    return Figure(found.pp, f"{found.pp:.0f} t/s{more}")


def worst_step(recorded: Recorded, name: str) -> Figure | None:
    steps = figures.batch_steps(recorded, name)
    worst = min(steps, key=lambda step: step.share, default=None)
    return worst and at_least(worst.share, f"{worst.n_tokens} tokens")


def worst_product(recorded: Recorded, dtype: str) -> Figure | None:
    found = figures.worst_batch(recorded.run("kernels-batches"), dtype)
    return at_least(found[0], f"{found[1][3:]}, {found[2]}") if found else None


def depth(recorded: Recorded, _: str) -> Figure | None:
    ratio = figures.depth_ratio(recorded)
    return None if ratio is None else Figure(ratio, f"{ratio:.2f} times")


def load(recorded: Recorded, name: str) -> Figure | None:
    seconds = (recorded.file(f"load-{name}") or {}).get("seconds")
    said = ", ".join(f"{s:.2f}" for s in seconds or ())
    return Figure(max(seconds), f"{said} s") if seconds else None


def answer(recorded: Recorded, quant: str, belongs: Callable[[int], bool]) -> Figure | None:
    """The worst of the sizes that belong to a way, in times of its bounds."""
    found = [a for a in figures.scored(recorded, quant) if belongs(a.n_ubatch)]
    pairs = [(a.kl, a.nmse) for a in found if a.kl is not None and a.nmse is not None]
    if len(pairs) < len(found):
        return Figure(math.inf, "no number")
    if not found:
        return None
    kl, nmse = (max(values) for values in zip(*pairs, strict=True))
    return Figure(0.0 if all(a.holds for a in found) else math.inf, f"{kl:.0e}/{nmse:.0e}")


TOOLS = ("memcheck", "initcheck", "racecheck", "synccheck", "repetitions")


def checks(recorded: Recorded, _: str) -> Figure | None:
    """What compute-sanitizer and the poisoned repetitions found: their seconds, where each tool ran
    and found nothing."""
    found = recorded.alone("gpu-sanitizer")
    if found is None:
        return None
    runs, seconds = found["runs"], found["duration_s"]
    clean = all(
        tool in runs and runs[tool]["errors"] == runs[tool]["exit"] == 0 < runs[tool]["tests"]
        for tool in TOOLS
    )
    told = (f"{tool} {runs[tool]['errors']}" if tool in runs else f"{tool} not run"
            for tool in TOOLS)  # fmt: skip
    return Figure(seconds if clean else math.inf, f"{', '.join(told)}; {seconds:.0f} s")


def on_a_cpu(recorded: Recorded, name: str) -> Figure | None:
    """Decode beside llama.cpp's CPU backend, from `make peer`."""
    rows = (recorded.alone("peer-cpu") or {}).get("decode", ())
    ratios = {f"{row['preset']} {row['quant']}": row["ratio"] for row in rows}
    return Figure(ratios[name], f"{100 * ratios[name]:.0f} %") if name in ratios else None


# the targets --------------------------------------------------------------------------------------

# Share of the read bandwidth, batch 1: shapes, way to launch, types, the least.
KERNELS = (
    ("gate/up and head of 8B, plain", LARGE, "plain", TYPES[:4], 0.88),
    ("gate/up and head of 8B, plain", LARGE, "plain", TYPES[4:], 0.80),
    ("gate/up and head of 8B, `pdl`", LARGE, "pdl", TYPES[:4], 0.88),
    ("gate/up and head of 8B, `pdl`", LARGE, "pdl", TYPES[4:], 0.80),
    ("qkv, o and down of 8B, plain", SMALL, "plain", TYPES, 0.55),
    ("qkv, o and down of 8B, `pdl`", SMALL, "pdl", TYPES, 0.70),
)
# tg128, everything on but plans: share of the read bandwidth; llama.cpp's best t/s
DECODE = dict(zip(DECODED, (0.86, 0.70, 0.60, 0.62, 0.45), strict=True))
LLAMA_CPP = dict(zip(DECODED, (169.5, 236.1, 325.1, 700.2, 346.1), strict=True))
MOST_LAUNCHES = {name: 8 if name.startswith("qwen3") else 7 for name in DECODED}  # of a layer
# pp512: t/s of llama.cpp, its times what
PROMPTS = {"llama-3-8b-f16": (24_100, 1.0), "llama-3-8b-q4_0": (11_200, 1.3)}
LEAST_OF_BOUND = 0.5
MOST_DEPTH, MOST_LOAD_S, MOST_CHECKS_S = 1.35, 10.0, 480
# What computes so many tokens at once.
WAYS: dict[str, Callable[[int], bool]] = {
    "prefill kernels": lambda n_ubatch: n_ubatch > FEW,
    "decode kernels": lambda n_ubatch: n_ubatch == 1,
}
LEAST_OF_PEER = 0.9
CPU_MODELS = ("llama-3.2-1b Q8_0", "llama-3.2-1b Q4_0")

HALF = "half of the bandwidth or tensor-core bound"
TARGETS: tuple[Target, ...] = (
    *(Target(f"{what}: {100 * least:.0f} % of the read bandwidth", dict.fromkeys(types, least),
             partial(kernel, shapes=shapes, launch=launch))
      for what, shapes, launch, types, least in KERNELS),
    *(Target(f"tg128 {name}: {100 * least:.0f} % of the read bandwidth", {name: least}, decode)
      for name, least in DECODE.items()),
    Target("tg128: more t/s than llama.cpp's best", LLAMA_CPP, beside_llama_cpp, operator.gt),
    Target("launches of a layer: 7 for llama, 8 for qwen3", MOST_LAUNCHES, launches, operator.le),
    *(Target(f"pp512 {name}: {theirs * times:.0f} t/s, {times:g}x llama.cpp's",
             {name: theirs * times}, prompt)
      for name, (theirs, times) in PROMPTS.items()),
    Target(f"steps of 9 to 128 tokens: {HALF}", dict.fromkeys(BATCHED, LEAST_OF_BOUND),
           worst_step),
    Target(f"products of 9 to 128 tokens, each of 8B: {HALF}",
           dict.fromkeys(TYPES, LEAST_OF_BOUND), worst_product),
    Target(f"depth 16384 of llama-3-8b: adds {MOST_DEPTH} times what reading its cache takes",
           {"llama-3-8b-q4_0": MOST_DEPTH}, depth, operator.le),
    Target(f"llama-3-8b Q4_0 ready from the page cache in {MOST_LOAD_S:.0f} s",
           {"llama-3-8b-q4_0": MOST_LOAD_S}, load, operator.lt),
    *(Target(f"{way} against the float path, 2,048 tokens: mean KL / NMSE in bounds",
             dict.fromkeys(SCORED, 1.0), partial(answer, belongs=belongs), operator.le)
      for way, belongs in WAYS.items()),
    Target(f"errors that compute-sanitizer and poisoned repetitions find in {MOST_CHECKS_S} s: "
           "none", {"gpu-sanitizer": MOST_CHECKS_S}, checks, operator.lt),
    Target(f"decode on two CPU threads: {100 * LEAST_OF_PEER:.0f} % of llama.cpp's",
           dict.fromkeys(CPU_MODELS, LEAST_OF_PEER), on_a_cpu),
)  # fmt: skip


# what binds where one is missed -------------------------------------------------------------------


def kernel_binds(recorded: Recorded) -> Iterator[Bind]:
    for _, shapes, launch, types, least in KERNELS:
        yield from binds.of_products(recorded, types, shapes, launch, least)


def decode_binds(recorded: Recorded) -> Iterator[Bind]:
    for name, least in DECODE.items():
        found = figures.decode(recorded, name)
        if found is not None and found.share < least:
            yield binds.of_step(recorded, f"decode-{name}", name, 1, f"{found.share:.1f} %")


def batch_binds(recorded: Recorded) -> Iterator[Bind]:
    for name in BATCHED:
        steps = figures.batch_steps(recorded, name)
        missed = [step for step in steps if step.share < LEAST_OF_BOUND]
        if missed:
            said = ", ".join(f"{step.n_tokens} tokens {step.share:.1f} %" for step in missed)
            worst = min(missed, key=lambda step: step.share)
            yield binds.of_step(recorded, f"batches-{name}", name, worst.n_tokens, said)
    run = recorded.run("kernels-batches")
    for dtype in TYPES:
        found = figures.worst_batch(run, dtype)
        if found is not None and found[0] < LEAST_OF_BOUND:
            yield from binds.of_batched_product(recorded, dtype, *found)


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


def _lines(recorded: Recorded) -> Iterator[Line]:
    for found in targets(recorded):
        yield Line({"target": found.what, "measured": found.measured, "met": found.met})


# Below the table: what binds where one is missed; the runs that count for nothing, and why.
BLOCKS: dict[str, list[Part]] = {
    "targets-cuda": [
        Table("Targets", _lines), binds_lists, lambda recorded: "\n\n".join(recorded.left_out()),
    ]
}  # fmt: skip

if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "data/results")
    print(block(BLOCKS["targets-cuda"], Recorded(folder, *sys.argv[2:3])))
