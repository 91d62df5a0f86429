"""What kernels and decode are meant to reach on one GPU, and whether the recorded runs do.

`python -m data.measure.targets [DIR]` prints the table of the results page. A target is a row of
`TARGETS`: a figure and a bound for each of its models, types or sizes. A missed target is shown as
missed, and a target without a run as not measured. Some bounds are numbers of llama.cpp: its best
on the same kind of card (one H100 80GB HBM3, driver 580, 8 repetitions, random weights of the same
shapes). BESIDE is held against llama.cpp's best in the same run on the same card.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from data.measure import binds, peer, plan_tables
from data.measure import recorded as figures
from data.measure.binds import Bind
from data.measure.matrix import BATCHED, DECODED, PLANNED, SCORED
from data.measure.recorded import LARGE, NOT_MEASURED, SMALL, TYPES, Recorded, Share, decode
from data.measure.tables import Line, Part, Table, block
from workbench.benchmarks.scores.bounds import FEW
from workbench.config import Pdl

Values = Mapping[str, Any]  # the values of a figure, by name


class Target(NamedTuple):
    """A target.

    bounds: by model, type or size (labels); a single label is not named in the table.
    figure: the measured values for a label; None where it was not measured.
    said: a template for the table.
    key: the value that is held against the bound.
    meets: whether a value meets a bound.
    """

    what: str
    bounds: Mapping[str, float]
    figure: Callable[[Recorded, str], Values | None]
    said: str
    key: str = "share"
    meets: Callable[[float, float], bool] = operator.ge


class Result(NamedTuple):
    """A target held against the runs.

    found: by label, the measured figure and whether it meets the bound; None where it was not
        measured.
    """

    what: str
    found: Mapping[str, tuple[str, bool] | None]

    @property
    def _comma(self) -> str:
        """The text between labels; labels can have commas of their own."""
        return "; " if any("," in label for label in self.found) else ", "

    @property
    def measured(self) -> str:
        colon = ":" if self._comma != ", " else ""
        said = [f"{label}{colon} {of[0]}" if label else of[0]
                for label, of in self.found.items() if of]  # fmt: skip
        return self._comma.join(said) or NOT_MEASURED

    @property
    def met(self) -> str:
        """`yes`, or the labels that are missed and those that were not measured."""
        missed = [label for label, of in self.found.items() if of and not of[1]]
        absent = [label for label, of in self.found.items() if of is None]
        if len(absent) == len(self.found):
            return NOT_MEASURED
        said = [f"{word}: {self._comma.join(filter(None, of))}".rstrip(": ")
                for word, of in (("**missed**", missed), (NOT_MEASURED, absent)) if of]  # fmt: skip
        return "; ".join(said) or "yes"


def held(target: Target, recorded: Recorded) -> Result:
    """A target, held against the run folders."""
    found: dict[str, tuple[str, bool] | None] = {}
    for label, bound in target.bounds.items():
        values, name = target.figure(recorded, label), label if len(target.bounds) > 1 else ""
        said = target.said.format_map({"bound": bound, **values}) if values is not None else ""
        found[name] = (values and (said, bool(target.meets(values[target.key], bound)))) or None
    return Result(target.what, found)


def targets(recorded: Recorded) -> list[Result]:
    """Every target, held against the run folders."""
    return [held(target, recorded) for target in TARGETS]


def kernel(recorded: Recorded, dtype: str, shapes: Sequence[str], launch: str) -> Values | None:
    """The least share of the read bandwidth for one token."""
    found = figures.worst_share(recorded.run("kernels"), dtype, shapes, launch)
    return found and {"share": Share(found[0]), "where": found[1][3:]}


def worst_step(recorded: Recorded, name: str) -> Values | None:
    steps = figures.batch_steps(recorded, name)
    worst = min(steps, key=lambda step: step.share, default=None)
    return worst and {"share": worst.share, "where": f"{worst.n_tokens} tokens"}


def worst_product(recorded: Recorded, dtype: str) -> Values | None:
    found = figures.worst_batch(recorded.run("kernels-batches"), dtype)
    return found and {"share": Share(found[0]), "where": f"{found[1][3:]}, {found[2]}"}


def load(recorded: Recorded, name: str) -> Values | None:
    found = recorded.file(f"load-{name}")
    seconds = found["seconds"] if found else ()
    return {"most": max(seconds), "each": ", ".join(f"{s:.2f}" for s in seconds)} if found else None


def answer(recorded: Recorded, quant: str, belongs: Callable[[int], bool]) -> Values | None:
    """The worst of the sizes that belong to a way. n_out: how many are outside their bounds."""
    found = [a for a in figures.scored(recorded, quant) if belongs(a.n_ubatch)]
    pairs = [(a.kl, a.nmse) for a in found]
    said = "no number"
    if not any(None in pair for pair in pairs):
        said = "/".join(f"{max(values):.0e}" for values in zip(*pairs, strict=True))
    return {"n_out": sum(not a.holds for a in found), "said": said} if found else None


TOOLS = ("memcheck", "initcheck", "racecheck", "synccheck", "repetitions")


def checks(recorded: Recorded, _: str) -> Values | None:
    """The findings of compute-sanitizer and the poisoned repetitions. clean_s: the seconds they
    took; infinite where a tool did not run or found an error."""
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
    return {"clean_s": seconds if clean else math.inf, "s": seconds, "told": ", ".join(told)}


def on_a_cpu(recorded: Recorded, name: str) -> Values | None:
    """Decode beside llama.cpp's CPU backend, from `make peer`."""
    rows = (recorded.alone("peer-cpu") or {}).get("decode", ())
    ratios = {f"{row['preset']} {row['quant']}": Share(row["ratio"]) for row in rows}
    return {"share": ratios[name]} if name in ratios else None


