"""When plans are captured, updated, replayed and given up. The null device records by value, so
each launch is compared with what the work says at that moment."""

from __future__ import annotations

import gc
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.backend.issue.bind import LandingBlock
from workbench.backend.issue.issued import Issued, Plannable, Words
from workbench.backend.issue.landing import Landing
from workbench.backend.null import open_backend, taken
from workbench.backend.plan import life
from workbench.backend.plan.life import COUNTS, Plans, Policy, in_words, plans_of
from workbench.common.errors import DeviceError
from workbench.config import Toggles
from workbench.engine.choose import settle
from workbench.graph.ir import StepShape

USUAL = {"same": "kernel", "number": 0, "shape": StepShape(1, 1, 256), "splits": [0, 1],
         "lands": False}  # fmt: skip
WORKS: dict[str, dict[str, Any]] = {
    "a": {}, "b": {},  # two works that only their addresses tell apart
    "c": {"number": 1}, "o": {"uid": 0}, "x": {"same": "another"},
    "q": {"same": "another", "shape": StepShape(1, 0, 256)}, "p": {"shape": StepShape(8, 1, 256)},
    "s": {"splits": [0, 1, 2]}, "L": {"lands": True},
}  # fmt: skip


def nothing() -> None: ...


class Rig:
    """Plans on a null device, a clock that stands, and works by name; each is made when it is first
    named. rule: of plans, and more toggles, as `today plan_warmup=0`."""

    def __init__(self, rule: str):
        plans, *more = rule.split()
        self.device: Any = open_backend(capture=True)
        chosen = Toggles(plans=plans, **dict(x.split("=") for x in more))
        t = settle(chosen, self.device.capabilities, "null")
        policy = Policy(t.plans, int(t.plan_warmup), t.plan_evict, t.plan_batch)
        self.now, self.uids = 0.0, count(1)
        self.plans = Plans(policy, lambda: self.now)
        self.landing, self.held = Landing(open_backend(), 8), list[Any]()
        self.works: dict[str, tuple[Plannable, Any]] = {}

    def work(self, name: str) -> tuple[Plannable, Any]:
        """A work and what calls it, of a program of its own."""
        if name not in self.works:
            said, at = USUAL | {"uid": next(self.uids)} | WORKS[name], 10 * ord(name)
            parts = [Issued(nothing, (said["same"], i), Words([at + i, 7], (0,))) for i in range(3)]
            if said["lands"]:
                each = [Issued(nothing, ("result",), Words([b.address, 7], (0,)))
                        for b in self.landing.blocks]  # fmt: skip
                parts.append(Issued(nothing, ("result",), LandingBlock(self.landing, each)))
            made = Plannable(nothing, ("replay",), parts=tuple(parts), backend=self.device,
                             uid=said["uid"], landings=(self.landing,) * said["lands"])  # fmt: skip
            made.call = lambda: self.device.log.append(("issue", "parts", 0, taken(made)))
            program: Any = SimpleNamespace(**said, commands=[None] * 9)
            call_of = self.plans.call_of(program) or (lambda work: work)
            self.works[name] = made, [call_of(made) for _ in range(said["number"] + 1)][-1]
        return self.works[name]

    def call(self, name: str) -> None:
        """Looks that what is launched or issued is what the work says now."""
        (work, call), before = self.work(name), len(self.device.log)
        try:
            call.call()
        except DeviceError as error:
            assert "\n" not in str(error)
            self.device.log.append(("told",))
            return
        (done,) = [x for x in self.device.log[before:] if x[0] == "issue"]
        assert done[-1] == taken(work)

    def does(self, script: str) -> str:
        """What the device was asked by `a`: a call; `L2`: one whose caller keeps two results;
        `a@` `a=` `a~`: another address, value, shape; `-a`: a work that goes, `+9`: time passes,
        `?twin` `!twin` `.`: what is declined, fails, is well again; `#`: all plans are cleared, `%`
        destroyed by others. Twins and updates name their parts."""
        for verb in script.split():
            name, rest = verb[0], verb[1:]
            if name == "+":
                self.now += int(rest)
            elif name in "?!":
                (self.device.declined if name == "?" else self.device.failing).add(rest)
            elif name == ".":
                self.device.declined, self.device.failing = set(), set()
            elif name == "-":
                self.works.pop(rest, None)
                gc.collect(0)
            elif name == "#":
                self.plans.clear(None)
            elif name == "%":
                for plan in self.plans:
                    if plan.captured is not None:
                        plan.captured.destroy()
            elif rest in ("@", "=", "~"):
                work, n = self.work(name)[0], next(self.uids)
                if rest == "~":
                    work.parts[1].same = "a shape", n
                else:
                    work.parts[1].block["@=".index(rest)] = 100 + n
                work.uid = work.uid and n
            else:
                self.call(name)
                if "lands" in WORKS[name]:
                    self.held = [self.landing.take(8), *self.held][: int(rest or 1)]
        said = list[str]()
        for kind, *rest in self.device.log:
            if kind == "issue":
                kind, rest = {"replay": "launch", "parts": "issue"}[rest[0]], []
            said.append(kind + "".join(map(str, rest[0] if rest and rest[0] else "")))
        self.device.log.clear()
        return " ".join(said)


