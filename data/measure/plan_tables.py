"""The tables of graph plans: each rule and scope, the costs of capture and update, the first tokens
of an engine, and a sweep over depth; the sets of toggles that preset `best` could have. Then those
of graph reuse: each way to keep a graph, each layer disabled, growth of the cache, and the worth of
#8366 to an engine by the time that its build takes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import pandas as pd

from data.measure import peer
from data.measure.matrix import LAYERS, SETS
from data.measure.recorded import Arms, Recorded, Toggled, card_of, model_of, spread, title_of
from data.measure.sources import age
from data.measure.tables import Line, Part, Table
from workbench import config
from workbench.answers import claims, kept
from workbench.benchmarks.compare.comparison import AB
from workbench.benchmarks.compare.stats import FASTER, SLOWER
from workbench.benchmarks.times.token_parts import medians_us
from workbench.benchmarks.workload import parse

OFF, OURS = config.PlanRule.OFF.value, config.PlanRule.OURS.value
SPEEDUP = "{speedup:.3f} ({low:.3f}..{high:.3f})"  # of a row of `AB.summary`
MADE = ("captured", "updated", "reinstantiated", "replayed", "ahead")  # of an engine's plans
# kinds of plans, by the toggles of an arm
KINDS = ("a split", "a step", "a step, direct", "a step, ahead", "a step, direct, ahead",
         "a step, direct, ahead, word")  # fmt: skip


def kind_of(toggles: Mapping[str, str]) -> str:
    """The kind of plans, one of KINDS: the scope of a plan, and the additions to it."""
    added = {"direct": toggles["results"] == config.Results.DIRECT,
             "ahead": toggles["launch_ahead"] == config.LaunchAhead.ON,
             "word": toggles["plan_end"] == config.PlanEnd.WORD}  # fmt: skip
    return ", ".join([f"a {toggles['plan_scope']}", *(name for name, on in added.items() if on)])


def captured(plans: Mapping[str, int]) -> str:
    """How many plans an engine captured, and how many twins it made of them. plans: its counters;
    runs from before there were twins have no counter of twins."""
    twins = plans.get("plans_twinned")
    return str(plans.get("plans_captured", "")) + (f" and {twins} twinned" if twins else "")


class Planned(NamedTuple):
    """An arm of a comparison of plans.

    model: its name in folders.
    row: of `AB.summary`; for the baseline its t/s alone.
    us: `token_parts.PARTS`, medians over the rounds.
    calls, nodes: calls of the host and nodes on the device for a token.
    plans: counters of an engine's plans in its first tokens; empty without plans.
    """

    model: str
    arm: dict[str, Any]
    row: dict[str, Any]
    us: Mapping[str, float]
    calls: int
    nodes: int
    plans: Mapping[str, int]
    ab: AB

    @property
    def toggles(self) -> Mapping[str, str]:
        return self.arm["toggles"]

    @property
    def rule(self) -> str:
        return self.toggles["plans"]

    @property
    def kind(self) -> str:
        return kind_of(self.toggles)

    @property
    def where(self) -> dict[str, str]:
        """The cells that name the arm."""
        return {"Model": model_of(self.ab.run), "pdl": self.toggles["pdl"], "plans": self.rule,
                "a plan is": self.kind if self.rule != OFF else ""}  # fmt: skip

    @property
    def named(self) -> str:
        return f"{model_of(self.ab.run)}, pdl {self.toggles['pdl']}"

    @property
    def tried(self) -> int:
        """Updates, the refused ones included."""
        return self.plans["plans_updated"] + self.plans["plans_reinstantiated"]

    @property
    def made(self) -> int:
        """Captures of any kind."""
        return self.plans["plans_captured"] + self.plans["plans_reinstantiated"]

    @property
    def instantiated(self) -> int:
        """Captures and twins."""
        return self.made + self.plans.get("plans_twinned", 0)


@lru_cache(maxsize=4)
def planned(recorded: Recorded) -> list[Planned]:
    """Every arm of every comparison of plans except the controls, each baseline first. None of a
    run that was cut off before the parts of its tokens were measured."""
    found = []
    for row, run in recorded.of("plans", "plans"):
        ab, parts = AB(run.run, run.samples), run.run["result"].get("parts", {})
        summary = {one["arm"]: one for one in ab.summary().to_dict("records")}
        tps = next(iter(summary.values()))["tps_baseline"]
        for arm in ab.run["arms"]:
            if own := parts.get(arm["name"]):
                beside = summary.get(arm["name"], {"tps_toggled": tps})
                plans = {k: n for k, n in own["counters"].items() if k.startswith("plans_")}
                us, calls, nodes = medians_us(own), own["calls"], own["nodes"]
                found.append(Planned(row.model, arm, beside, us, calls, nodes, plans, ab))
    return found


def rules(recorded: Recorded) -> Iterator[Line]:
    """A line for each arm: its speed beside the run without plans, its launches, and the parts of a
    token."""
    for one in planned(recorded):
        row = one.row
        beside = "speedup" in row and one.toggles["pdl"] == one.ab.run["arms"][0]["toggles"]["pdl"]
        cells = one.where | {
            "t/s off": f"{row['tps_baseline']:.1f}" if beside else "",
            "t/s": f"{row['tps_toggled']:.1f}",
            "Speedup": SPEEDUP.format_map(row) if beside else "",
            "verdict": row["verdict"] if beside else "",
            "calls": str(one.calls), "nodes": str(one.nodes),
        }  # fmt: skip
        cells |= {f"{part} us": f"{one.us[part]:.0f}" for part in ("host", "gap", "device")}
        cells["stamps us"] = f"{one.us['token'] - one.us['plain']:.1f}"  # the cost of measuring
        cells |= {name: str(one.plans.get(f"plans_{name}", "")) for name in MADE}
        yield Line(cells | {"captured": captured(one.plans)}, [one.ab])


def added(recorded: Recorded) -> Iterator[Line]:
    """A line for each model and addition to a plan of a step with plans=ours: us a token with it
    and without, from the same rounds."""
    for _, run in recorded.of("plans", "plans"):
        arms, pdl = Arms(run), run.run["arms"][0]["toggles"]["pdl"]
        ours = {kind_of(arm["toggles"]): arm["name"] for arm in run.run["arms"]
                if (arm["toggles"]["plans"], arm["toggles"]["pdl"]) == (OURS, pdl)}  # fmt: skip
        for kind in KINDS[2:]:
            if KINDS[1] in ours and kind in ours:
                found = arms.between(run.run["tests"][0], ours[KINDS[1]], ours[kind])
                cells = {
                    "Model": arms.model, "pdl": pdl, "a plan is": kind,
                    "us a step": f"{1e6 / found.before:.0f}", "us then": f"{1e6 / found.after:.0f}",
                    "Speedup": spread(found.ratio, 3), "verdict": found.verdict,
                }  # fmt: skip
                yield Line(cells, [arms])


def costs(recorded: Recorded) -> Iterator[Line]:
    """A line for each arm: the time of a capture and of an update. Without any updates there is no
    column for them."""
    made = [one for one in planned(recorded) if one.rule != OFF and one.made]
    updated = any(one.tried for one in made)
    for one in made:
        capture, instantiate, update = (
            one.plans[f"plans_{what}_ns"] / 1e3 for what in ("capture", "instantiate", "update")
        )
        cells = one.where | {
            "nodes": str(one.nodes),
            "captures": str(one.made), "us to capture": f"{capture / one.made:.0f}",
            "us to instantiate": f"{instantiate / one.instantiated:.0f}",
        }  # fmt: skip
        if updated:
            cells["updates"] = str(one.tried or "")
            cells["us to update"] = f"{update / one.tried:.0f}" if one.tried else ""
        yield Line(cells, [one.ab])


def plans_of(one: Toggled) -> Mapping[str, int]:
    """The counters of a fresh engine's plans at its end."""
    found: Mapping[str, int] = one.ab.run["result"]["counters"][one.arm["name"]][one.found["test"]]
    return found


