"""The tables of graph plans: each rule and scope, what capture and update cost, the first tokens of
an engine, and a sweep over depth."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from data.measure.recorded import Recorded, between, model_of, title_of
from data.measure.sources import age
from data.measure.tables import Line, Part, Table
from workbench.bench import results
from workbench.bench.comparison import AB
from workbench.bench.stats import SLOWER
from workbench.bench.token_parts import medians_us
from workbench.bench.workload import parse
from workbench.config import LaunchAhead, PlanEnd, PlanRule, PlanScope, Results

OFF, OURS = PlanRule.OFF.value, PlanRule.OURS.value
MADE = ("captured", "updated", "reinstantiated", "replayed", "ahead")  # of an engine's plans
# how an arm has its plans, by toggles: what a target is told of
KINDS = ("a split", "a step", "a step, direct", "a step, ahead", "a step, direct, ahead",
         "a step, direct, ahead, word")  # fmt: skip


def kind_of(toggles: Mapping[str, str]) -> str:
    """One of KINDS: what is in a plan, and what is added to it."""
    added = {"direct": toggles["results"] == Results.DIRECT,
             "ahead": toggles["launch_ahead"] == LaunchAhead.ON,
             "word": toggles["plan_end"] == PlanEnd.WORD}  # fmt: skip
    return ", ".join([f"a {toggles['plan_scope']}", *(name for name, on in added.items() if on)])


def captured(plans: Mapping[str, int]) -> str:
    """How many plans an engine captured, and made as twins of these. plans: its counters; a run
    from before there were twins has none."""
    twins = plans.get("plans_twinned")
    return str(plans.get("plans_captured", "")) + (f" and {twins} twinned" if twins else "")


class Planned(NamedTuple):
    """An arm of a comparison of plans. model: as folders name it. us: `token_parts.PARTS`, medians
    over the rounds. plans: counters of an engine's plans in its first tokens; empty without plans.
    """

    model: str
    arm: dict[str, Any]
    row: dict[str, Any]  # of `AB.summary`; the baseline's t/s alone for the baseline
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
        """The cells that name it."""
        plans = self.rule if self.rule != OFF else ""
        return {"Model": model_of(self.ab.run), "pdl": self.toggles["pdl"],
                "plans": plans or OFF, "a plan is": self.kind if plans else ""}  # fmt: skip

    @property
    def tried(self) -> int:
        """Updates, refused ones among them."""
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
    """Every arm of every comparison of plans but the controls. Many tables and targets ask."""
    return [one for row, run in recorded.of("plans", "plans") for one in arms(row.model, run)]


def arms(model: str, run: results.Run) -> Iterator[Planned]:
    """The arms of a comparison of plans, the baseline first, but the control. None of a run that
    was cut off before the parts of its tokens were measured."""
    if "parts" not in run.run["result"]:
        return
    ab = AB(run.run, run.samples)
    summary = {row["arm"]: row for row in ab.summary().to_dict("records")}
    tps = next(iter(summary.values()))["tps_baseline"]
    for arm in ab.run["arms"]:
        if arm["is_control"]:
            continue
        own = ab.run["result"]["parts"][arm["name"]]
        yield Planned(
            model, arm, summary.get(arm["name"], {"tps_toggled": tps}),
            medians_us(own), own["calls"], own["nodes"],
            {k: n for k, n in own["counters"].items() if k.startswith("plans_")}, ab,
        )  # fmt: skip


def rules(recorded: Recorded) -> Iterator[Line]:
    """An arm: speed beside the run's own without plans, launches, the parts of a token."""
    for one in planned(recorded):
        row = one.row
        beside = "speedup" in row and one.toggles["pdl"] == one.ab.run["arms"][0]["toggles"]["pdl"]
        cells = one.where | {
            "t/s off": f"{row['tps_baseline']:.1f}" if beside else "",
            "t/s": f"{row['tps_toggled']:.1f}",
            "Speedup": f"{row['speedup']:.3f} ({row['low']:.3f}..{row['high']:.3f})"
            if beside else "",
            "verdict": row["verdict"] if beside else "",
            "calls": str(one.calls), "nodes": str(one.nodes),
        }  # fmt: skip
        cells |= {f"{part} us": f"{one.us[part]:.0f}" for part in ("host", "gap", "device")}
        cells["stamps us"] = f"{one.us['token'] - one.us['plain']:.1f}"  # what measuring adds
        cells |= {name: str(one.plans.get(f"plans_{name}", "")) for name in MADE}
        cells["captured"] = captured(one.plans)
        yield Line(cells, [one.ab])


