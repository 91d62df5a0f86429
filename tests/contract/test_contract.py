"""Same answer, different trace: each value of each toggle, on each device, for each shape of model.

`answers` is what an engine is asked. A value gives the baseline's answers: to the bit, or rounded,
as its row of the table declares. And it removes the work that it claims to remove: `SHOWS` says
what its programs and counters have then. A value that is not there changes neither.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

import workbench as wb
from tests.contract.toggle_cases import PARTS, Case, cases, rounding
from tests.oracles.adversary import search
from tests.profiles import examples, share
from workbench.backend import base
from workbench.backend.null import open_backend
from workbench.benchmarks.compare.answers import compare_logits
from workbench.common.errors import DeviceError, UsageError
from workbench.config import SyncMode, Toggles
from workbench.config.table import Need, facts_of
from workbench.engine import load
from workbench.engine.choose import settle
from workbench.model.synth import models as synth
from workbench.model.synth import shapes as presets
from workbench.program.capabilities import Capabilities
from workbench.program.check.hazards import check_cycle
from workbench.program.commands import COMPUTE_STREAM, COPY_STREAM, Copy, Launch, Program, Space
from workbench.program.sync_modes import Ordering

# a preset, and what else an engine of it is given
SHAPES: dict[str, tuple[str, dict[str, str]]] = {
    "llama": ("tiny-llama", {}),
    "qwen2": ("tiny-qwen2", {}),
    "qwen3": ("tiny-qwen3", {}),
    "windowed": ("windowed", {}),
    "cached": ("tiny-qwen3", {"cache_type_k": "q8_0", "cache_type_v": "bf16"}),
}
DEVICES = ["embedded", "host"]
CASES = cases()
N_CTX, PAD, N_UBATCH, N_SEQS, WINDOW = 480, 32, 12, 3, 21
TEXT = np.random.default_rng(5).integers(3, 600, 80).tolist()
# what no capability says
REFUSED = {
    "attn_kernel=mma": "matrix units of a GPU",
    "lifetimes=serial": "race",
    "lifetimes=interleaved": "race",
}
REFUSED_BY_HOST = {"sampling=device": "wants all layers on one device"}


def answers(engine: wb.Engine) -> np.ndarray:
    """Logits of a prompt in ubatches, of tokens behind it until attention looks at more cells, and
    of steps of several sequences, with cells copied, removed and shifted."""
    engine.reset()
    rows = [engine.prefill(TEXT[:26], "all"), *(engine.step([t]) for t in TEXT[26:34])]
    rows += engine.submit([(1, TEXT[34:39], "all"), (2, TEXT[39:40], "last")]).each()
    engine.cache.remove(0)
    engine.cache.copy(1, 0)
    engine.cache.remove(0, 3)
    engine.cache.remove(1, 1, 3)
    engine.cache.shift(1, -2, 3)
    rows += engine.submit([(s, [TEXT[40 + s]], "last") for s in (2, 0, 1)]).each()
    rows += [engine.step([t], "last", 1) for t in TEXT[43:45]]
    return np.concatenate(rows)


def written(quant: str, path, **fields):
    """A model file of tiny-llama with other fields."""
    with pytest.MonkeyPatch.context() as patch:
        shape = replace(presets.find_preset("tiny-llama"), **fields)
        patch.setitem(presets.PRESETS, "other", shape)
        return synth.write_model("other", quant, path)


class Room:
    """The baseline's engine for a shape and a device, and answers that were asked for."""

    def __init__(self, engine: wb.Engine):
        self.engine, self._known = engine, dict[Toggles, np.ndarray]()

    def answers(self, toggles: Toggles) -> np.ndarray:
        if toggles not in self._known:
            with self.engine.variant(toggles) as variant:
                self._known[toggles] = answers(variant)
        return self._known[toggles]

    def refusal(self, case: Case) -> str | None:
        """What the refusal of a case must say; None where it is not refused."""
        if need := case.lacks(self.engine.backend.capabilities):
            return need.why or "use "
        on_host = REFUSED_BY_HOST if self.engine.device == "host" else {}
        return (REFUSED | on_host).get(str(case))


@pytest.fixture(scope="module")
def room(tiny_model, tmp_path_factory) -> Iterator[Callable[[str, str], Room]]:
    windowed = written("Q8_0", tmp_path_factory.mktemp("windowed") / "m.gguf", window=WINDOW)
    with ExitStack() as opened:

        @cache
        def get(shape: str, device: str) -> Room:
            preset, more = SHAPES[shape]
            path = windowed if preset == "windowed" else tiny_model(preset, "Q8_0")
            return Room(opened.enter_context(wb.Engine.load(
                path, device=device, n_ctx=N_CTX, n_kv_pad=PAD, n_seqs=N_SEQS, n_ubatch=N_UBATCH,
                threads=2, toggles=Toggles(), **more,
            )))  # fmt: skip

        yield get


