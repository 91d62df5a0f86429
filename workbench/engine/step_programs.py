"""From the shape of a step to its program: graph, splits, layout and commands; no addresses.

Each phase continues from the result of the phase before it. So each can be done again by itself.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, product
from math import lcm

from workbench.common.errors import UsageError
from workbench.config import EngineConfig, Lifetimes, Toggles
from workbench.engine.batch import prompt_shapes
from workbench.engine.cache.extent import skip_masked
from workbench.engine.cache.growth import growth_of
from workbench.engine.cache.kv_cache import n_regions
from workbench.engine.cache.room import Room
from workbench.engine.choose import Chosen
from workbench.engine.load import Loaded
from workbench.engine.look.phases import PhaseClock, Phases
from workbench.engine.memory import Residents
from workbench.engine.placement import Placement
from workbench.engine.programs import reuse_of
from workbench.graph.attend import attend_by
from workbench.graph.branch_fusion import fused
from workbench.graph.defer import defer
from workbench.graph.fuse import chosen
from workbench.graph.ir import Graph, Node, StepShape, Tensor
from workbench.model.blocks import CacheStores
from workbench.model.cache_graphs import copy_graph, copy_shape, shift_graph, shift_shape
from workbench.model.decoder import Model, build_graph
from workbench.program.branches import CHECKS, forked, on_one_stream, refuse_races
from workbench.program.commands import Buffer, Program
from workbench.program.first_cell import at_cell
from workbench.program.layout import Layout, Target, lay_out
from workbench.program.lower import lower
from workbench.program.plans import with_plans
from workbench.program.split import Split, assign, split
from workbench.program.sync_modes import Ordering

BackendOf = Callable[[Node], int]


def unfused_graph(
    model: Model,
    shape: StepShape,
    caches: list[tuple[Tensor, Tensor]],
    toggles: Toggles,
    cell: int = 0,
    last_tokens: Tensor | None = None,
    regions: bool = False,
) -> Graph:
    """The graph of a step on `caches` (K and V of each layer), before anything is fused.

    cell: the first cell that the step stores.
    last_tokens: as `build_graph` has it.
    regions: each of several sequences has cells of its own.
    """
    if shape.n_tokens:
        stores = CacheStores(reuse_of(toggles).store, cell)
        graph = build_graph(model, shape, caches, toggles.activations, stores, regions, last_tokens)
        graph = attend_by(graph, toggles.attn_kernel, toggles.kv_parts)
        return skip_masked(graph, toggles.skip_masked_kv, toggles.skip_gate)
    if shape.n_seqs:
        return copy_graph(caches, shape.n_kv)
    return shift_graph(model, caches, shape.n_kv)


def fused_graph(
    graph: Graph, toggles: Toggles, placement: Placement, n_streams: int
) -> tuple[Graph, BackendOf]:
    """The graph, fused as settled toggles ask for, and the backend of each of its nodes."""
    graph = defer(graph, toggles.defer_norm)
    backends = assign(graph.nodes, placement.fixed)
    fusions, choice = chosen(toggles), toggles.branch_fusion
    joined = fused(graph, fusions, backends.__getitem__, choice, n_streams, toggles.fork)
    return joined, lambda node: backends[node.parts[0] if node.parts else node]


class StepPrograms:
    """The programs of one engine's steps. Each is made when it is asked for, and none is kept.

    clock: told of every phase.
    config: the engine's own; `loaded` may have been opened with another.
    """

    def __init__(
        self,
        loaded: Loaded,
        have: Chosen,
        residents: Residents,
        clock: PhaseClock,
        config: EngineConfig,
    ):
        self._loaded, self._config = loaded, config
        self._n_regions = n_regions(have.settled, config)
        self._toggles, self._ordering, self._n_streams = have.settled, have.ordering, have.n_streams
        self._check = CHECKS[have.settled.validate]
        self.n_unforked = 0  # programs whose branches failed that check
        self._plan_scope = have.plan_scope
        self._residents = residents
        self._clock = clock
        last = loaded.backend
        self._targets = [
            Target(
                b.name,
                b.scratch_bytes,
                last.begins_early if have.programmatic and b is not loaded.backends[0] else None,
                last.capabilities.in_stream,
            )
            for b in loaded.backends
        ]

    def of(
        self,
        shape: StepShape,
        turn: int = 0,
        buffers: dict[str, Buffer] | None = None,
        phases: Phases | None = None,
        cell: int = 0,
    ) -> Program:
        """The program of a step of `shape` that stores from `cell` on; turn and buffers as
        `lay_out` has them. phases: does them, and can do each again."""
        do, toggles = (phases or Phases(self._clock)).do, self._toggles
        graph = do("graph", self._unfused, shape, cell)
        joined, backend_of = do("fuse", self._fused, graph)
        splits = do("split", self._cut, joined, backend_of)
        layout = do(
            "layout", lay_out, joined, splits, self._residents.ranges, self._targets,
            self._ordering, turn, buffers, toggles.lifetimes,
        )  # fmt: skip
        return do("lower", self._lowered, joined, splits, layout)

    def nodes_of(self, shape: StepShape) -> list[tuple[Node, int]]:
        """The nodes that a step of `shape` launches, in order, and the backend of each."""
        joined, backend_of = self._fused(self._unfused(shape, 0))
        return [(node, backend_of(node)) for node in joined.nodes]

    def refuse_races(self, most_tokens: int, n_cells: int, pad: int) -> None:
        """Raises UsageError where lifetimes let steps race. Checked are steps of one token and of
        many, at the begin of the cache and at its end, and the steps that rotate and copy cells."""
        if self._toggles.lifetimes != Lifetimes.VISIBILITY and self._n_streams > 1:
            several = product({1, most_tokens}, {min(pad, n_cells), n_cells})
            shapes = [StepShape(n_tokens, 1, n_kv) for n_tokens, n_kv in several]
            for shape in (*shapes, shift_shape(n_cells), copy_shape(n_cells)):
                self.of(shape, buffers={})

    def _unfused(self, shape: StepShape, cell: int) -> Graph:
        model, residents = self._loaded.model, self._residents
        return unfused_graph(
            model, shape, residents.caches, self._toggles, cell, residents.last_tokens,
            self._n_regions > 1,
        )  # fmt: skip

    def _fused(self, graph: Graph) -> tuple[Graph, BackendOf]:
        return fused_graph(graph, self._toggles, self._loaded.placement, self._n_streams)

    def _cut(self, graph: Graph, backend_of: BackendOf) -> list[Split]:
        splits, toggles = split(graph, backend_of), self._toggles
        return splits if self._n_streams == 1 else forked(splits, self._n_streams, toggles.fork)

    def _lowered(self, graph: Graph, splits: list[Split], layout: Layout) -> Program:
        toggles = self._toggles
        program = lower(graph, splits, layout, self._targets, self._ordering)
        if any(part.forked for part in splits):
            if self._check(splits, layout, program):
                self.n_unforked += 1
                apart = on_one_stream(splits, toggles.lifetimes)
                program = lower(graph, apart, layout, self._targets, self._ordering)
            elif not self._loaded.config.unsafe:
                refuse_races(toggles.lifetimes, self._n_streams, program)
        return with_plans(program, self._plan_scope) if self._plan_scope else program

    def several(self, n_prompt: int, n_decoded: int, laps: int) -> list[Program]:
        """See `Engine.programs`. Steps of one shape and turn share one program, apart from their
        first cells."""
        config = self._config
        room = Room(config.n_ctx, self._n_regions)
        room.check(0, n_prompt + n_decoded)
        growth = growth_of(self._toggles, config, room.n_regions)
        shapes = prompt_shapes(n_prompt, n_decoded, config.n_ubatch, growth)
        buffers = dict[str, Buffer]()
        keys, made, turn = [], dict[tuple[StepShape, int], Program](), 0
        for shape in shapes * laps:
            keys.append(key := (shape, turn))
            if key not in made:
                made[key] = self.of(*key, buffers)
            turn = self._ordering.turn_after(turn, made[key].waited)
        cells = [0, *accumulate(shape.n_tokens for shape in shapes)][:-1]
        steps = list(zip(keys, cells * laps, strict=True))
        at = {(key, cell): at_cell(made[key], cell) for key, cell in dict.fromkeys(steps)}
        return [at[step] for step in steps]

    def cycle(self, n_prompt: int, n_decoded: int) -> list[Program]:
        """See `Engine.cycle`."""
        if n_prompt < 1:
            raise UsageError(f"a prompt of {n_prompt} tokens has no steps; give at least 1")
        laps = 1
        if self._ordering.result_ring > 1:  # each program takes every turn
            laps = lcm(n := len(self.several(n_prompt, n_decoded, 1)), self._ordering.period) // n
        return as_issued(self.several(n_prompt, n_decoded, laps), self._ordering)


def as_issued(cycle: list[Program], ordering: Ordering) -> list[Program]:
    """A cycle in the order in which the host issues it. Where a step may be under way when the next
    begins, the wait for its results, and their reads, come after the commands of the next step."""
    if ordering.result_ring == 1:
        return cycle
    before = [cycle[-1], *cycle[:-1]]
    return [
        replace(p, commands=p.commands[: p.first_of_tail] + b.commands[b.first_of_tail :])
        for p, b in zip(cycle, before, strict=True)
    ]
