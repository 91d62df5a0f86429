"""Plans on the GPU: CUDA graphs give the bits that eager issue gives, follow changed addresses,
keep their programmatic edges, and go without a trace."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import workbench as wb
from tests.contract.test_contract_logits import engine, one_by_one, tokens_for  # noqa: F401 - a fixture
from tests.gates import hold
from workbench.backend.cuda.device.backend import CudaBackend
from workbench.backend.cuda.device.graph_nodes import COPIES, GraphArguments, commands_of
from workbench.backend.cuda.device.graphs import CudaGraph
from workbench.backend.cuda.kernels.cublas import PRODUCT
from workbench.backend.issue.issued import Issued, Plannable, in_order
from workbench.common.errors import DeviceError
from workbench.config import Toggles
from workbench.graph.ir import F32, Tensor
from workbench.graph.ops import make
from workbench.program.commands import COMPUTE_STREAM, COPY_STREAM, Space

pytestmark = pytest.mark.gpu

N = 1000
RULES = [
    {"plans": "ours"}, {"plans": "ours", "plan_warmup": "2"}, {"plans": "today"}, {"plans": "pr"},
]  # fmt: skip
STEP: dict[str, str] = {"plan_scope": "step", "sync": "implicit"}
FORKED: dict[str, str] = {"plan_scope": "step", "sync": "event_guarded", "copy_stream": "own"}
SCOPES: list[dict[str, str]] = [{"plan_scope": "split"}, STEP, FORKED]
FUSED = {"fuse": "on", "activations": "q8"}


def captured_of(used: wb.Engine) -> list[CudaGraph]:
    plans: Any = used.issuer.plans
    return [plan.captured for plan in plans if plan.captured is not None]


# engines ------------------------------------------------------------------------------------------


def feed(used: wb.Engine, tokens: Sequence[int]) -> np.ndarray:
    """A prompt that cuBLAS multiplies, 8 tokens, and single ones, twice as if it were anew."""
    rows = []
    for _ in range(2):
        used.reset()
        rows.append(used.prefill(tokens[:40], outputs="all"))
        rows.append(used.step(tokens[40:48], outputs="all"))
        rows.append(used.prefill(tokens[48:88]))  # the shape of the first but for its outputs
        rows.append(one_by_one(used, list(tokens[88:100])))
    return np.concatenate(rows)


@pytest.mark.parametrize("scope", SCOPES, ids=["split", "step", "forked"])
@pytest.mark.parametrize(
    ("preset", "quant", "more"),
    [
        ("tiny-llama", "Q4_0", {}), ("tiny-qwen3", "F16", {}), ("tiny-llama", "Q8_0", FUSED),
        ("tiny-qwen3", "Q4_K", {**FUSED, "pdl": "on"}),
        ("tiny-llama", "Q4_0", {**FUSED, "results": "direct"}),
    ],
)  # fmt: skip
def test_replayed_logits_are_the_eager_ones(engine, backend, preset, quant, more, scope):  # noqa: F811
    if "pdl" in more and not backend.capabilities.programmatic:
        pytest.skip("has no programmatic dependent launch")
    tokens = tokens_for(preset, 100)
    shared = engine(preset, quant, "cuda")
    base = Toggles(graph_reuse="set_rows", **more)
    with shared.variant(base) as eager:
        wanted = feed(eager, tokens)
    for rule in RULES:
        with shared.variant(replace(base, **rule, **scope)) as planned:
            found = feed(planned, tokens)
            counters = planned.counters
        assert np.array_equal(found, wanted), (rule, scope)
        assert counters["plans_replayed"] > 20, counters
        made = [counters[f"plans_{how}"] for how in ("captured", "updated", "reinstantiated")]
        # a prompt with all outputs and with one, 8 tokens, one token: or one, behind a warm-up
        if rule == {"plans": "pr"}:  # a prompt and a token in turns: another topology
            assert counters["plans_reinstantiated"] >= 2, counters
        assert sum(made) >= (4 if rule in ({"plans": "ours"}, {"plans": "pr"}) else 1), (rule, made)


def test_graphs_that_are_built_anew_are_replayed_too(engine):  # noqa: F811
    """Another program object for each token, of the same work at the same addresses."""
    tokens = tokens_for("tiny-llama", 100)
    shared = engine("tiny-llama", "Q4_0", "cuda")
    with shared.variant(Toggles(graph_reuse="rebuild")) as eager:
        wanted = one_by_one(eager, tokens)
    for rule in RULES:
        with shared.variant(Toggles(graph_reuse="rebuild", **rule, **STEP)) as planned:
            assert np.array_equal(one_by_one(planned, tokens), wanted), rule
            assert planned.counters["plans_replayed"] > 90


@pytest.mark.parametrize("scope", SCOPES, ids=["split", "step", "forked"])
@pytest.mark.parametrize("reuse", ["patch_pointers", "pointer_table"])
def test_stores_that_move_with_every_token_are_followed(engine, reuse, scope):  # noqa: F811
    """Their nodes are set, or their table is written: what is captured stays."""
    tokens = tokens_for("tiny-llama", 300)
    shared = engine("tiny-llama", "Q4_0", "cuda")
    with shared.variant(Toggles(graph_reuse="set_rows")) as eager:
        wanted = one_by_one(eager, tokens)
    for rule in RULES:
        toggles = Toggles(graph_reuse=reuse, **rule, **scope)
        with shared.variant(toggles) as planned:
            assert np.array_equal(one_by_one(planned, tokens), wanted), rule
            counters, graphs = planned.counters, captured_of(planned)
        if rule == {"plans": "ours"} and reuse == "patch_pointers":
            assert counters["plans_updated"] >= 290, counters
            assert sum(g.nodes_set for g in graphs) >= 290 and not sum(g.recaptured for g in graphs)
        if reuse == "pointer_table":
            assert counters["plans_replayed"] >= 290 and counters["plans_updated"] <= 4, counters


def test_more_than_512_tokens_cross_the_pads_of_the_cache(tiny_model):
    """n_kv grows twice; then the cache is empty again, and two sequences share it."""
    tokens = tokens_for("tiny-llama", 560)
    path = tiny_model("tiny-llama", "Q4_0")
    base = Toggles(graph_reuse="set_rows")

    def rows(used: wb.Engine) -> np.ndarray:
        made = [one_by_one(used, tokens)]
        used.reset()
        made.append(one_by_one(used, tokens[:20]))
        for token in tokens[20:30]:
            made.append(
                used.submit([(0, [token], "last"), (1, [(token + 1) % 1024], "last")]).wait()
            )
        return np.concatenate(made)

    with wb.Engine.load(path, device="cuda", n_ctx=1024, n_seqs=2, toggles=base) as eager:
        wanted = rows(eager)
        for scope in SCOPES:
            with eager.variant(replace(base, plans="ours", **scope)) as planned:
                assert np.array_equal(rows(planned), wanted), scope
                counters = planned.counters
            # a plan for each n_kv, and for two sequences; of results in several blocks one each
            assert 4 <= counters["plans_captured"] <= 24, counters
            assert counters["plans_replayed"] > 500 and counters["plans_issued"] == 0


def test_memory_that_grows_after_a_capture_is_followed(tiny_model):
    """Many outputs need memory that was not reserved: what was captured before is not replayed."""
    tokens = tokens_for("tiny-llama", 220)
    path = tiny_model("tiny-llama", "Q4_0")
    base = Toggles(graph_reuse="set_rows")

    def rows(used: wb.Engine) -> np.ndarray:
        first = one_by_one(used, tokens[:5])
        many = used.step(tokens[5:205], outputs="all")
        return np.concatenate([first, many, one_by_one(used, tokens[205:])])

    with wb.Engine.load(path, device="cuda", n_ctx=256, n_ubatch=256, toggles=base) as eager:
        wanted = rows(eager)
        for rule in RULES:
            for scope in SCOPES:
                with eager.variant(replace(base, **rule, **scope)) as planned:
                    assert np.array_equal(rows(planned), wanted), (rule, scope)


def test_a_destroyed_graph_is_told_and_the_engine_goes_on(engine):  # noqa: F811
    tokens = tokens_for("tiny-llama", 24)
    shared = engine("tiny-llama", "Q4_0", "cuda")
    with shared.variant(Toggles(graph_reuse="set_rows")) as eager:
        wanted = one_by_one(eager, tokens)
    for scope in SCOPES:
        with shared.variant(Toggles(graph_reuse="set_rows", plans="ours", **scope)) as planned:
            rows = [one_by_one(planned, tokens[:12])]
            graphs = captured_of(planned)
            for graph in graphs:
                graph.destroy()
            told = 0
            for token in tokens[12:]:
                while told <= len(graphs):
                    try:
                        rows.append(planned.step([token]).copy())
                        break
                    except DeviceError as error:
                        told += 1
                        assert "was destroyed and cannot" in str(error)
            assert 1 <= told <= len(graphs)
            assert np.array_equal(np.concatenate(rows), wanted), scope


def test_two_engines_replay_side_by_side(engine):  # noqa: F811
    tokens = tokens_for("tiny-llama", 30)
    shared = engine("tiny-llama", "Q4_0", "cuda")
    base = Toggles(graph_reuse="set_rows", plans="ours")
    with shared.variant(replace(base, plans="off")) as eager:
        wanted = one_by_one(eager, tokens)
    with (
        shared.variant(replace(base, **STEP)) as one,
        shared.variant(replace(base, **FORKED)) as two,
    ):
        rows = [(one.step([t]), two.step([t])) for t in tokens]
    for found in zip(*rows, strict=True):
        assert np.array_equal(np.concatenate(found), wanted)


@pytest.mark.parametrize("scope", SCOPES, ids=["split", "step", "forked"])
def test_programmatic_edges_survive_the_capture(engine, backend, scope):  # noqa: F811
    """One for each programmatic launch behind a kernel, none without `pdl`."""
    if not backend.capabilities.programmatic:
        pytest.skip("has no programmatic dependent launch")
    shared = engine("tiny-llama", "Q4_0", "cuda")
    for pdl in ("on", "off"):
        toggles = Toggles(graph_reuse="set_rows", fuse="on", pdl=pdl, plans="ours", **scope)
        with shared.variant(toggles) as planned:
            for token in (1, 2, 3):
                planned.step([token])
            for graph in captured_of(planned):
                n_edges, programmatic = graph.edges()
                assert n_edges >= len(graph.nodes) - 1 - len(planned.program(1).buffers)
                wanted = behind_kernels(planned)
                assert programmatic == wanted and (wanted > 10) == (pdl == "on")


def behind_kernels(used: wb.Engine) -> int:
    """Programmatic launches of a step's plan that have a kernel in front on their stream, and no
    wait between."""
    plans: Any = used.issuer.plans
    (work,) = {plan.work() for plan in plans} - {None}
    n, kernel_in_front = 0, False
    for stream, part in zip(work.streams, work.parts, strict=True):
        for issued in commands_of(part):
            if stream != work.stream:
                continue
            kernel = isinstance(issued.block, GraphArguments)
            n += kernel and bool(issued.same[-1]) and kernel_in_front
            kernel_in_front = kernel
    return n


@pytest.mark.alone
def test_every_cycle_gives_everything_back(engine, backend):  # noqa: F811
    """100 engines with plans, some destroyed before and some with their engine."""
    shared = engine("tiny-llama", "Q4_0", "cuda")
    toggles = Toggles(graph_reuse="set_rows", plans="ours", **STEP)
    free: list[int] = []
    device: Any = shared._loaded.backends[1]  # type: ignore[union-attr]
    for i in range(100):
        with shared.variant(toggles) as planned:
            planned.step([1])
            planned.step([2], outputs="last")
            if i % 2:
                planned.issuer.plans.clear()
                planned.step([3])
        if i % 10 == 9:
            gc.collect()
            free.append(_free(device))
            assert not [g for g in device._graphs if g._executable is not None]
    assert free[-1] >= free[0] - (4 << 20), free


def _free(device: CudaBackend) -> int:
    error, free, _ = device._driver.api.cuMemGetInfo()
    assert not error
    return int(free)


# captured graphs ----------------------------------------------------------------------------------


class Line:
    """host `given` -> device a, b = a + one, host `taken` = b. Copies ride the other stream."""

    def __init__(self, backend: CudaBackend):
        self.backend = backend
        self.device = [backend.allocate(4 * N, Space.DEVICE) for _ in range(4)]
        self.host = [backend.allocate(4 * N, Space.PINNED) for _ in range(4)]
        self.arrays = []
        for i, memory in enumerate(self.host):
            assert memory.array is not None
            self.arrays.append(memory.array.view(np.float32))
            self.arrays[i][:] = 10.0 * (i + 1)
        self.one = backend.allocate(4 * N, Space.PINNED)
        assert self.one.array is not None
        self.one.array.view(np.float32)[:] = 1.0
        backend.copy(self.device[3].address, self.one.address, 4 * N, 0, to_host=False)()
        backend.synchronize()

    def work(
        self,
        given: int = 0,
        taken: int = 2,
        adds: int = 1,
        extra: Sequence[Issued] = (),
        b: int = 1,
    ) -> Plannable:
        backend, event = self.backend, self.backend.event()
        x, y, one = (Tensor(name, F32, (1, N)) for name in ("x", "y", "one"))
        first, more = make("add", "y", x, one), make("add", "z", y, one)
        at = {x: self.device[0], one: self.device[3], first.output: self.device[b],
              y: self.device[b], more.output: self.device[b]}  # fmt: skip

        def launch(node: Any) -> Issued:
            return backend.launch(node, lambda t: at[t].address, 0, COMPUTE_STREAM)

        parts = [
            (COPY_STREAM, backend.copy(self.device[0].address, self.host[given].address, 4 * N,
                                       COPY_STREAM, to_host=False)),
            (COPY_STREAM, backend.record(event, COPY_STREAM)),
            (COMPUTE_STREAM, backend.wait(event, COMPUTE_STREAM)),
            (COMPUTE_STREAM, launch(first)),
            *((COMPUTE_STREAM, launch(more)) for _ in range(adds - 1)),
            (COMPUTE_STREAM, backend.copy(self.host[taken].address, self.device[b].address, 4 * N,
                                          COMPUTE_STREAM, to_host=True)),
            *((COPY_STREAM, issued) for issued in extra),
        ]  # fmt: skip
        issued = [part for _, part in parts]
        return Plannable(
            in_order([part.call for part in issued]), ("replay",), parts=tuple(issued),
            backend=backend, stream=COMPUTE_STREAM, streams=tuple(s for s, _ in parts),
        )  # fmt: skip

    def take(self, number: int = 2) -> float:
        """What landed in host memory `number`, which is cleared."""
        self.backend.synchronize()
        found = self.arrays[number].copy()
        self.arrays[number][:] = -1.0
        assert (found == found[0]).all()
        return float(found[0])


@pytest.fixture
def line(backend: CudaBackend) -> Iterator[Line]:
    made = Line(backend)
    yield made
    backend.synchronize()
    for memory in (*made.device, *made.host, made.one):
        memory.free()


def moved(before: Plannable, now: Plannable) -> list[int]:
    pairs = enumerate(zip(before.parts, now.parts, strict=True))
    return [i for i, (a, b) in pairs if a.addresses != b.addresses and a.block.pointers
            and a.same[0] not in ("cuEventRecord", "cuStreamWaitEvent")]  # fmt: skip


def test_a_capture_runs_nothing_and_a_launch_all(backend, line):
    line.arrays[2][:] = -1.0
    graph = backend.capture(line.work())
    assert line.take() == -1.0
    assert graph.nodes == (0, 3, 4)
    for value in (10.0, 20.0):
        line.arrays[0][:] = value
        graph.launch()
        assert line.take() == value + 1
    assert graph.capture_ns > 0 and graph.instantiate_ns > 0
    graph.destroy()


def test_changed_addresses_are_set_in_their_nodes_alone(backend, line):
    """Copies and kernels; queued launches run as they were; later updates of either kind hold."""
    before = line.work()
    graph = backend.capture(before)
    now = line.work(given=1, taken=3, b=2)
    assert len(moved(before, now)) == 3
    with hold(backend, COMPUTE_STREAM):
        graph.launch()
        assert graph.update(now, moved(before, now))
    assert line.take() == 11.0, "what was queued"
    assert (graph.nodes_set, graph.recaptured) == (1, 0), "by nodes, not by another capture"
    graph.launch()
    assert line.take(3) == 21.0 and line.take() == -1.0
    assert graph.update(before, None) and graph.recaptured == 1
    graph.launch()
    assert line.take() == 11.0
    line.arrays[1][:] = 40.0
    assert graph.update(now, moved(before, now)) and (graph.nodes_set, graph.recaptured) == (2, 1)
    graph.launch()
    assert line.take(3) == 41.0
    graph.destroy()


def test_the_nodes_of_a_graph_are_those_of_its_commands(backend, line):
    """The order in which the driver lists nodes is the order in which they were captured."""
    work = line.work(adds=4)
    graph = backend.capture(work)
    api = backend._driver.api
    assert graph.template is not None
    n = api.cuGraphGetNodes(graph.template.graph)[2]
    nodes = api.cuGraphGetNodes(graph.template.graph, n)[1]
    issued = [i for part in work.parts for i in commands_of(part) if i.block.pointers
              and i.same[0] not in ("cuEventRecord", "cuStreamWaitEvent")]  # fmt: skip
    assert n == len(issued) == len(graph.nodes)
    for node, command in zip(nodes, issued, strict=True):
        if isinstance(command.block, GraphArguments):
            error, params = api.cuGraphKernelNodeGetParams(node)
            assert not error and int(params.func) == int(command.block.function)
            assert (params.gridDimX, params.gridDimY) == command.block.grid
        else:
            assert command.same[0] in COPIES
            assert not api.cuGraphMemcpyNodeGetParams(node)[0]
    graph.destroy()


def test_another_topology_is_refused_and_launches_as_before(backend, line):
    graph = backend.capture(line.work())
    assert not graph.update(line.work(adds=3), None)
    graph.launch()
    assert line.take() == 11.0
    other = backend.capture(line.work(adds=3))
    other.launch()
    assert line.take() == 13.0
    assert other.update(line.work(given=1, adds=3), None)
    other.launch()
    assert line.take() == 23.0
    graph.destroy()
    other.destroy()


def test_what_cannot_be_captured_is_told_and_leaves_nothing(backend, line):
    sync = Issued(backend.sync_stream(COPY_STREAM), ("sync",))

    def fails() -> None:
        raise DeviceError("told to")

    for bad, reason in ((sync, "cuStreamSynchronize failed"), (Issued(fails, ("x",)), "told to")):
        with pytest.raises(
            DeviceError, match=f"its command 5 cannot be captured.*{reason}"
        ) as told:
            backend.capture(line.work(extra=[bad]))
        assert "\n" not in str(told.value)
        graph = backend.capture(line.work())
        graph.launch()
        assert line.take() == 11.0
        line.work().call()
        assert line.take() == 11.0
        graph.destroy()


def test_a_stream_that_ends_unjoined_is_joined(backend, line):
    """A copy on the other stream is the last part: what is behind the plan is behind it, too."""
    copy = backend.copy(
        line.host[3].address, line.device[0].address, 4 * N, COPY_STREAM, to_host=True
    )
    graph = backend.capture(line.work(extra=[copy]))
    line.arrays[3][:] = -1.0
    graph.launch()
    backend.sync_stream(COMPUTE_STREAM)()
    assert line.arrays[3][0] == 10.0
    graph.destroy()


def test_a_capture_while_other_work_runs(backend, line):
    """On the plan's own streams, too: it is queued work, not part of the capture."""
    with hold(backend, COMPUTE_STREAM), hold(backend, COPY_STREAM):
        line.work(taken=3).call()
        graph = backend.capture(line.work(adds=2))
        graph.launch()
    assert line.take() == 12.0 and line.take(3) == 11.0
    graph.destroy()


