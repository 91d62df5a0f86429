"""Why targets of graph plans are missed, from the parts of the runs' own tokens.

A token is what the device takes and a gap. The gap is what passes until the host has the logits,
and what the host takes from there to the next token's first kernel. `bench/token_parts.py` measures
them by the device's clock. The phases of the host come from an arm's counters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from data.measure import peer, plan_tables
from data.measure.binds import Bind
from data.measure.plan_tables import (
    KINDS,
    OFF,
    OURS,
    Fresh,
    Planned,
    captured,
    fresh_of,
    kind_of,
    planned,
)
from data.measure.recorded import Recorded, model_of, title_of
from workbench.bench import worth
from workbench.bench.stats import SLOWER
from workbench.config import Pdl, PlanScope

PHASES = {"batch": "inputs", "reuse": "looking the program up", "issue": "issuing"}


def _where(one: Planned) -> str:
    return f"{model_of(one.ab.run)}, pdl {one.toggles['pdl']}"


def _above(us: float, bound: float) -> str:
    return f"{us:.0f} us, {100 * (us / bound - 1):.1f} % above {bound:.0f}"


def _span(values: list[float]) -> str:
    return f"{min(values):.0f} to {max(values):.0f}"


def parts(one: Planned) -> str:
    """A token as a sum, and its gap as one; medians over the rounds need not add up."""
    us = one.us
    return (
        f"token {us['token']:.0f} = device {us['device']:.0f} + gap {us['gap']:.0f}; of the gap, "
        f"{us['gap'] - us['host']:.0f} until the host has the logits, {us['host']:.0f} the host"
    )


def phases(one: Planned) -> str:
    """What the host does for a token beside waiting, us, of the arm's timed repetitions."""
    found = worth.phases_us(one.arm["counters"])
    return ", ".join(f"{name} {found[phase]:.0f}" for phase, name in PHASES.items())


def gaps(recorded: Recorded, most_gap: float, most_host: float) -> Iterator[Bind]:
    """An item for each kind of plan with ours: how many rows miss a target, the worst row and the
    best one taken apart."""
    ours = [one for one in planned(recorded) if one.rule == OURS]
    for kind in KINDS:
        rows = sorted((one for one in ours if one.kind == kind), key=lambda one: one.us["gap"])
        over = {part: sum(one.us[part] > most for one in rows)
                for part, most in (("gap", most_gap), ("host", most_host))}  # fmt: skip
        if not any(over.values()):
            continue
        said = {part: _span([one.us[part] for one in rows]) for part in over}
        yield Bind(
            f"plans=ours, {kind}",
            f"gap {said['gap']} us, {over['gap']} of {len(rows)} rows above {most_gap:.0f}; host "
            f"{said['host']} us, {over['host']} above {most_host:.0f}",
            tuple(
                f"{name}, {_where(one)}: {parts(one)}; the host's phases: {phases(one)}"
                for name, one in dict(zip(("the longest gap", "the shortest"), (rows[-1], rows[0]),
                                          strict=True)).items()
            ),
        )  # fmt: skip


def device(recorded: Recorded, bounds: Mapping[str, Mapping[str, float]]) -> Iterator[Bind]:
    """An item for each model whose kernels take longer than they did as captured. bounds: of each
    value of `pdl`, us by model."""
    for one in planned(recorded):
        bound = bounds.get(one.toggles["pdl"], {}).get(one.model)
        if bound is None or (one.rule, one.kind) != (OURS, KINDS[1]):
            continue
        us = one.us["device"]
        if us <= bound:
            continue
        same = [
            other.us["device"]
            for other in planned(recorded)
            if other.rule != OFF and (other.model, other.toggles["pdl"])
            == (one.model, one.toggles["pdl"])
        ]  # fmt: skip
        yield Bind(
            f"{_where(one)}, a token's kernels",
            _above(us, bound),
            (
                f"the same kernels as plans of any rule in the same run: {_span(same)} us; its "
                f"rounds {_span(one.ab.run['result']['parts'][one.arm['name']]['device'])}",
            ),
        )