# rule, what is done (`Rig.does`), what the device is asked
LIVES: list[tuple[str, str, str]] = [
    # equal work is captured after its warm-up; what may be new is not looked at by pr
    ("ours", "a a a", "capture launch launch launch"),
    ("today", "a a a", "issue capture launch launch"),
    ("ours plan_warmup=2", "a a a", "issue capture launch launch"),
    ("ours", "o o o", "capture launch launch launch"),
    ("pr", "o o o", "capture launch update launch update launch"),
    ("today", "o o o", "issue capture launch launch"),
    # a change alone forces an update or another plan
    ("ours", "a a@ a a", "capture launch update1 launch launch"),
    ("ours", "a a= a a", "capture launch capture launch launch"),
    ("ours", "a a~ a a", "capture launch capture launch launch"),
    ("pr", "a a@ a a= a a~ a", "capture launch update launch update launch destroy capture launch"),
    ("today", "a a a@ a a a= a a", "issue capture launch issue update1 launch issue update launch"),
    # llama.cpp #28652: alternating shapes in one seat (x, not q) reset the warm-up for ever
    ("today", "a x a x a x", "issue issue issue issue issue issue"),
    ("today", "a q a q a q", "issue issue capture launch capture launch launch launch"),
    # by number; all go where a program has other splits
    ("pr", "a c -a a -c c s",
     "capture launch capture launch update launch update launch destroy destroy capture launch"),
    # a plan of work that is gone is taken, and no other
    ("ours", "a b a b", "capture launch capture launch launch launch"),
    ("ours", "a -a b", "capture launch update012 launch"),
    # what cannot be costs a capture, at the next call where it fails
    ("ours", "a a@ ?update a", "capture launch destroy capture launch"),
    ("ours", "a a@ !update a a", "capture launch destroy told capture launch"),
    ("ours", "!capture a . a % a a # # a",
     "told capture launch destroy told capture launch destroy capture launch"),
    # twins for all landings but one, after the launch of the one before
    ("ours", "L1 L1 L1 L1 L1 L1", "capture launch twin3 launch twin3 launch launch launch launch"),
    ("ours", "L0 L0 L0 L1 L1 L1", "capture launch twin3 launch launch launch launch twin3 launch"),
    ("pr", "L1 L1 L1 L1", "capture launch capture launch capture launch launch"),
    ("ours", "?twin L1 L1 L1 L1",
     "capture launch twin3 twin3 capture launch twin3 twin3 twin3 twin3 capture launch launch"),
    ("ours", "!twin L1 L1 L1 L1",
     "capture launch twin3 twin3 capture launch twin3 twin3 capture launch launch"),
    # which are kept
    ("ours plan_batch=one", "p a q p", "issue capture launch capture launch issue"),
    ("today plan_warmup=0", "a c +6 a +6 a +6 a c",
     "capture launch capture launch launch launch destroy launch capture launch"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "script", "wanted"), LIVES)
def test_the_life_of_a_plan(rule, script, wanted):
    rig = Rig(rule)
    assert rig.does(script) == wanted
    counts, did = rig.plans.counts, wanted.split()
    made, twinned = did.count("capture"), counts["plans_twinned"]
    assert counts["plans_captured"] + counts["plans_reinstantiated"] == made
    assert (counts["plans_capture_ns"], counts["plans_instantiate_ns"]) == (made, made + twinned)
    assert counts["plans_replayed"] == did.count("launch")
    assert counts["plans_updated"] == wanted.count("update")
    if "?update" in script:
        assert counts["plans_reinstantiated"] == 1


@pytest.mark.parametrize(
    ("rule", "works"), [("ours", "axq"), ("today plan_warmup=0", "acL"), ("pr", "acL")]
)
def test_the_least_recently_replayed_of_too_many_goes(monkeypatch, rule, works):
    monkeypatch.setattr(life, "KEPT", 2)
    rig, (a, b, c) = Rig(f"{rule} plan_evict=lru"), works
    assert rig.does(f"{a} +1 {b} +1 {a}") == "capture launch capture launch launch"
    assert rig.does(f"{c} {a} {b}") == "destroy capture launch launch destroy capture launch"
    assert rig.plans.counts["plans_evicted"] == 2


VERBS = (
    "a b c o x q p s L0 L1 L2 a@ o@ x@ L@ a= o= a~ -a -L +1 +6 ?update ?twin !update !capture . #"
)
POLICIES = st.tuples(
    st.sampled_from(["ours", "pr", "today"]), st.sampled_from(["auto", "0", "2"]),
    st.sampled_from(["auto", "never", "idle", "lru"]), st.integers(2, 5),
)  # fmt: skip


@given(POLICIES, st.lists(st.sampled_from(VERBS.split()), max_size=30))
def test_a_replay_is_what_would_have_been_issued(policy, verbs):
    """Whatever rule and policy, and whatever changes come between calls (`Rig.call` looks). What
    was captured is kept by a plan, or given back."""
    rule, warmup, evict, kept = policy
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(life, "KEPT", kept)
        rig = Rig(f"{rule} plan_warmup={warmup} plan_evict={evict}")
        did = rig.does(" ".join(verbs)).split()
        alive = sum(plan.captured is not None for plan in rig.plans)
        made = did.count("capture") + rig.plans.counts["plans_twinned"]
        assert made - did.count("destroy") == alive <= (kept if evict == "lru" else made)


def test_what_became_of_plans_is_one_line():
    none = dict.fromkeys(COUNTS, 0)
    assert in_words(none) == in_words({}) == in_words(plans_of(Toggles()).counts) == ""
    few = {"plans_captured": 3, "plans_capture_ns": 1_300_000, "plans_instantiate_ns": 800_000}
    more = {"plans_twinned": 2, "plans_updated": 2, "plans_update_ns": 200_000, "plans_evicted": 4,
            "plans_ahead": 7}  # fmt: skip
    assert in_words(none | few | more) == (
        "plans: 3 captured, 2 twinned (2.1 ms), 2 updated (0.2 ms), 0 replayed, 4 evicted, "
        "7 launched ahead"
    )