EACH = [(shape, device, case) for case in CASES for device in DEVICES for shape in SHAPES]


@pytest.mark.parametrize(("shape", "device", "case"), share(EACH, every=11, slow=5), ids=str)
def test_a_value_answers_as_the_baseline(room, shape, device, case):
    here = room(shape, device)
    if says := here.refusal(case):
        with pytest.raises((DeviceError, UsageError)) as refused:
            here.engine.variant(case.toggles)
        assert says in str(refused.value) and "\n" not in str(refused.value)
        return
    found = here.answers(case.toggles)
    for other in (case.without, Toggles()):
        kind = case.answer_of(other)
        answer = compare_logits(here.answers(other), found, kind)
        assert answer.holds, str(answer)
        if other == case.without and case.name.startswith(PARTS):
            assert answer.equal
    assert len(found) == 45
    assert len(np.unique(found.argmax(axis=-1))) > 10, "mix-ups would show"


SOME = st.lists(st.sampled_from(CASES), min_size=2, max_size=4, unique_by=lambda case: case.name)


@pytest.mark.long
@given(SOME, st.sampled_from([*SHAPES]), st.sampled_from(DEVICES))
@settings(max_examples=examples(80), suppress_health_check=[HealthCheck.filter_too_much])
def test_values_together_answer_as_what_of_them_rounds(room, some, shape, device):
    """To the bit; close to the baseline; and nothing races, nor reads anything wrong."""
    here, values = room(shape, device), dict[str, Any]()
    for case in some:
        values |= case.toggles.changed()
    try:
        toggles = Toggles(**values)
        rounds = rounding(toggles)
        variant = here.engine.variant(toggles)
    except (UsageError, DeviceError):
        reject()
    with variant:
        found, cycle = answers(variant), variant.cycle(N_UBATCH + 2, 2)
        assert check_cycle(cycle).safe and search(cycle, range(14)) == []
    assert np.array_equal(found, here.answers(rounds))
    assert compare_logits(here.answers(Toggles()), found, "rounding").holds


# what is different --------------------------------------------------------------------------------


class Seen(NamedTuple):
    """An engine's programs and counters behind its answers. one: of a step of a token in an empty
    cache. prompt: of 4 tokens. silent: without outputs. deep: behind 140 tokens."""

    one: Program
    prompt: Program
    silent: Program
    deep: Program
    period: int
    n: Counter[str]

    @classmethod
    def of(cls, engine: wb.Engine) -> Seen:
        answers(engine)
        programs = [engine.program(), engine.program(4), engine.program(4, 0)]
        deep, n = engine.program(1, 1, 140), Counter(engine.counters)
        return cls(*programs, deep, engine.period, n)

    @property
    def same(self) -> tuple[object, ...]:
        """What a value that changes nothing leaves alone."""
        counters = {k: v for k, v in self.n.items() if not k.endswith(("_ns", "_n"))}
        patterns = [p.pattern() for p in (self.one, self.prompt, self.silent, self.deep)]
        return counters, patterns, [p.counts() for p in self[:4]], self.period

    def launches(self, op: str = "", prompt: bool = False) -> list[Launch]:
        """Of the device, of an op."""
        return [c for c in (self.prompt if prompt else self.one).singly()
                if isinstance(c, Launch) and op in (c.node.op, "")]  # fmt: skip

    @property
    def attends(self) -> dict[str, object]:
        return self.launches("attention")[0].node.params

    @property
    def copies(self) -> list[Copy]:
        """Of inputs, and last of the results, if they are copied."""
        return [c for c in self.one.singly() if isinstance(c, Copy)]


Shown = Callable[[Seen, Seen], object]  # without the value, and with it


def pattern(text: str) -> Shown:
    return lambda off, on: on.one.pattern(fold=True, result=True) == text


def period(n: int) -> Shown:
    return lambda off, on: (off.period, on.period) == (1, n)


def counted(**wanted: int) -> Shown:
    return lambda off, on: {name: on.n[name] for name in wanted} == wanted


def again(*phases: str) -> Shown:
    """Only these phases are counted for every step of a program that is kept."""
    wanted = {f"{p}_n" for p in phases}
    return lambda off, on: (
        off.n["programs_reused"] > 8
        and wanted == {n for n in on.n if n.endswith("_n") and on.n[n] > off.n[n]}
    )


def fewer(op: str, n: int) -> Shown:
    """A fused node stands for others, in n fewer launches of two layers."""
    return lambda off, on: len(off.launches()) - len(on.launches()) == n and on.launches(op)


def attends(**params: object) -> Shown:
    return lambda off, on: params.items() <= on.attends.items()