def replayed(recorded: Recorded, bounds: Mapping[str, float]) -> Iterator[Bind]:
    """An item for each model whose launches, replayed behind themselves, take longer than they did
    as captured."""
    for row in plan_tables.timed_rows(recorded):
        bound, us = bounds.get(row["model"]), row["device_us"]
        if row["scope"] == PlanScope.SPLIT and bound is not None and us["median"] > bound:
            yield Bind(
                f"{title_of(row['model'])}, replayed one behind the other",
                _above(us["median"], bound),
                (f"rounds of {us['min']:.0f} to {us['max']:.0f} us; {row['nodes']} nodes, "
                 f"{row['programmatic_edges']} of {row['edges']} edges programmatic",),
            )  # fmt: skip


def beside(recorded: Recorded, bounds: Mapping[str, float], most_gap: float) -> Iterator[Bind]:
    """An item for each model whose tg128 misses its times of llama.cpp's best: how much of a token
    is too much, where a token's time goes, and what it would be with the gap that is wanted. The
    parts are those of the same kind of plan, from the model's comparison of plans."""
    parted = {
        (one.model, one.kind): one
        for one in planned(recorded)
        if (one.rule, one.toggles["pdl"]) == (OURS, Pdl.ON.value)
    }
    for model, bound in bounds.items():
        run = peer.recorded_peer(recorded, model)
        found = run.best(peer.SHOWN) if run is not None else None
        if run is None or found is None or found.ratio.value >= bound:
            continue
        us, wanted = 1e6 / found.ours, 1e6 / (found.theirs * bound)
        said = [f"a token takes {us:.0f} us, {us - wanted:.0f} more than {bound:g} times allow"]
        if one := parted.get((model, kind_of(run.toggles_of(found.arm_ours)))):
            short = us - max(0.0, one.us["gap"] - most_gap)
            alone = 1e6 / one.row["tps_toggled"]
            said += [
                f"with a gap of {most_gap:.0f} us it would be {1e6 / short / found.theirs:.2f}",
                f"in `{recorded.device}-plans-{model}`, without llama.cpp in turn, a token took "
                f"{alone:.0f} us, which would be {1e6 / alone / found.theirs:.2f}",
                f"there {parts(one)}",
            ]
        yield Bind(f"{run.model}, tg128 beside llama.cpp", f"{found.ratio.value:.2f}", tuple(said))


def fresh(recorded: Recorded) -> Iterator[Bind]:
    """An item for each kind of plan whose first tokens take longer than without plans: which tokens
    cost more, and what the others save."""
    warm = {row["model"]: row for row in plan_tables.timed_rows(recorded)
            if row["scope"] == PlanScope.STEP}  # fmt: skip
    for row, run in recorded.of("plans", "fresh"):
        for one in fresh_of(run):
            if one.row["verdict"] == SLOWER:
                yield _fresh(one, warm.get(row.model))


def _fresh(one: Fresh, warm: Mapping[str, Any] | None) -> Bind:
    ms = one.ab.samples.groupby(["arm", "token"])["ns"].median() / 1e6
    more = ms[one.arm["name"]] - ms[one.ab.run["arms"][0]["name"]]
    n = one.plans["plans_captured"] + one.plans.get("plans_twinned", 0)
    making = (one.plans["plans_capture_ns"] + one.plans["plans_instantiate_ns"]) / 1e6
    dear = more.nlargest(n).sort_index()
    others = more.drop(dear.index)
    said = [
        f"captured: {captured(one.plans)}; tokens {', '.join(map(str, dear.index))} take "
        f"{', '.join(f'{value:.1f}' for value in dear)} ms more than without plans, the "
        f"other {len(others)} together {-others.sum():.1f} ms less",
        f"capturing and making launchable take {making:.1f} ms of it; what else a first use costs, "
        "these runs do not tell apart",
    ]
    if warm is not None:
        each = sum(warm[call]["median"] for call in ("capture_us", "instantiate_us", "upload_us"))
        said.append(
            f"in a warm engine {n} plans of a step, their uploads included, take "
            f"{n * each / 1e3:.1f} ms"
        )
    name = f"{model_of(one.ab.run)}, first {len(more)} tokens, {kind_of(one.arm['toggles'])}"
    return Bind(name, f"{one.row['speedup']:.3f} times as fast", tuple(said))