def first_tokens(recorded: Recorded) -> Iterator[Line]:
    """A line for each model and arm: ms of an engine's first tokens, with everything that is made
    for them."""
    for one in recorded.toggled("plans", "fresh"):
        plans, seconds = plans_of(one), _seconds(one.ab.samples)
        before, after = (
            1e3 * seconds[arm["name"], one.found["test"]]
            for arm in (one.ab.run["arms"][0], one.arm)
        )
        making = plans["plans_capture_ns"] + plans["plans_instantiate_ns"]
        cells = {
            "Model": one.model, "plans": one.arm["toggles"]["plans"],
            "a plan is": kind_of(one.arm["toggles"]),
            "ms before": f"{before:.1f}", "ms then": f"{after:.1f}",
            "Speedup": one.speedup(), "A/A band": one.band, "verdict": one.found["verdict"],
            "captured": captured(plans), "ms to capture": f"{making / 1e6:.1f}",
            "replayed": str(plans["plans_replayed"]),
        }  # fmt: skip
        yield Line(cells, [one.ab])


def sweep(recorded: Recorded) -> Iterator[Line]:
    """A line for each model, plans and depth, in the columns of llama.cpp's sweep-bench, with the
    speedup of TG."""
    for _, run in recorded.of("grown", "sweep"):
        ab = AB(run.run, run.samples)
        seconds = _seconds(ab.samples)
        tests = [parse(test) for test in ab.run["tests"]]
        speedups = {(r["arm"], r["test"]): r for r in ab.summary().to_dict("records")}
        for arm in ab.run["arms"][:-1]:
            for pp, tg in zip(tests[::2], tests[1::2], strict=True):
                t_pp, t_tg = (seconds[arm["name"], test.name] for test in (pp, tg))
                found = speedups.get((arm["name"], tg.name))
                cells = {
                    "Model": model_of(ab.run), "plans": arm["toggles"]["plans"],
                    "PP": str(pp.n_prompt), "TG": str(tg.n_gen), "N_KV": str(tg.n_depth),
                    "T_PP s": f"{t_pp:.4f}", "S_PP t/s": f"{pp.n_prompt / t_pp:.1f}",
                    "T_TG s": f"{t_tg:.4f}", "S_TG t/s": f"{tg.n_gen / t_tg:.1f}",
                    "Speedup of TG": SPEEDUP.format_map(found) if found else "",
                }  # fmt: skip
                yield Line(cells, [ab])