def on_streams(n: int, prompt: int = 1) -> Shown:
    """Each of the two layers forks to the other streams, and joins them."""

    def shown(off: Seen, on: Seen) -> bool:
        if prompt == 1 and on.one.counts()["stream_waits"] != 4 * (n - 1):
            return False
        used = [{c.stream.id for c in on.launches(prompt=p) if not c.by_host} for p in (0, 1)]
        return [len(ids) for ids in used] == [n, prompt] and not on.n["programs_unforked"]

    return shown


def stores(op: str, *, rows: int) -> Shown:
    """By which op the cache is stored to, and by how many inputs the ops are told where."""
    return lambda off, on: (
        len(on.launches(op)) == 4 and len(on.copies) == len(off.copies) - 2 + rows
        and on.n["programs_built"] + on.n["programs_reused"] == on.n["steps"]
    )  # fmt: skip


def every(*shown: Shown) -> Shown:
    return lambda off, on: all(one(off, on) for one in shown)


SHOWS: dict[str, Shown] = {
    "sync=blocking_copies": pattern("h sccccsgas"),
    "sync=copy_boundary": pattern("h saaaasgas"),
    "sync=write_read_boundary": pattern("h aaaasgas"),
    "sync=implicit": pattern("h aaaagas"),
    "sync=packed_implicit": pattern("h agas"),
    "sync=event_guarded": pattern("h saaaarwgas"),
    "sync=packed": pattern("h sasgas"),
    "sync=auto": pattern("h aaaagas"),  # the safe mode with the fewest waits
    "copy_stream=own": lambda off, on: {c.stream.id for c in on.copies[:-1]} == {COPY_STREAM},
    "copy_stream=compute": lambda off, on: {c.stream.id for c in on.copies} == {COMPUTE_STREAM},
    "host_source=pageable": lambda off, on: (
        {Space.HOST} == {c.src.buffer.space for c in on.copies[:-1]}
        != {c.src.buffer.space for c in off.copies[:-1]}
    ),
    "host_source=pinned_ring_2": period(2),
    "host_source=pinned_ring_4": period(4),
    "n_copies=4": period(4),
    "step_wait=outputs": lambda off, on: (
        (off.silent.waited, on.silent.waited, on.one.waited) == (True, False, True)
    ),
    "results=direct": lambda off, on: (
        on.copies == off.copies[:-1] or len(on.copies) == len(off.copies) - 1
    ),
    "results=behind": lambda off, on: on.copies[-1].stream.id == COPY_STREAM != (
        off.copies[-1].stream.id
    ),
    "graph_reuse=patch_pointers": stores("copy_to_view", rows=0),
    "graph_reuse=pointer_table": stores("copy_by_table", rows=1),
    "graph_reuse=set_rows": every(
        stores("set_rows", rows=2), lambda off, on: off.n["programs_reused"] == 0,
        counted(programs_built=7),
    ),
    "redo_build=on": again("graph", "fuse"),
    "redo_split=on": again("split"),
    "redo_layout=on": again("layout"),
    "redo_lower=on": again("lower"),
    "redo_bind=on": again("prepare"),
    "kv_growth=geometric": lambda off, on: (off.deep.shape.n_kv, on.deep.shape.n_kv) == (160, 192),
    "kv_growth=full": lambda off, on: {p.shape.n_kv for p in on[:4]} == {N_CTX},
    "kv_cache=per_sequence": attends(more=("regions",)),
    "skip_masked_kv=in_loop": attends(skip="in_loop", more=()),
    "skip_masked_kv=tail": every(attends(skip="tail"), lambda off, on: on.launches("kv_extents")),
    "skip_masked_kv=classes": every(
        attends(skip="classes"), lambda off, on: on.launches("kv_classes")
    ),
    "skip_masked_kv=auto": attends(skip="tail"),
    "skip_gate=always": attends(skip="classes"),
    "attn_kernel=vec": attends(kernel="vec"),
    "attn_kernel=tile": attends(kernel="tile"),
    "kv_parts=parallel_blocks": attends(kv_parts="parallel_blocks"),
    "kv_parts=stream_k": attends(kv_parts="stream_k"),
    "activations=float": lambda off, on: off.launches("quantize") and not on.launches("quantize"),
    "defer_norm=on": lambda off, on: on.launches("rms_scale") and on.launches("rms_scale", True),
    "defer_norm=one": lambda off, on: (
        on.launches("rms_scale") and not on.launches("rms_scale", prompt=True)
    ),
    "fuse_norm_mul=on": fewer("norm", 5),
    "fuse_norm_quantize=on": fewer("norm", 5),
    "fuse_add_norm=on": fewer("norm", 4),
    "fuse_bias=on": fewer("product", 6),
    "fuse_qkv=on": fewer("qkv", 4),
    "fuse_rope_store=on": fewer("rope_store", 6),
    "fuse_glu=on": fewer("glu", 4),
    "fuse_epilogue_quantize=on": fewer("attention_quantize", 4),
    "fuse_product_norm=on": fewer("product_norm", 15),
    "branch_fusion=inside": lambda off, on: (
        len(on.launches()) == len(off.launches()) + 10 and not on.launches("qkv_rope_store")
    ),
    "plans=pr": every(pattern("h scscpas"), counted(plans_captured=3, plans_replayed=16)),
    "plans=today": every(pattern("h scscpas"), counted(plans_captured=1, plans_issued=7)),
    "plans=ours": every(pattern("h scscpas"), counted(plans_captured=7, plans_replayed=16)),
    "plan_scope=step": every(pattern("h ps"), counted(plans_replayed=16)),
    "plan_warmup=2": counted(plans_captured=3, plans_issued=7),  # of equal calls the second
    "plan_batch=one": counted(plans_captured=2, plans_replayed=10),
    # whether the host comes in time is seen where it is late on purpose (late_host.py)
    "launch_ahead=on": counted(plans_replayed=16),
    "plan_end=word": counted(plans_replayed=16),
    **{f"streams={n}": on_streams(min(n, 3)) for n in range(2, 9)},
    "fork=any": on_streams(3, prompt=3),
    "validate=writes": on_streams(3),
    "validate=all": on_streams(3),
}  # fmt: skip