def added(recorded: Recorded) -> Iterator[Line]:
    """A model: what direct results and launches ahead add to a plan of a step with ours, in the
    same run; us a token, the difference within a round."""
    for _, run in recorded.of("plans", "plans"):
        ab = AB(run.run, run.samples)
        pdl = ab.run["arms"][0]["toggles"]["pdl"]
        ours = {kind_of(arm["toggles"]): arm["name"] for arm in ab.run["arms"]
                if (arm["toggles"]["plans"], arm["toggles"]["pdl"]) == (OURS, pdl)}  # fmt: skip
        plain = ours.get(KINDS[1])
        for kind in KINDS[2:]:
            if plain is not None and kind in ours:
                found = between(ab, ab.run["tests"][0], plain, ours[kind])
                yield Line(
                    {
                        "Model": model_of(ab.run), "pdl": pdl,
                        "a plan is": kind, "us a step": f"{1e6 / found.before:.0f}",
                        "us then": f"{1e6 / found.after:.0f}", "Speedup": found.said,
                        "verdict": found.verdict,
                    },
                    [ab],
                )  # fmt: skip


def costs(recorded: Recorded) -> Iterator[Line]:
    """An arm: what its captures and updates took, each; no column for updates that no arm had."""
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


class Fresh(NamedTuple):
    """A test of fresh engines, an arm behind the baseline. ms: medians of a repetition, the
    baseline's and the arm's. row: of `AB.summary`. plans: counters of an engine's plans at its
    end."""

    arm: dict[str, Any]
    ms: tuple[float, float]
    row: dict[str, Any]
    plans: Mapping[str, int]
    ab: AB


def fresh_of(run: results.Run) -> Iterator[Fresh]:
    """What a run of fresh engines says."""
    ab = AB(run.run, run.samples)
    total = ab.samples.groupby(["arm", "test", "repetition"])["ns"].sum() / 1e6
    ms, by_name = total.groupby(["arm", "test"]).median(), {a["name"]: a for a in ab.run["arms"]}
    for row in ab.summary().to_dict("records"):
        if not row["is_control"]:
            before = ms[ab.run["arms"][0]["name"], row["test"]]
            plans = ab.run["result"]["counters"][row["arm"]][row["test"]]
            yield Fresh(by_name[row["arm"]], (before, ms[row["arm"], row["test"]]), row, plans, ab)


def first_tokens(recorded: Recorded) -> Iterator[Line]:
    """A model and arm: ms of the first tokens, all that is made for them included."""
    for _, run in recorded.of("plans", "fresh"):
        for one in fresh_of(run):
            yield Line({"Model": model_of(one.ab.run), "plans": one.arm["toggles"]["plans"],
                        "a plan is": kind_of(one.arm["toggles"])} | _made_anew(one),
                       [one.ab])  # fmt: skip


def _made_anew(one: Fresh) -> dict[str, str]:
    row, plans = one.row, one.plans
    making = plans["plans_capture_ns"] + plans["plans_instantiate_ns"]
    return {
        "ms before": f"{one.ms[0]:.1f}", "ms then": f"{one.ms[1]:.1f}",
        "Speedup": f"{row['speedup']:.3f} ({row['low']:.3f}..{row['high']:.3f})",
        "A/A band": f"{row['band_low']:.3f}..{row['band_high']:.3f}",
        "verdict": row["verdict"], "captured": captured(plans),
        "ms to capture": f"{making / 1e6:.1f}", "replayed": str(plans["plans_replayed"]),
    }  # fmt: skip


def sweep(recorded: Recorded) -> Iterator[Line]:
    """A model, plans and depth, in the columns of llama.cpp's sweep-bench; the speedup of TG."""
    for _, run in recorded.of("grown", "sweep"):
        ab = AB(run.run, run.samples)
        tests = [parse(test) for test in ab.run["tests"]]
        seconds, (first, *others) = _seconds(run), ab.run["arms"][:-1]
        speedups = {(r["arm"], r["test"]): r for r in ab.summary().to_dict("records")}
        for arm in (first, *others):
            for pp, tg in zip(tests[::2], tests[1::2], strict=True):
                t_pp, t_tg = (seconds[arm["name"], test.name] for test in (pp, tg))
                found, said = speedups.get((arm["name"], tg.name)), ""
                if found is not None:
                    said = f"{found['speedup']:.3f} ({found['low']:.3f}..{found['high']:.3f})"
                yield Line(
                    {
                        "Model": model_of(ab.run), "plans": arm["toggles"]["plans"],
                        "PP": str(pp.n_prompt), "TG": str(tg.n_gen), "N_KV": str(tg.n_depth),
                        "T_PP s": f"{t_pp:.4f}", "S_PP t/s": f"{pp.n_prompt / t_pp:.1f}",
                        "T_TG s": f"{t_tg:.4f}", "S_TG t/s": f"{tg.n_gen / t_tg:.1f}",
                        "Speedup of TG": said,
                    },
                    [ab],
                )  # fmt: skip