def test_a_plan_is_destroyed_while_its_launches_are_queued(backend, line):
    graph = backend.capture(line.work())
    with hold(backend, COMPUTE_STREAM):
        for _ in range(3):
            graph.launch()
        graph.destroy()
        graph.destroy()
        with pytest.raises(DeviceError, match="was destroyed and cannot be launched"):
            graph.launch()
    assert line.take() == 11.0
    again = backend.capture(line.work())
    again.launch()
    assert line.take() == 11.0
    again.destroy()


def test_teardown_in_any_order(line):
    """Backends of their own: the plan before, after, or never."""
    for when in ("before", "after", "never"):
        own = CudaBackend()
        rig = Line(own)
        graph = own.capture(rig.work())
        graph.launch()
        if when == "before":
            graph.destroy()
        own.close()
        if when == "after":
            graph.destroy()
        with pytest.raises(DeviceError, match="destroyed"):
            graph.launch()


@pytest.mark.alone
def test_hundred_graphs_leak_nothing(backend, line):
    work, other = line.work(), line.work(given=1, b=2)
    longer = line.work(adds=2)

    def cycle() -> None:
        graph = backend.capture(work)
        graph.launch()
        assert graph.update(other, moved(work, other)) and graph.update(work, None)
        assert not graph.update(longer, None)
        graph.launch()
        graph.destroy()

    for _ in range(20):
        cycle()
    backend.synchronize()
    before = _free(backend)
    for _ in range(100):
        cycle()
    backend.synchronize()
    gc.collect()
    assert _free(backend) >= before - (2 << 20)
    assert not [g for g in backend._graphs if g._executable is not None]


def test_products_of_cublas_are_captured_at_their_first_call(tiny_model):
    """A prompt of 600 tokens on a fresh backend, and its replay: no workspace is made in it."""
    tokens = tokens_for("tiny-llama", 600)
    path = tiny_model("tiny-llama", "F16")
    base = Toggles(graph_reuse="set_rows")
    found = []
    for more in ({"plans": "ours", **STEP}, {}):
        toggles = replace(base, **more)
        with wb.Engine.load(path, device="cuda", n_ctx=1024, n_ubatch=600, toggles=toggles) as used:
            rows = []
            for _ in range(3):
                used.reset()
                rows.append(used.prefill(tokens))
            found.append(np.concatenate(rows))
            if more:
                plans: Any = used.issuer.plans
                works = [plan.work() for plan in plans]
                products = [
                    i for w in works for part in w.parts for i in commands_of(part)
                    if i.same[:1] == (PRODUCT,)
                ]  # fmt: skip
                assert products and used.counters["plans_replayed"] == 3
    assert np.array_equal(*found)