assert SHOWS.keys() <= {*map(str, CASES)}, "of values alone"
SHOWN = [(case,) for case in CASES if str(case) not in REFUSED]


@pytest.mark.parametrize(("case",), share(SHOWN, every=5, slow=2), ids=str)
def test_a_value_shows_what_it_does(room, case):
    here = room("qwen2", "embedded")
    if here.refusal(case):
        return
    with here.engine.variant(case.without) as off, here.engine.variant(case.toggles) as on:
        seen = Seen.of(off), Seen.of(on)
        cycle = on.cycle(N_UBATCH + 2, 2)
        few = on.programs(5, 1) if case.toggles.streams != "1" else []
    assert check_cycle(cycle).safe and search(few, range(42)) == []
    shown = SHOWS.get(str(case), lambda off, on: off.same == on.same)
    assert shown(*seen), [s.same for s in seen]


# what a device lacks ------------------------------------------------------------------------------


# where a capability is said by another
FIELDS = {"compute_streams": ("n_streams", None), "in_stream": ("one_order", False)}
NEEDS = [(case, need) for case in CASES for need in facts_of(case.name, case.value, Need)]


@pytest.mark.parametrize(("case", "need"), NEEDS, ids=str)
def test_a_device_that_lacks_one_thing_refuses(case, need):
    """And one that has everything does not. Which capability, why, what to use: in one line."""
    able = Capabilities(True, True, True, True, 9, programmatic=True)
    settle(case.toggles, able, "null")
    field, value = FIELDS.get(need.capability, (need.capability, need.least - 1))
    if field == "n_streams":  # one more is for copies
        value = need.least - (need.capability == "n_streams")
    poorer = replace(able, **{field: value})
    with pytest.raises(DeviceError) as refused:
        settle(case.toggles, poorer, "null")
    said = str(refused.value)
    assert f"{case}" in said and "null device" in said and "; use " in said and "\n" not in said


@pytest.mark.parametrize("sync", [mode for mode in SyncMode if mode != SyncMode.AUTO])
def test_a_plan_of_a_whole_step_has_no_wait_within(sync):
    toggles = Toggles(plans="ours", plan_scope="step", sync=sync)
    rule = Ordering.of(toggles).rule
    waits = rule.blocking or rule.wait_after
    with pytest.raises(UsageError) if waits else nullcontext():
        settle(toggles, Capabilities(True, True, True, True, 9), "null", unsafe=True)


@pytest.mark.parametrize("pdl", ["off", "on"])
@pytest.mark.parametrize("fuse", ["off", "on"])
def test_launches_are_marked_where_the_device_can(tiny_model, monkeypatch, fuse, pdl):
    def able(name: str, threads: int):
        return open_backend(programmatic=True) if name == "null" else base.open_backend(name)

    monkeypatch.setattr(load, "open_backend", able)
    with wb.Engine.load(
        tiny_model("tiny-llama", "Q8_0"), device="null", n_ctx=64,
        toggles=Toggles(fuse=fuse, pdl=pdl),
    ) as engine:  # fmt: skip
        launches = [c for c in engine.program().singly() if isinstance(c, Launch)]
    marked = {(c.programmatic, c.stream.backend) for c in launches}
    assert marked == {(False, 0), (pdl == "on", 1)}