def _seconds(samples: pd.DataFrame) -> dict[tuple[str, str], float]:
    """Seconds of a repetition by arm and test, the median over the rounds."""
    total = samples.groupby(["arm", "test", "repetition"])["ns"].sum()
    return (total.groupby(["arm", "test"]).median() / 1e9).to_dict()


# times of data.measure.plan_costs -> columns
PLAN_COSTS = "plan-costs"
TIMED = {
    "issue_us": "issued singly", "capture_us": "capture", "instantiate_us": "instantiate",
    "upload_us": "upload", "exec_update_us": "update", "refused_update_us": "update refused",
    "set_kernel_us": "set a kernel", "set_copy_us": "set a copy", "launch_us": "launch, idle",
    "launch_behind_us": "launch, busy", "device_us": "on the device",
}  # fmt: skip


def timed_rows(recorded: Recorded) -> Sequence[dict[str, Any]]:
    """The rows that `data.measure.plan_costs` wrote, one for each model and scope."""
    return (recorded.file(PLAN_COSTS) or {"rows": ()})["rows"]


def timed(recorded: Recorded) -> Iterator[Line]:
    """A line for each model and scope: the time of each call for a plan, us."""
    for row in timed_rows(recorded):
        cells = {"Model": title_of(row["model"]), "a plan is": f"a {row['scope']}",
                 "nodes": str(row["nodes"]), "edges": str(row["edges"]),
                 "programmatic": str(row["programmatic_edges"])}  # fmt: skip
        cells |= {column: f"{row[name]['median']:.1f}" if name in row else ""
                  for name, column in TIMED.items()}  # fmt: skip
        yield Line(cells)