def _seconds(run: results.Run) -> dict[tuple[str, str], float]:
    """Of an arm and test: the median over the rounds of its repetition."""
    total = run.samples.groupby(["arm", "test", "repetition"])["ns"].sum()
    return (total.groupby(["arm", "test"]).median() / 1e9).to_dict()


# of data.measure.plan_costs: what it times -> column
TIMED = {
    "issue_us": "issued singly", "capture_us": "capture", "instantiate_us": "instantiate",
    "upload_us": "upload", "exec_update_us": "update", "refused_update_us": "update refused",
    "set_kernel_us": "set a kernel", "set_copy_us": "set a copy", "launch_us": "launch, idle",
    "launch_behind_us": "launch, busy", "device_us": "on the device",
}  # fmt: skip


def timed_rows(recorded: Recorded) -> Sequence[dict[str, Any]]:
    """What `data.measure.plan_costs` timed, a row for each model and scope."""
    return (recorded.file(PLAN_COSTS) or {"rows": ()})["rows"]


def timed(recorded: Recorded) -> Iterator[Line]:
    """A model and scope: each call for a plan, timed by itself, us."""
    for row in timed_rows(recorded):
        cells = {"Model": title_of(row["model"]), "a plan is": f"a {row['scope']}",
                 "nodes": row["nodes"], "edges": row["edges"],
                 "programmatic": row["programmatic_edges"]}  # fmt: skip
        times = {
            column: f"{row[name]['median']:.1f}" if name in row else ""
            for name, column in TIMED.items()
        }
        yield Line({name: str(value) for name, value in cells.items()} | times)


def timed_where(recorded: Recorded) -> str:
    """Device, what the columns are, sources."""
    found = recorded.file(PLAN_COSTS) or {}
    return (
        f"{found['device_description']}; us, medians, everything on: one call each; a replay "
        f"behind another on the device; {age(found)}."
    )


PLAN_COSTS = "plan-costs"


def replayed_us(recorded: Recorded, model: str) -> dict[str, Any] | None:
    """What the launches of a token take as a plan that is replayed behind itself."""
    for row in timed_rows(recorded):
        if (row["model"], row["scope"]) == (model, PlanScope.SPLIT):
            return {"us": row["device_us"]["median"]}
    return None


# figures of targets -------------------------------------------------------------------------------


def worst(recorded: Recorded, kind: str, part: str, most: float) -> dict[str, Any] | None:
    """Of all rows of ours whose plans are of a kind, the one whose part of a token takes longest;
    how many there are (n), and how many of them take longer than `most` (over)."""
    ours = [one for one in planned(recorded) if (one.rule, one.kind) == (OURS, kind)]
    if not ours:
        return None
    found = max(ours, key=lambda one: one.us[part])
    where = f"{model_of(found.ab.run)}, pdl {found.toggles['pdl']}"
    over = sum(one.us[part] > most for one in ours)
    return {"us": found.us[part], "where": where, "n": len(ours), "over": over}


def device_us(recorded: Recorded, model: str, pdl: str) -> Mapping[str, Any] | None:
    """What the kernels of a token take where they are one plan of a step, with ours."""
    for one in planned(recorded):
        same = one.toggles["pdl"], one.rule, one.kind
        if one.model == model and same == (pdl, OURS, KINDS[1]):
            return one.us
    return None


def never_cost(recorded: Recorded, model: str) -> dict[str, Any] | None:
    """The first tokens of fresh engines, ours beside off. slower: of how many kinds of plans they
    took longer."""
    run = recorded.run(f"fresh-{model}")
    if run is None:
        return None
    rows = {kind_of(one.arm["toggles"]): one.row for one in fresh_of(run)}
    said = (f"{row['speedup']:.3f} ({kind}, {row['verdict']})" for kind, row in rows.items())
    slower = sum(row["verdict"] == SLOWER for row in rows.values())
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
    "sweep-cuda": [Table("Depth", sweep, None, "{n} interleaved repetitions, medians")],
}  # fmt: skip