def beside(recorded: Recorded, name: str) -> Values | None:
    """The fastest arms of both sides in one run, from `make peer-cuda`."""
    found = peer.recorded_peer(recorded, name)
    return {"times": found.best(peer.SHOWN).beside.ratio.value} if found else None


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
# pp512: t/s of llama.cpp, and the multiple of it
PROMPTS = {"llama-3-8b-f16": (24_100, 1.0), "llama-3-8b-q4_0": (11_200, 1.3)}
LEAST_OF_BOUND = 0.5
MOST_DEPTH, MOST_LOAD_S, MOST_CHECKS_S = 1.35, 10.0, 480
# the kernels that compute so many tokens at once
WAYS: dict[str, Callable[[int], bool]] = {
    "prefill kernels": lambda n_ubatch: n_ubatch > FEW,
    "decode kernels": lambda n_ubatch: n_ubatch == 1,
}
LEAST_OF_PEER = 0.9
# tg128 with everything on, as a multiple of llama.cpp's best arm
BESIDE = dict(zip(peer.MODELS, (1.47, 1.16, 1.58, 1.72, 2.2, 2.15, 1.93), strict=True))
CPU_MODELS = ("llama-3.2-1b Q8_0", "llama-3.2-1b Q4_0")

MOST_GAP_US, MOST_HOST_US = 25, 40  # with plans=ours
PDL = (Pdl.ON.value, Pdl.OFF.value)
MOST_DEVICE_US = {  # of an H200: model, with pdl and without, the captured launches of a token
    "llama-3.2-1b-bf16": (809, 904), "llama-3-8b-f16": (3992, 4106),
    "llama-3-8b-q8_0": (2339, 2479), "llama-3-8b-q4_0": (1612, 1701),
    "llama-3.2-1b-q4_k_m": (459, 563), "qwen3-4b-q4_k_m": (1415, 1587),
}  # fmt: skip
CAPTURED = {
    pdl: {model: us[i] for model, us in MOST_DEVICE_US.items()} for i, pdl in enumerate(PDL)
}
MOST_GRAPH_US = 60  # before the first command of a token is issued, a kept graph

