"""The tables of graph plans: each rule and scope, what capture and update cost, the first tokens of
an engine, and a sweep over depth."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from data.measure.matrix import OF_KERNELS
from data.measure.recorded import Recorded, model_of
from data.measure.sources import age
from data.measure.tables import Line, Part, Table
from workbench.bench import results
from workbench.bench.comparison import AB
from workbench.bench.stats import SLOWER
from workbench.bench.token_parts import medians_us
from workbench.bench.workload import parse
from workbench.config import PlanRule, PlanScope

OFF, OURS = PlanRule.OFF.value, PlanRule.OURS.value
MADE = ("captured", "updated", "reinstantiated", "replayed")  # of an engine's plans


class Planned(NamedTuple):
    """An arm of a comparison of plans. us: of token, device, gap and host, medians over the rounds.
    device and gap are of the kernels: where a step is one plan, its copies count to the gap. plans:
    counters of an engine's plans from its first token on; empty without plans."""

    model: str
    scope: str
    pdl: str
    rule: str
    row: dict[str, Any]  # of `AB.summary`; the baseline's t/s alone for the baseline
    us: Mapping[str, float]
    calls: int
    nodes: int
    plans: Mapping[str, int]
    ab: AB

    @property
    def made(self) -> int:
        """Captures of any kind."""
        return self.plans["plans_captured"] + self.plans["plans_reinstantiated"]


def planned(recorded: Recorded) -> Iterator[Planned]:
    """Every arm of every comparison of plans but the controls."""
    for _, run in recorded.of("plans", "plans"):
        yield from arms(run)


def arms(run: results.Run) -> Iterator[Planned]:
    """The arms of a comparison of plans, off first, but the control. None of a run that was cut off
    before the parts of its tokens were measured."""
    if "parts" not in run.run["result"]:
        return
    ab = AB(run.run, run.samples)
    summary = {row["arm"]: row for row in ab.summary().to_dict("records")}
    tps = next(iter(summary.values()))["tps_baseline"]
    for arm in ab.run["arms"]:
        if arm["is_control"]:
            continue
        toggles, parts = arm["toggles"], ab.run["result"]["parts"]
        own = parts[arm["name"]]
        yield Planned(
            model_of(ab.run), toggles["plan_scope"], toggles["pdl"], arm["name"],
            summary.get(arm["name"], {"tps_toggled": tps}),
            medians_us(parts, arm["name"], toggles, OF_KERNELS),
            own["calls"], own["nodes"],
            {k: n for k, n in own["counters"].items() if k.startswith("plans_")}, ab,
        )  # fmt: skip


def rules(recorded: Recorded) -> Iterator[Line]:
    """A model, scope, pdl and rule."""
    for one in planned(recorded):
        row, off = one.row, one.rule == OFF
        cells = {
            "Model": one.model, "a plan is": f"a {one.scope}", "pdl": one.pdl, "plans": one.rule,
            "t/s": f"{row['tps_toggled']:.1f}",
            "Speedup": "" if off else f"{row['speedup']:.3f} ({row['low']:.3f}..{row['high']:.3f})",
            "verdict": "" if off else row["verdict"], "calls": str(one.calls),
            "nodes": str(one.nodes),
        }  # fmt: skip
        cells |= {f"{part} us": f"{one.us[part]:.0f}" for part in ("host", "gap", "device")}
        cells |= {name: "" if off else str(one.plans[f"plans_{name}"]) for name in MADE}
        yield Line(cells, [one.ab])


def costs(recorded: Recorded) -> Iterator[Line]:
    """A model, scope and rule: what its captures and updates took, each."""
    for one in planned(recorded):
        if one.rule == OFF or not one.made:
            continue
        capture, instantiate, update = (
            one.plans[f"plans_{what}_ns"] / 1e3 for what in ("capture", "instantiate", "update")
        )
        tried = one.plans["plans_updated"] + one.plans["plans_reinstantiated"]
        yield Line(
            {
                "Model": one.model, "a plan is": f"a {one.scope}", "pdl": one.pdl,
                "plans": one.rule, "nodes": str(one.nodes),
                "captures": str(one.made), "us to capture": f"{capture / one.made:.0f}",
                "us to instantiate": f"{instantiate / one.made:.0f}",
                "updates": str(tried) if tried else "",
                "us to update": f"{update / tried:.0f}" if tried else "",
            },
            [one.ab],
        )  # fmt: skip


class Fresh(NamedTuple):
    """The first tokens of fresh engines. ms: medians of their sum, off and ours. summary: the row
    of `AB.summary`. plans: counters of an engine's plans at the end of them."""

    model: str
    ms: tuple[float, float]
    summary: dict[str, Any]
    plans: Mapping[str, int]
    ab: AB


def fresh_of(run: results.Run) -> Fresh:
    """What a run of fresh engines says."""
    ab = AB(run.run, run.samples)
    (row,) = (r for r in ab.summary().to_dict("records") if r["arm"] == OURS)
    total = ab.samples.groupby(["arm", "repetition"])["ns"].sum().groupby("arm").median() / 1e6
    plans = ab.run["result"]["counters"][OURS]
    return Fresh(model_of(ab.run), (total[OFF], total[OURS]), row, plans, ab)