def timed_where(recorded: Recorded) -> str:
    """The caption: device, columns, sources."""
    found = recorded.file(PLAN_COSTS) or {}
    return (
        f"{found['device_description']}; us, medians, everything on: one call each; a replay "
        f"behind another on the device; {age(found)}."
    )


def replayed_us(recorded: Recorded, model: str) -> dict[str, Any] | None:
    """The time of a token's launches as a plan that is replayed one replay after the other."""
    rows = {(row["model"], row["scope"]): row for row in timed_rows(recorded)}
    found = rows.get((model, config.PlanScope.SPLIT))
    return {"us": found["device_us"]["median"]} if found else None


_first, *_others = (arm.split() for arm in SETS["cuda"][1:])
SHARED = [word for word in _first if all(word in other for other in _others)]  # of all sets


def sets_of_best(recorded: Recorded) -> Iterator[Line]:
    """A line for each set of toggles that preset `best` could have: beside the values that won one
    by one, in warm engines and in engines that are made anew."""
    for one in recorded.toggled("best"):
        found = one.found
        cells = {
            "Model": one.model, "engines": _engines(one),
            "Test": found["test"], "set": _set_name(found["arm"]),
            "t/s one by one": f"{found['tps_baseline']:.1f}",
            "t/s then": f"{found['tps_toggled']:.1f}", "Speedup": one.speedup(),
            "A/A band": one.band, "verdict": found["verdict"],
            "captured": captured(plans_of(one)) if one.row.kind == "fresh" else "",
        }  # fmt: skip
        yield Line(cells, [one.ab])


def won(recorded: Recorded) -> str:
    """A sentence for each set: whether it won, and where it is slower, as `best_table` judges."""
    verdicts: dict[str, list[tuple[str, str]]] = {}
    for one in recorded.toggled("best"):
        found, answer = one.found, one.ab.answer(one.arm["name"])
        sound = answer is not None and answer.holds
        where = f"{found['test']} of {one.model}, {_engines(one)} ({found['speedup']:.2f})"
        verdicts.setdefault(_set_name(found["arm"]), []).append(
            (found["verdict"] if sound else SLOWER, where if sound else f"{where}, other logits")
        )
    said, taken = list[str](), 0
    for name, them in verdicts.items():
        faster = sum(verdict == FASTER for verdict, _ in them)
        slower = [where for verdict, where in them if verdict == SLOWER]
        wins = faster > 0 and not slower
        taken += wins
        lost = f"slower in {'; '.join(slower)}" if slower else "slower in none"
        said.append(f"- {name}: {'won' if wins else 'did not win'}; faster in "
                    f"{faster} of {len(them)}, {lost}")  # fmt: skip
    rule = "A set wins that is faster in some test and slower in none, warm and made anew"
    left = "None did, so `best` keeps what won one by one."
    if taken:
        left = (
            "Of these `best` has the fastest by the mean, where a speedup inside its band counts "
            "as 1."
        )
    return "\n".join([f"{rule}. {left}", "", *said])


def _engines(one: Toggled) -> str:
    return "made anew" if one.row.kind == "fresh" else "warm"


def _set_name(arm: str) -> str:
    """The toggles of a set that not all sets on CUDA share."""
    return " ".join(f"`{word}`" for word in arm.split() if word not in SHARED)