HALF = "half of the bandwidth or tensor-core bound"
WHERE = "{share:.1f} % ({where})"
TARGETS: tuple[Target, ...] = (
    *(Target(f"{what}: {100 * least:.0f} % of the read bandwidth", dict.fromkeys(types, least),
             partial(kernel, shapes=shapes, launch=launch), WHERE)
      for what, shapes, launch, types, least in KERNELS),
    *(Target(f"tg128 {name}: {100 * least:.0f} % of the read bandwidth", {name: least}, decode,
             "{share:.1f} %, {tg:.1f} t/s")
      for name, least in DECODE.items()),
    Target("tg128: more t/s than llama.cpp's best", LLAMA_CPP, decode, "{tg:.1f} ({bound})", "tg",
           operator.gt),
    Target("tg128 beside llama.cpp's best of the same run, times", BESIDE, beside,
           "{times:.2f} ({bound})", "times"),
    Target("launches of a layer: 7 for llama, 8 for qwen3", MOST_LAUNCHES, decode, "{per_layer}",
           "per_layer", operator.le),
    *(Target(f"pp512 {name}: {theirs * times:.0f} t/s, {times:g}x llama.cpp's",
             {name: theirs * times}, decode, "{pp:.0f} t/s{of_product}", "pp")
      for name, (theirs, times) in PROMPTS.items()),
    Target(f"steps of 9 to 128 tokens: {HALF}", dict.fromkeys(BATCHED, LEAST_OF_BOUND),
           worst_step, WHERE),
    Target(f"products of 9 to 128 tokens, each of 8B: {HALF}",
           dict.fromkeys(TYPES, LEAST_OF_BOUND), worst_product, WHERE),
    Target(f"depth 16384 of llama-3-8b: adds {MOST_DEPTH} times what reading its cache takes",
           {"llama-3-8b-q4_0": MOST_DEPTH}, figures.depth_ratio,
           "{ratio:.2f} times", "ratio", operator.le),
    Target(f"llama-3-8b Q4_0 ready from the page cache in {MOST_LOAD_S:.0f} s",
           {"llama-3-8b-q4_0": MOST_LOAD_S}, load, "{each} s", "most", operator.lt),
    *(Target(f"{way} against the float path, 2,048 tokens: mean KL / NMSE in bounds",
             dict.fromkeys(SCORED, 0), partial(answer, belongs=belongs), "{said}", "n_out",
             operator.le)
      for way, belongs in WAYS.items()),
    Target(f"errors that compute-sanitizer and poisoned repetitions find in {MOST_CHECKS_S} s: "
           "none", {"gpu-sanitizer": MOST_CHECKS_S}, checks, "{told}; {s:.0f} s", "clean_s",
           operator.lt),
    Target(f"decode on two CPU threads: {100 * LEAST_OF_PEER:.0f} % of llama.cpp's",
           dict.fromkeys(CPU_MODELS, LEAST_OF_PEER), on_a_cpu, "{share:.0f} %"),
    *(Target(f"plans=ours, {part} on every row: at most {most} us",
             dict.fromkeys(plan_tables.KINDS, most),
             partial(plan_tables.worst, part=part, most=most),
             "{over} of {n} rows above, the most {us:.0f} us ({where})", "us", operator.le)
      for part, most in (("gap", MOST_GAP_US), ("host", MOST_HOST_US))),
    *(Target(f"plans=ours, pdl={pdl}: a token's kernels as captured (H200), us",
             bounds, partial(plan_tables.device_us, pdl=pdl), "{device:.0f} ({bound})",
             "device", operator.le)
      for pdl, bounds in CAPTURED.items()),
    Target("a token's launches replayed one behind the other, as captured (H200), `pdl`, us",
           CAPTURED[Pdl.ON], plan_tables.replayed_us, "{us:.0f} ({bound})", "us", operator.le),
    Target("plans never cost: the first 64 tokens of a fresh engine are not slower",
           dict.fromkeys(PLANNED, 0), plan_tables.never_cost, "{said}", "slower",
           operator.le),
    Target(f"graph work of a token, 32 layers, embedded device: at most {MOST_GRAPH_US} us",
           dict.fromkeys(plan_tables.KEEPING, MOST_GRAPH_US), plan_tables.graph_work, "{said}",
           "us", operator.le),
)  # fmt: skip