def first_tokens(recorded: Recorded) -> Iterator[Line]:
    """A model: ms of the first tokens, all that is made for them included."""
    for one in (fresh_of(run) for _, run in recorded.of("plans", "fresh")):
        row, plans = one.summary, one.plans
        making = plans["plans_capture_ns"] + plans["plans_instantiate_ns"]
        yield Line(
            {
                "Model": one.model, "ms off": f"{one.ms[0]:.1f}", "ms ours": f"{one.ms[1]:.1f}",
                "Speedup": f"{row['speedup']:.3f} ({row['low']:.3f}..{row['high']:.3f})",
                "A/A band": f"{row['band_low']:.3f}..{row['band_high']:.3f}",
                "verdict": row["verdict"], "captured": str(plans["plans_captured"]),
                "ms to capture": f"{making / 1e6:.1f}", "replayed": str(plans["plans_replayed"]),
            },
            [one.ab],
        )  # fmt: skip


def sweep(recorded: Recorded) -> Iterator[Line]:
    """A model, plans and depth, in the columns of llama.cpp's sweep-bench; the speedup of TG."""
    for row, run in recorded.of("plans", "sweep"):
        ab = AB(run.run, run.samples)
        tests = [parse(test) for test in ab.run["tests"]]
        seconds = _seconds(run)
        speedups = {r["test"]: r for r in ab.summary().to_dict("records") if r["arm"] == OURS}
        for arm in (OFF, OURS):
            for pp, tg in zip(tests[::2], tests[1::2], strict=True):
                t_pp, t_tg = (seconds[arm, test.name] for test in (pp, tg))
                found = speedups[tg.name]
                said = f"{found['speedup']:.3f} ({found['low']:.3f}..{found['high']:.3f})"
                yield Line(
                    {
                        "Model": model_of(ab.run), row.compared.partition("=")[0]: arm,
                        "PP": str(pp.n_prompt), "TG": str(tg.n_gen), "N_KV": str(tg.n_depth),
                        "T_PP s": f"{t_pp:.4f}", "S_PP t/s": f"{pp.n_prompt / t_pp:.1f}",
                        "T_TG s": f"{t_tg:.4f}", "S_TG t/s": f"{tg.n_gen / t_tg:.1f}",
                        "Speedup of TG": said if arm == OURS else "",
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


def timed(recorded: Recorded) -> Iterator[Line]:
    """A model and scope: each call for a plan, timed by itself, us."""
    for row in (recorded.file(PLAN_COSTS) or {"rows": ()})["rows"]:
        cells = {"Model": row["model"], "a plan is": f"a {row['scope']}", "nodes": row["nodes"],
                 "edges": row["edges"], "programmatic": row["programmatic_edges"]}  # fmt: skip
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
    for row in (recorded.file(PLAN_COSTS) or {"rows": ()})["rows"]:
        if (row["model"], row["scope"]) == (model, PlanScope.SPLIT):
            return {"us": row["device_us"]["median"]}
    return None


# figures of targets -------------------------------------------------------------------------------


def worst(recorded: Recorded, scope: str, part: str) -> dict[str, Any] | None:
    """Of all rows of a scope with plans=ours, the one whose part of a token takes longest."""
    ours = [one for one in planned(recorded) if (one.rule, one.scope) == (OURS, scope)]
    if not ours:
        return None
    found = max(ours, key=lambda one: one.us[part])
    return {"us": found.us[part], "where": f"{found.model}, pdl {found.pdl}"}


def device_us(recorded: Recorded, model: str, suffix: str) -> Mapping[str, Any] | None:
    """What the kernels of a token take where they are captured."""
    run = recorded.run(f"plans-step{suffix}-{model}")
    return run and next((one.us for one in arms(run) if one.rule == OURS), None)


def never_cost(recorded: Recorded, model: str) -> dict[str, Any] | None:
    """The first tokens of a fresh engine, ours beside off. slower: 1 where they took longer."""
    run = recorded.run(f"fresh-{model}")
    if run is None:
        return None
    row = fresh_of(run).summary
    return row | {"slower": int(row["verdict"] == SLOWER)}


BLOCKS: dict[str, list[Part]] = {
    "plans-cuda": [
        Table("Graph plans", rules, None,
              "{tests}, {n} interleaved repetitions; calls of the host and nodes on the device for "
              "a token; us: medians"),
    ],
    "plans-costs": [
        Table("Costs of plans", costs, None, "means of an engine's first tokens"),
        Table("Calls for a plan", timed, said=timed_where),
    ],
    "plans-fresh": [Table("First tokens", first_tokens, None, "{tests}, {n} interleaved engines")],
    "sweep-cuda": [Table("Depth", sweep, None, "{n} interleaved repetitions, medians")],
}  # fmt: skip