def worst(recorded: Recorded, kind: str, part: str, most: float) -> dict[str, Any] | None:
    """Of all rows with plans=ours and a kind of plan, the row whose part of a token takes longest;
    the number of rows (n), and of rows above `most` (over)."""
    ours = [one for one in planned(recorded) if (one.rule, one.kind) == (OURS, kind)]
    found = max(ours, key=lambda one: one.us[part], default=None)
    over = sum(one.us[part] > most for one in ours)
    said = found and {"us": found.us[part], "where": found.named, "n": len(ours), "over": over}
    return said or None


def device_us(recorded: Recorded, model: str, pdl: str) -> Mapping[str, Any] | None:
    """The time of a token's kernels as one plan of a step, with plans=ours."""
    wanted = model, pdl, OURS, KINDS[1]
    every = planned(recorded)
    same = (p for p in every if (p.model, p.toggles["pdl"], p.rule, p.kind) == wanted)
    return next((one.us for one in same), None)


def never_cost(recorded: Recorded, model: str) -> dict[str, Any] | None:
    """The first tokens of fresh engines, plans=ours beside off. slower: for how many kinds of plans
    they took longer."""
    fresh = (one for one in recorded.toggled("plans", "fresh") if one.row.model == model)
    rows = {kind_of(one.arm["toggles"]): one for one in fresh}
    if not rows:
        return None
    said = (f"{one.found['speedup']:.3f} ({kind}, {one.found['verdict']})"
            for kind, one in rows.items())  # fmt: skip
    slower = sum(one.found["verdict"] == SLOWER for one in rows.values())
    return {"slower": slower, "said": ", ".join(said)}


BLOCKS: dict[str, list[Part]] = {
    "plans-cuda": [
        Table("Graph plans", rules, None,
              "{tests}, {n} interleaved repetitions; calls of the host and nodes on the device for "
              "a token; us: medians{tick}; what was captured and replayed: in an engine's first "
              "tokens"),
        "What direct results and launches ahead add to a plan of a step, in the same run:",
        Table("", added, None, "{tests}, {n} interleaved repetitions, plans=ours"),
    ],
    "plans-costs": [
        Table("Costs of plans", costs, None, "means of an engine's first tokens"),
        Table("Calls for a plan", timed, said=timed_where),
    ],
    "plans-fresh": [Table("First tokens", first_tokens, None, "{tests}, {n} interleaved engines")],
    "sets-cuda": [
        Table("Sets of toggles for best", sets_of_best, None,
              "{n} interleaved repetitions or engines; each set has "
              + ", ".join(f"`{word}`" for word in SHARED)),
        won,
    ],
    "sweep-cuda": [Table("Depth", sweep, None, "{n} interleaved repetitions, medians")],
}  # fmt: skip


REDO, WAYS = "redo", "graph_reuse"
CLAIMED = claims.verdict("03_graph_reuse")
REBUILD, KEPT = config.GraphReuse.REBUILD.value, config.GraphReuse.SET_ROWS.value


def _cells(arm: dict[str, Any]) -> dict[str, str]:
    """us a token by phase, from an arm's counters."""
    return {phase: f"{us:.1f}" for phase, us in kept.phases_us(arm["counters"]).items()}


def ways(recorded: Recorded) -> Iterator[Line]:
    """A line for each model and way: t/s beside rebuilding, and us a token in each phase."""
    models = set[str]()
    for one in recorded.toggled("reuse", "ab", WAYS):
        before, first = f"{one.found['tps_baseline']:.1f}", one.ab.run["arms"][0]
        if one.model not in models:
            models.add(one.model)
            rebuilt = {"Model": one.model, WAYS: first["name"], "t/s rebuilt": "", "t/s": before}
            yield Line(rebuilt | _cells(first), [one.ab])
        said = {"Model": one.model, WAYS: one.arm["name"], "t/s rebuilt": before,
                "t/s": f"{one.found['tps_toggled']:.1f}", "Speedup": one.speedup(2),
                "verdict": one.found["verdict"]}  # fmt: skip
        yield Line(said | _cells(one.arm), [one.ab])