def kernel_binds(recorded: Recorded) -> Iterator[Bind]:
    for _, shapes, launch, types, least in KERNELS:
        yield from binds.of_products(recorded, types, shapes, launch, least)


def decode_binds(recorded: Recorded) -> Iterator[Bind]:
    for name, least in DECODE.items():
        found = decode(recorded, name)
        if found is not None and found["share"] < least:
            yield binds.of_step(recorded, f"decode-{name}", name, 1, f"{found['share']:.1f} %")


def batch_binds(recorded: Recorded) -> Iterator[Bind]:
    for name in BATCHED:
        missed = [s for s in figures.batch_steps(recorded, name) if s.share < LEAST_OF_BOUND]
        if missed:
            said = ", ".join(f"{step.n_tokens} tokens {step.share:.1f} %" for step in missed)
            worst = min(missed, key=lambda step: step.share)
            yield binds.of_step(recorded, f"batches-{name}", name, worst.n_tokens, said)
    for dtype in TYPES:
        found = figures.worst_batch(recorded.run("kernels-batches"), dtype)
        if found is not None and found[0] < LEAST_OF_BOUND:
            yield from binds.of_batched_product(recorded, dtype, *found)


def captured_kernels(recorded: Recorded) -> Iterator[Bind]:
    yield from binds.plan_kernels(recorded, CAPTURED)
    yield from binds.replayed_launches(recorded, CAPTURED[Pdl.ON])


BINDS: dict[str, Callable[[Recorded], Iterator[Bind]]] = {
    "products of one token": kernel_binds,
    "decode": decode_binds,
    "9 to 128 tokens, shares of the bound": batch_binds,
    "tg128 beside llama.cpp": partial(binds.beside, bounds=BESIDE, most_gap=MOST_GAP_US),
    "the gap between tokens with plans, and the host": partial(
        binds.plan_gaps, most_gap=MOST_GAP_US, most_host=MOST_HOST_US
    ),
    "kernels in plans": captured_kernels,
    "first tokens of a fresh engine": binds.first_tokens,
}


def binds_lists(recorded: Recorded) -> str:
    """For each missed target of kernels and steps what binds, a list for each kind; empty where
    none is missed."""
    parts = []
    for title, group in BINDS.items():
        lines = []
        for bind in group(recorded):
            first, *rest = bind.binds
            lines.append(f"- **{bind.missed}: {bind.measured}**. {first[:1].upper()}{first[1:]}")
            lines += [f"  - {statement}" for statement in rest]
        parts += [f"What binds, {title}:", "\n".join(lines)] if lines else []
    told = binds.origins(recorded) if parts else []
    return "\n\n".join([*parts, *([f"{'; '.join(told)}."] if told else [])])


def _lines(recorded: Recorded) -> Iterator[Line]:
    for found in targets(recorded):
        yield Line({"target": found.what, "measured": found.measured, "met": found.met})


# below the table: what binds where a target is missed; the runs that do not count, and why
BLOCKS: dict[str, list[Part]] = {
    "targets-cuda": [
        Table("Targets", _lines), binds_lists, lambda recorded: "\n\n".join(recorded.left_out()),
    ]
}  # fmt: skip

if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "data/results")
    print(block(BLOCKS["targets-cuda"], Recorded(folder, *sys.argv[2:3])))