def layers(recorded: Recorded) -> Iterator[Line]:
    """A line for each model and layer of reuse: what a token costs more with the layer disabled,
    and us in each phase then."""
    for one in recorded.toggled("reuse", "ab", REDO):
        done = [name for name in LAYERS if one.arm["toggles"][name] == config.Redo.ON]
        before, after = (one.found[f"tps_{which}"] for which in ("baseline", "toggled"))
        cells = {
            "Model": one.model, "done again": ", ".join(n.removeprefix(f"{REDO}_") for n in done),
            "t/s": f"{before:.1f}", "t/s then": f"{after:.1f}",
            "us more": f"{1e6 / after - 1e6 / before:.0f}", "Speedup": one.speedup(2),
            "verdict": one.found["verdict"],
        }  # fmt: skip
        yield Line(cells | _cells(one.arm), [one.ab])


class Worth(NamedTuple):
    """The worth of a kept graph to a model's token.

    us: of a token with a kept graph.
    own_us: of all phases of this engine's build.
    own: the measured speedup, with its interval.
    theirs: the saving of llama.cpp's reuse for the same model on a GPU; None where it was not
        measured.
    card: of llama.cpp's measurement; empty without one.
    """

    model: str
    us: float
    own_us: float
    own: str
    theirs: peer.Saving | None
    card: str
    ab: AB

    def ratio(self, build_us: float) -> float:
        """The speedup for an engine whose build takes build_us, while the device is idle."""
        return kept.speedup(self.us, max(build_us, 0))

    def beside(self, theirs: peer.Saving) -> str:
        """The speedup at llama.cpp's saving, with its interval; empty where that is another
        card's."""
        if self.card != card_of(self.ab.run):
            return ""
        value, low, high = (self.ratio(us) for us in (theirs.us, theirs.low, theirs.high))
        return f"{value:.2f} ({low:.2f}..{high:.2f})"


def worths(recorded: Recorded) -> list[Worth]:
    """A row for each model whose ways were compared."""
    theirs = {
        other.model: (saving, card_of(other.run))
        for other in peer.recorded_peers(recorded)
        for test in other.run["tests"]
        for saving in (other.savings(test) if test.startswith("tg") else ())
        if saving.with_ == peer.REUSE_PAIRS[0][0]
    }
    found = []
    for one in recorded.toggled("reuse", "ab", WAYS):
        if one.arm["name"] == KEPT:
            us, own_us = 1e6 / one.found["tps_toggled"], kept.own_build_us(one.ab.run["arms"][0])
            saving, card = theirs.get(one.model, (None, ""))
            found.append(Worth(one.model, us, own_us, one.speedup(2), saving, card, one.ab))
    return found


def verdicts(recorded: Recorded) -> Iterator[Line]:
    """A line for each model: the speedup by the time of a build, at llama.cpp's build, and at this
    engine's."""
    for one in worths(recorded):
        low, high = (kept.build_us(one.us, gain) for gain in (CLAIMED.low, CLAIMED.high))
        of = one.theirs
        yield Line(
            {"Model": one.model, "us a token": f"{one.us:.0f}"}
            | {f"{us} us": f"{one.ratio(us):.3f}" for us in kept.BUILD_US}
            | {
                "llama.cpp's build, us": f"{of.us:.0f} ({of.low:.0f}..{of.high:.0f})" if of else "",
                "its own speedup": f"{of.speedup.value:.2f}" if of else "",
                "at llama.cpp's": one.beside(of) if of else "",
                f"{CLAIMED.gain} is a build of": f"{low:.0f} to {high:.0f} us",
                "this engine's build, us": f"{one.own_us:.0f}",
                "at this engine's": f"{one.ratio(one.own_us):.2f}",
                "measured here (Python)": one.own,
            },
            [one.ab],
        )


def verdict(recorded: Recorded) -> str:
    """#8366 at llama.cpp's own build time: measured in a peer run, else as its thread says."""
    found = worths(recorded)
    said = [
        kept.own_token(one.model, of.us, of.speedup.value) for one in found if (of := one.theirs)
    ]
    if said:
        beside = [
            f"{one.model} {times} beside a token of {one.us:.0f} us"
            for one in found
            if one.theirs and (times := one.beside(one.theirs))
        ]
        here = (
            f" On the same card, beside this engine's token: {'; '.join(beside)}." if beside else ""
        )
        cards = " and ".join(dict.fromkeys(one.card for one in found if one.theirs))
        return (
            "Verdict on #8366, at llama.cpp's build time: its reuse switch saves the build and all "
            f"else that a new graph entails, on {cards}: {'; '.join(said)}.{here} Its thread had "
            f"{CLAIMED.gain}. This engine's ratio is the price of its Python."
        )
    lows, highs = (
        [kept.build_us(one.us, gain) for one in found] for gain in (CLAIMED.low, CLAIMED.high)
    )
    return (
        "Verdict on #8366, at llama.cpp's build time: its own was not measured on this card. Its "
        f"thread has {CLAIMED.gain}, which here would be a build of {min(lows):.0f} to "
        f"{max(highs):.0f} us. This engine's ratio is the price of its Python."
    )


BENCHMARK = re.compile(r"test_bench_reuse\.py::test_graph_work\w*(?:\[(.+)\])?")
KEEPING = [way for way in config.Toggles.values(WAYS) if way != REBUILD]


def graph_work(recorded: Recorded, way: str) -> dict[str, Any] | None:
    """us before the first command of a token is issued, where `way` keeps the graph: the most of
    its benchmarks, and each. A benchmark that names no way is of set_rows."""
    every = (recorded.alone("benchmarks") or {}).get("benchmarks", {})
    found = {}
    for name, of in every.items():
        matched = BENCHMARK.fullmatch(name)
        if matched and way in (matched[1] or KEPT):
            rest = (matched[1] or "").replace(way, "").strip("-")
            found[rest] = of["median_us"]
    said = ", ".join(f"{us:.0f} us {rest}".strip() for rest, us in found.items())
    return {"us": max(found.values()), "said": said} if found else None


def growth(recorded: Recorded) -> Iterator[Line]:
    """A line for each model, test and plans: kv_growth=full beside kv_growth=step, in one run."""
    for _, run in recorded.of("grown", "ab"):
        arms = Arms(run)
        for test, i in product(run.run["tests"], range(0, len(arms.names), 2)):
            step, full = arms.names[i : i + 2]
            found = arms.between(test, step, full)
            cells = {
                "Model": arms.model, "Test": test, "plans": arms.toggles(step)["plans"],
                "t/s step": f"{found.before:.1f}", "t/s full": f"{found.after:.1f}",
                "Speedup": spread(found.ratio, 3), "verdict": found.verdict,
            }  # fmt: skip
            yield Line(cells, [arms])


BLOCKS |= {
    "reuse-cuda": [
        Table("Ways to keep a graph", ways, None,
              "{tests}; us a token in each phase; all else on; {n} interleaved repetitions"),
        "One layer of reuse disabled: its phase is done again for every token, and the us in each "
        "phase are those then; all else on:",
        Table("", layers, None, "{tests}; {n} interleaved repetitions"),
    ],
    "reuse-verdict": [
        Table("What #8366 is worth by what a build costs", verdicts, None,
              "speedup of a kept graph: (token + build) / token"),
        verdict,
    ],
    "growth-cuda": [
        Table("How n_kv grows", growth, None, "kv_growth=step and full; {n} interleaved "
              "repetitions"),
    ],
}  # fmt: skip
