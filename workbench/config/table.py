"""The table of toggles: one row each, and nothing about a toggle is said elsewhere.

A row is a class with the toggle's values. Its decorator says what is true of the toggle: its name,
what it decides, the room in `workbench/` that reads it, the thread it comes from, and what it may
do to the answer. The class lists the values, the baseline's first. Each value has a few words on
what it does, and facts:

    Need       a device must be capable of something
    Clash      another toggle may not have a value
    Want       another toggle must have one of some values
    Auto       what another toggle's `auto` stands for beside this value
    OfServer   a server has this value, where nobody says otherwise

`Toggles`, presets, the flags of commands, `workbench toggles` and the table of rooms are made of
these rows. `engine/choose.py` holds an engine to the facts. A new toggle is a row here, a field in
`toggles.py`, and a room; `workbench/README.md` adds one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import NamedTuple, Self, TypeVar


class Need(NamedTuple):
    """A capability that a device must have for a value.

    capability: a member of `Capabilities`.
    least: the least that this member must be.
    why: why a device without the capability cannot honour the value.
    line: the whole refusal. {toggle} is `name=value`, {use} is `Row.use`, {has} what the device
        has.
    """

    capability: str
    why: str = ""
    least: int = 1
    line: str = "the {device} device cannot honour {toggle}: {why}; use {use}"


class Clash(NamedTuple):
    """A value of another toggle that excludes this value. Refused when toggles are made.

    why: the reason, and what to use.
    """

    toggle: str
    value: str
    why: str


class Want(NamedTuple):
    """This value needs another toggle to have one of some values. Refused when an engine is made,
    because a device may decide what `auto` stands for.

    values: those values; a refusal proposes the first.
    why: what this value needs them for.
    beside: the need counts only where this third toggle is not off.
    """

    toggle: str
    values: tuple[str, ...]
    why: str
    beside: str = ""


class Auto(NamedTuple):
    """What another toggle's value `auto` stands for beside this value, in every step."""

    toggle: str
    value: str


class OfServer(NamedTuple):
    """A server has this value, in addition to what `best` has for several sequences.

    on_host: also on the host device. It computes a step when the step is issued, so nothing can run
        ahead there.
    """

    on_host: bool


Fact = Need | Clash | Want | Auto | OfServer


class Choice(StrEnum):
    """A value of a toggle.

    word: what the value does, for a person who chooses.
    facts: what goes with the value.
    """

    word: str
    facts: tuple[Fact, ...]

    def __new__(cls, value: str, word: str, *facts: Fact) -> Self:
        made = str.__new__(cls, value)
        made._value_, made.word, made.facts = value, word, facts
        return made


C = TypeVar("C", bound=type[Choice])
F = TypeVar("F", Need, Clash, Want, Auto)
EXACT, ROUNDING = "exact", "rounding"
# llama.cpp's pull requests
WAITS, REUSED, PLANS = "llama.cpp #17795", "llama.cpp #8366", "llama.cpp #16548"
STREAMS, SERVING = "llama.cpp #16991", "llama.cpp #14924"
# the threads that mechanisms come from, and what each is about
THREADS = {
    WAITS: "waits around copies", REUSED: "graph reuse", PLANS: "graph plans",
    STREAMS: "concurrent streams", SERVING: "masked cells, and many sequences",
}  # fmt: skip


class Acts(StrEnum):
    """Where a toggle acts, and in words what must be there for it to act.

    A comparison asks, before it measures, whether a toggle acts in any step of its tests. Most
    toggles act on the program of a step, which can be looked at. The others act outside of it.
    """

    words: str

    def __new__(cls, value: str, words: str = "") -> Self:
        made = str.__new__(cls, value)
        made._value_, made.words = value, words
        return made

    PROGRAM = "program"
    STEPS = "steps"  # how programs, plans and results of any step are kept and issued
    LARGER_STEPS = "larger steps", "in steps of more than one token"
    NEXT_STEPS = "next steps", "in a step that goes on from the step before, by one token"
    FORKED_STEPS = "forked steps", "in steps with branches side by side"
    REQUESTS = "requests", "where requests are served, and no test has any; use wb.serve_bench"


class Row(NamedTuple):
    """What is true of a toggle.

    name: the field in `Toggles`.
    values: the class of values, each with its word and its facts.
    about: what the toggle decides.
    room: the module in `workbench/` that reads it.
    answer: what any value but the baseline's may do to the logits. `exact`: they are bit-equal to
        the baseline's. `rounding`: the last bits may differ.
    thread: where the toggle comes from; empty for a toggle of this house.
    off: the baseline's value; the first value unless given.
    family: a name that stands for all toggles `<family>_...`.
    refines: the toggle that this one refines. Where that one is off, this one means nothing.
    use: what to use where a device lacks what a value needs; `<name>=<off>` unless given.
    acts: where the toggle acts.
    needs: what a step must have for the toggle to act on its program, in words; often empty.
    """

    name: str
    values: type[Choice]
    about: str
    room: str
    answer: str
    thread: str
    off: Choice
    family: str
    refines: str
    use: str
    acts: Acts
    needs: str

    def answer_of(self, value: str) -> str:
        """`exact` or `rounding`: the class of one value."""
        return EXACT if value == self.off else self.answer

    def served(self, on_host: bool) -> str:
        """The value that a server has on such a device; empty where a server leaves the toggle
        alone."""
        found = [
            value
            for value in self.values
            for fact in value.facts
            if isinstance(fact, OfServer) and (fact.on_host or not on_host)
        ]
        return str(found[0]) if found else ""


ROWS: dict[str, Row] = {}  # by name, in the order of `Toggles`


def thread_of(name: str) -> str:
    """The thread of THREADS that a toggle belongs to: its own, or that of others in its room; empty
    where there is none."""
    row = ROWS[name]
    beside = [other.thread for other in ROWS.values() if other.room == row.room]
    return next((thread for thread in (row.thread, *beside) if thread in THREADS), "")


def toggle(
    name: str,
    about: str,
    room: str,
    answer: str,
    thread: str = "",
    *,
    off: str = "",
    family: str = "",
    refines: str = "",
    use: str = "",
    acts: Acts = Acts.PROGRAM,
    needs: str = "",
) -> Callable[[C], C]:
    """Enters a class of values as the row of a toggle. off: the first value unless given."""

    def enter(values: C) -> C:
        baseline = next(value for value in values if value == off or not off)
        instead = use or f"{name}={baseline}"
        ROWS[name] = Row(
            name,
            values,
            about,
            room,
            answer,
            thread,
            baseline,
            family,
            refines,
            instead,
            acts,
            needs,
        )
        return values

    return enter


def family(
    name: str,
    members: Mapping[str, tuple[str, ...]],
    room: str,
    answer: str,
    acts: Acts = Acts.PROGRAM,
) -> Callable[[C], C]:
    """Enters a class of values as the rows of several toggles that are alike. members: what each
    toggle decides, its thread, and maybe what a step must have for it to act."""

    def enter(values: C) -> C:
        for member, (about, thread, *needs) in members.items():
            row = toggle(
                member, about, room, answer, thread, family=name, acts=acts, needs="".join(needs)
            )
            row(values)
        return values

    return enter


# fmt: off
# rooms of several toggles
SYNC_MODES, LAYOUT, LOWER = "program/sync_modes.py", "program/layout.py", "program/lower.py"
REUSE, EXTENT, ATTEND = "engine/programs.py", "engine/cache/extent.py", "graph/attend.py"
PLAN, FORKS = "backend/plan/life.py", "graph/forks.py"

# facts of several values
ASYNC = Need("asynchronous_copies", "its copies are not asynchronous")
EVENTS = Need("events", "it has no events")
ORDERED = Need("one_order", "its events do not wait for copies")
CAPTURE = Need("capture", line="the {device} device cannot capture: {toggle}; use {use}")
# Values that a server has on every device. Requests come and go, and differ in length. So each has
# cells of its own, which no other request can use up, and masked cells are left unread. Steps have
# few shapes, so that programs and plans can be kept, whichever requests are computed together.
SERVED = OfServer(on_host=True)
# Values that a server has on any device but the host. The device goes on with the tokens that it
# draws, so that the host looks at results while the next step runs.
OFF_HOST = OfServer(on_host=False)


@toggle(
    "sync", "where the host waits around copies", SYNC_MODES, EXACT, WAITS,
    use="sync=auto, or per_copy"
)
class SyncMode(Choice):
    """Where `program.lower` puts the host's waits before a split (llama.cpp #17795).

    A word begins with the mode's pattern, in the letters of `program/letters.py`. llama.cpp before
    the change is PER_COPY with copies on their own stream. What was merged is COPY_BOUNDARY on the
    compute stream. The other modes and streams are what the thread argued about; EVENT_GUARDED and
    the packed ones go beyond it.
    """

    PER_COPY = "per_copy", "scscg: a wait before every copy, each copy blocks; before #17795"
    BLOCKING_COPIES = "blocking_copies", "sccccsg: one wait before all blocking copies, one after"
    COPY_BOUNDARY = (
        "copy_boundary", "saaaasg: asynchronous copies between two waits; as merged", ASYNC
    )
    WRITE_READ_BOUNDARY = (
        "write_read_boundary", "aaaasg: only the wait between copies and graph", ASYNC
    )
    IMPLICIT = "implicit", "aaaag: no wait; stream order keeps copies before the graph", ASYNC
    PACKED_IMPLICIT = (
        "packed_implicit", "ag: as implicit, but all inputs are one copy", ASYNC, OFF_HOST
    )
    EVENT_GUARDED = (
        "event_guarded", "saaaarwg: one wait; the graph waits for an event after copies",
        ASYNC, EVENTS, Need("n_streams", "it has one stream, and the event orders two", 2),
        ORDERED,
        Clash(
            "copy_stream", "compute",
            "the event orders two streams; use copy_stream=own, or sync=write_read_boundary",
        ),
    )
    PACKED = "packed", "sasg: as copy_boundary, but all inputs are one copy", ASYNC
    AUTO = "auto", "the safe mode with the fewest waits on the device; every result names it"


@toggle(
    "copy_stream", "which stream input copies ride", SYNC_MODES, EXACT, WAITS,
    use="copy_stream=compute"
)
class CopyStream(Choice):
    """Which stream input copies ride. On their own stream, nothing but the host's waits orders a
    copy against the device's work."""

    AUTO = "auto", "own for blocking copies and event_guarded, as in llama.cpp; else compute"
    OWN = (
        "own", "a stream of their own: only waits order copies against the graph",
        Need(
            "n_streams", least=2,
            line="{toggle} needs two streams and the {device} device has {has}; use {use}",
        ),
    )
    COMPUTE = "compute", "the graph's stream: its order keeps copies before the graph", OFF_HOST


@toggle(
    "host_source", "memory that inputs are copied from", LAYOUT, EXACT, WAITS,
    needs="copies from the host to a device"
)
class HostSource(Choice):
    """What memory input values are copied from. A driver may stage PAGEABLE memory and make the
    call wait. Any memory may be read late. A ring has a buffer for each of the last steps. Before
    the host writes a buffer again, it waits for the copies from that buffer. After a step that the
    host waited for, the next step takes the first buffer."""

    PINNED = "pinned", "page-locked memory, as in llama.cpp"
    PAGEABLE = "pageable", "ordinary memory, which the driver may stage first"
    PINNED_RING_2 = "pinned_ring_2", "page-locked, two buffers in turn", EVENTS, ORDERED, OFF_HOST
    PINNED_RING_4 = "pinned_ring_4", "page-locked, four buffers in turn", EVENTS, ORDERED


@toggle("n_copies", "buffers a device has for each input", LAYOUT, EXACT, WAITS)
class NCopies(Choice):
    """How many buffers a device has for each input. Several buffers are a ring: before a copy the
    host waits only for the graph that read the buffer last, not for all the device's work.

    llama.cpp has 4 buffers with pipeline parallelism, else 1. A single device, or a tensor
    override, rules its pipeline parallelism out. Here several buffers need only events. llama.cpp's
    n_copies also multiplies the memory that the host writes; here the ring of HostSource does
    that."""

    ONE = "1", "one buffer: the host waits for the device's work before a copy overwrites it"
    FOUR = "4", "four in turn: the host waits only for the last graph that read the buffer", EVENTS


@toggle(
    "input_order", "which input goes first", LOWER, EXACT, "llama.cpp #28874",
    needs="a split with inputs of both kinds, of which the host's do not come first"
)
class InputOrder(Choice):
    """Which of a split's input copies come first. There are two kinds of inputs: the host writes
    some, and another backend computes the others. GRAPH: first the kind that the split uses first.
    USER_FIRST: first what the host writes (llama.cpp #28874)."""

    GRAPH = "graph", "in the order in which the split uses them"
    USER_FIRST = "user_first", "what the host writes first, then what other splits computed"


@toggle(
    "step_wait", "which steps the host waits for", LOWER, EXACT, WAITS,
    needs="a step that returns no logits, as all ubatches of a prompt but the last"
)
class StepWait(Choice):
    """Which steps end with a wait of the host. With OUTPUTS a prompt of several ubatches is a train
    with one wait, at its end."""

    EVERY = "every", "the host waits at the end of every step"
    OUTPUTS = (
        "outputs", "only after steps that return logits, so ubatches of a prompt overlap", OFF_HOST
    )


@toggle("results", "how logits come to the host", LAYOUT, EXACT)
class Results(Choice):
    """How logits come to the host. DIRECT spares the step a copy after its last kernel. It applies
    to up to 8 rows of logits, where the kernels that write them are bound by reading weights. With
    BEHIND the next step may be submitted, and run, before the results of this step are there.
    There are two buffers of results. So before the host issues a step, it waits for the step two
    before it."""

    COPY = "copy", "a copy brings them from the device's memory, as in llama.cpp"
    DIRECT = "direct", "the last kernel writes up to 8 rows of them into page-locked host memory"
    BEHIND = (
        "behind", "a copy on the copy stream brings them while the next step runs",
        EVENTS, Need("one_order", EVENTS.why), Need("n_streams", EVENTS.why, 2), OFF_HOST,
    )


REDONE = [
    Clash(f"redo_{layer}", "on", "every step does all of it; use graph_reuse=set_rows")
    for layer in ("build", "split", "layout", "lower", "bind")
]
IN_A_ROW = (
    Clash(
        "kv_cache", "per_sequence",
        "it stores a step's tokens in cells in a row, and cells of several sequences are not in a "
        "row; use graph_reuse=set_rows",
    ),
    Clash(
        "batch_sizes", "padded",
        "it stores every token of a step, and tokens that only pad it have no cell; use "
        "graph_reuse=set_rows",
    ),
)


@toggle(
    "graph_reuse", "how graph and program of a step are kept, and the cache is stored to",
    REUSE, EXACT, REUSED, acts=Acts.STEPS
)
class GraphReuse(Choice):
    """What happens to the graph and program of a step (llama.cpp #8366), and so how the cache is
    stored to. All values but REBUILD keep graph and program by step shape.

    PATCH_POINTERS: cache stores are copies to views of cells in a row. The address of each store
        changes from token to token, and is patched.
    POINTER_TABLE (#9017): the copies read their destinations from a table, one more input, with an
        entry for each store.
    SET_ROWS (#14482), also of REBUILD: two inputs have the cache row of each token.

    The first two need the cells of a step in a row, and have no launch that joins RoPE and store
    (fuse_rope_store). All ways give equal bits, with one exception. On CUDA of compute capability
    9.0 or later, the joined launch also norms heads (of qwen3) for up to 8 tokens, and rounds
    otherwise. Where that launch is on, the logits of the ways are held to a tolerance."""

    REBUILD = "rebuild", "graph and program are built from nothing for every step", *REDONE
    PATCH_POINTERS = (
        "patch_pointers", "kept by step shape; every store's address is patched", *IN_A_ROW
    )
    POINTER_TABLE = (
        "pointer_table", "kept by step shape; stores look up their cell in a table", *IN_A_ROW
    )
    SET_ROWS = "set_rows", "kept by step shape; cache rows are an input"


@family(
    "redo",
    {  # one for each phase whose result is kept: reuse saves what doing the phase again costs
        "redo_build": ("graph and fusions of a step", REUSED),
        "redo_split": ("where the graph is cut", REUSED),
        "redo_layout": ("where tensors lie", REUSED),
        "redo_lower": ("commands of a step", REUSED),
        "redo_bind": ("commands bound to addresses", REUSED),
    },
    REUSE, EXACT, Acts.STEPS
)
class Redo(Choice):
    """Whether a phase is done again although its result is kept. The new result is dropped. So a
    step costs that phase more, and nothing else changes."""

    OFF = "off", "what the phase made is kept with the program"
    ON = "on", "done again for every step that reuses a program, and dropped"


@toggle(
    "kv_growth", "cells that attention looks at", "engine/cache/growth.py", ROUNDING, REUSED,
    needs="a step whose cells are rounded up differently"
)
class KVGrowth(Choice):
    """How many cells attention looks at. With FULL the shape of a step never changes. Cells that no
    token owns are masked."""

    STEP = "step", "up to the last cell in use, rounded up to n_kv_pad"
    GEOMETRIC = (
        "geometric", "rounded up to a power of two, or half as much more, times n_kv_pad", SERVED
    )
    FULL = "full", "the whole cache, masked: one shape for all depths"


@toggle(
    "kv_cache", "whose cells the cache has", "engine/cache/kv_cache.py", ROUNDING, SERVING,
    needs="several sequences, as pp64+tg16@b8 has"
)
class KVCacheKind(Choice):
    """Whose cells the cache has."""

    UNIFIED = "unified", "any sequence has any cell, and every token's mask spans them all"
    PER_SEQUENCE = (
        "per_sequence", "each sequence has as many cells of its own (llama.cpp: streams)", SERVED
    )


@toggle(
    "skip_masked_kv", "masked cells that attention leaves unread", EXTENT, EXACT, SERVING,
    needs="a step that skip_gate lets skip; skip_gate=always lets every step"
)
class SkipMaskedKV(Choice):
    """Which masked cells attention leaves unread (llama.cpp #14924). With every value attention has
    the same mask, and adds the same terms in the same order."""

    OFF = "off", "none: masked cells are read, and count for nothing"
    IN_LOOP = "in_loop", "tiles masked for all their tokens, found tile by tile (#13584)"
    TAIL = "tail", "all after the last 256 cells that a token sees; a kernel finds these first"
    CLASSES = "classes", "every 64 cells that a token does not see; 64 that it sees need no mask"
    AUTO = (
        "auto", "by size: classes for long prompts, tail for sequences with deep caches, or none",
        SERVED,
    )


@toggle(
    "skip_gate", "steps in which masked cells are left unread", EXTENT, EXACT, SERVING,
    refines="skip_masked_kv", needs="a step that one gate lets skip and the other does not"
)
class SkipGate(Choice):
    """In which steps masked cells are left unread."""

    REFERENCE = "reference", "the proposal's: n_kv a multiple of 256, and 1024 tokens or 2 regions"
    ALWAYS = "always", "in every step"
    NEVER = "never", "in no step"


@toggle(
    "slot_choice", "a request's slot", "engine/slots/slots.py", ROUNDING, SERVING,
    acts=Acts.REQUESTS
)
class SlotChoice(Choice):
    """Which free slot a request gets. A slot keeps the cells of its last request. The prefix that a
    new request has in common with it is not computed again."""

    LONGEST_PREFIX = "longest_prefix", "the slot with most of the prompt, else the longest idle"
    LOWEST_FREE = "lowest_free", "the slot with the lowest number"


@toggle(
    "defrag", "holes among a server's cells", "engine/cache/defrag.py", ROUNDING, SERVING,
    acts=Acts.REQUESTS
)
class Defrag(Choice):
    """Whether cells are moved together, in a cache that all sequences share. A cache with a region
    for each sequence has no holes."""

    OFF = "off", "cells stay where they are, unless a step finds no free cells in a row"
    CELLS = "cells", "the last cells fill holes, where attention then looks at fewer cells"


@toggle(
    "batch_sizes", "tokens and sequences of a step", "engine/slots/padding.py", ROUNDING, SERVING,
    needs="a step whose size is rounded up"
)
class BatchSizes(Choice):
    """How many tokens, sequences and outputs a step has. With PADDED, steps of similar sizes share
    a program and a plan. Tokens that pad a step see nothing, and are stored nowhere."""

    EXACT = "exact", "those of the work"
    PADDED = "padded", "rounded up, so that there are few shapes", SERVED


@toggle(
    "sampling", "where a server's tokens are drawn", "engine/slots/draws.py", EXACT, SERVING,
    acts=Acts.REQUESTS
)
class SampleOn(Choice):
    """Where tokens are drawn from logits. A device that draws tokens goes on with them itself. No
    logits come to the host then, and the next step may be issued before the host knows its tokens.
    """

    HOST = "host", "on the host, from the logits of each step"
    DEVICE = "device", "by a kernel after the output; the host is given the tokens", OFF_HOST


@toggle("attn_kernel", "which kernels compute attention", ATTEND, ROUNDING, SERVING)
class AttnKernel(Choice):
    """Which kernels compute attention."""

    AUTO = "auto", "what is fastest for the shape"
    VEC = "vec", "one token of a sequence at a time, no tiles of queries"
    TILE = "tile", "tiles of queries, plain multiply-add"
    MMA = "mma", "tiles of queries, matrix units; CUDA, caches of F16"


@toggle("kv_parts", "parts that attention splits the cells into", ATTEND, ROUNDING, SERVING)
class KVParts(Choice):
    """Into how many parts attention splits the cells. Their results are combined in fixed order."""

    OFF = "off", "one part"
    PARALLEL_BLOCKS = "parallel_blocks", "as many for each query row as fill the device"
    STREAM_K = "stream_k", "all blocks have equally many tiles, also of several query rows"
    AUTO = "auto", "by size: parallel_blocks, or one part where a head's cells are few"


@toggle("activations", "what products are given", "model/decoder.py", ROUNDING)
class Activations(Choice):
    """What products are given.

    Q8: for quantised weights, activations quantised to 8 bits in blocks of 32, once for all
        products that share them, and integer dot products (as llama.cpp does). For float weights,
        float32, which a backend may round to the weights' type where there are many tokens.
    FLOAT: nothing is rounded.
    """

    Q8 = "q8", "8-bit activations for quantised weights, integer dot products"
    FLOAT = "float", "float32 activations and decoded weights: slow, the yardstick"


@toggle(
    "defer_norm", "norms in two halves, up to 8 tokens", "graph/defer.py", ROUNDING,
    needs="a step of few tokens, and of one token with defer_norm=one"
)
class Half(Choice):
    """Whether norms are computed in two halves (graph/defer.py). From two tokens on, halving costs
    a GPU more than it saves. So ONE halves norms only in steps of one token."""

    OFF = "off", "a norm ends before the next product begins"
    ON = "on", "the norm's scale is applied after the product, which need not wait for it"
    ONE = "one", "on, in steps of one token"


@family(
    "fuse",
    {  # one for each pattern of graph/fuse.py, which says what they join
        "fuse_norm_mul": ("RMS norm and its weight", "llama.cpp #14800"),
        "fuse_norm_quantize": ("a norm and the quantisation of its result", ""),
        "fuse_add_norm": ("the residual add and the norm after it", ""),
        "fuse_bias": (
            "a product and its bias", "llama.cpp #16715", "a product with a bias in the model"
        ),
        "fuse_qkv": ("the products Q, K and V", ""),
        "fuse_rope_store": ("RoPE and the cache store", "llama.cpp #16884"),
        "fuse_glu": ("gate, up and SwiGLU", "llama.cpp #16715"),
        "fuse_epilogue_quantize": ("attention or SwiGLU and the quantisation of its result", ""),
        "fuse_product_norm": (
            "a product, the residual add and half a norm", "", "norms in halves (defer_norm=on)"
        ),
    },
    "graph/fuse.py", ROUNDING
)
class Switch(Choice):
    OFF = "off", "separate launches"
    ON = "on", "one launch"


@toggle("pdl", "programmatic dependent launch", LOWER, EXACT, "llama.cpp #22522")
class Pdl(Choice):
    """Programmatic dependent launch."""

    OFF = "off", "a kernel starts after the kernel before it has ended"
    ON = (
        "on", "a kernel starts early and waits on the device; compute capability 9.0 or later",
        Need(
            "programmatic",
            "it has no programmatic dependent launch (CUDA, compute capability 9.0 or later)",
        ),
    )


@toggle(
    "plans", "when a device's commands are captured and replayed", PLAN, EXACT, PLANS,
    acts=Acts.STEPS
)
class PlanRule(Choice):
    """When commands of a device are captured as a plan and replayed (llama.cpp #16548)."""

    OFF = "off", "every command is issued by a call of its own"
    PR = (
        "pr", "as proposed: as many splits on the same backends are updated, else all anew",
        CAPTURE, Auto("plan_warmup", "0"), Auto("plan_evict", "never"),
    )
    TODAY = (
        "today", "llama.cpp's: captured at the second equal call, launches after a change",
        CAPTURE, Auto("plan_warmup", "2"), Auto("plan_evict", "idle"),
    )
    OURS = (
        "ours", "by structure: replay equal work, update what differs in addresses, else capture",
        CAPTURE, Auto("plan_warmup", "0"), Auto("plan_evict", "lru"),
    )


@toggle(
    "plan_scope", "what is in a plan", "program/plans.py", EXACT, PLANS, refines="plans"
)
class PlanScope(Choice):
    """What is in a plan. STEP needs an ordering without a wait of the host between the first copy
    and the last launch. Of several devices each has a plan of its own. Before it begins, it waits
    for all that its part of the step needs, also for room on the next device. So devices that would
    overlap in a train of ubatches (step_wait=outputs) take turns with STEP, unless inputs have
    several buffers."""

    SPLIT = "split", "the launches of each split"
    STEP = (
        "step",
        "input copies, launches, copies of results: all of a step where one device is; several "
        "devices overlap only with n_copies=4",
        Want(
            "sync", (SyncMode.PACKED_IMPLICIT, SyncMode.IMPLICIT, SyncMode.EVENT_GUARDED),
            "the host waits between the first copy and the last launch", beside="plans",
        ),
    )


@toggle(
    "plan_warmup", "equal calls before a capture", PLAN, EXACT, "llama.cpp #19754",
    refines="plans", acts=Acts.STEPS
)
class PlanWarmup(Choice):
    """How many equal calls a capture wants."""

    AUTO = "auto", "2 with plans=today, else 0"
    NONE = "0", "the first call is captured"
    TWO = "2", "the second of two equal calls is captured; a change begins again"


@toggle(
    "plan_evict", "which plans are evicted", PLAN, EXACT, PLANS, refines="plans", acts=Acts.STEPS
)
class PlanEvict(Choice):
    """Which plans are evicted."""

    AUTO = "auto", "as the rule has it: never with pr, idle with today, lru with ours"
    NEVER = "never", "none, as long as their programs live"
    IDLE = "idle", "plans that were not replayed for 10 s, looked for every 5 s"
    LRU = "lru", "the least recently replayed plan, where there are more than 256"


@toggle(
    "plan_batch", "which steps have plans", PLAN, EXACT, PLANS, refines="plans",
    acts=Acts.LARGER_STEPS
)
class PlanBatch(Choice):
    """Which steps have plans."""

    ANY = "any", "steps of any number of tokens"
    ONE = "one", "steps of one token, llama.cpp's rule until 2026"


AHEAD = [
    Want(
        name, values,
        "a launch ahead needs a program that is kept as it is, and a plan of a whole step that "
        "begins with one copy of all inputs",
    )
    for name, values in {
        "plans": (PlanRule.OURS, PlanRule.PR, PlanRule.TODAY),
        "plan_scope": (PlanScope.STEP,),
        "sync": (SyncMode.PACKED_IMPLICIT,),
        "copy_stream": (CopyStream.COMPUTE,),
        "host_source": (
            HostSource.PINNED, HostSource.PINNED_RING_2, HostSource.PINNED_RING_4
        ),
        "results": (Results.DIRECT, Results.COPY),
        "n_copies": (NCopies.ONE,),
        "graph_reuse": (GraphReuse.SET_ROWS, GraphReuse.POINTER_TABLE),
    }.items()
]


@toggle(
    "launch_ahead", "when the plan of a step like the one before is launched", PLAN, EXACT,
    acts=Acts.NEXT_STEPS
)
class LaunchAhead(Choice):
    """When the plan of a step is launched that is like the step before it: one more token of each
    sequence, in the same shape. Traced steps are launched when they are submitted."""

    OFF = "off", "when the step is submitted"
    ON = (
        "on", "while the device computes the step before; it waits there for the step's inputs",
        *AHEAD,
    )


@toggle(
    "plan_end", "how the host learns that a plan is over", PLAN, EXACT, refines="launch_ahead",
    acts=Acts.NEXT_STEPS
)
class PlanEnd(Choice):
    """How the host learns that the plan of a step is over, where it waits for that plan alone. A
    GPU raises an event some microseconds after the end of the plan. A word comes sooner."""

    EVENT = "event", "by an event recorded after the plan, as for every other step"
    WORD = (
        "word", "by a word of pinned memory that the plan's last kernel writes",
        Want("launch_ahead", (LaunchAhead.ON,), "the word holds the number of a gate's launch"),
    )


def side_by_side(n: int) -> list[Need]:
    """What a device must be capable of to compute on n streams. One more stream is for copies."""
    offers = "the {device} device cannot honour {toggle}: it offers {has}; use streams={has}"
    return [Need("compute_streams", least=n, line=offers), Need("in_stream", ORDERED.why)]


@toggle(
    "streams", "streams that compute side by side", FORKS, EXACT, STREAMS,
    needs="a step that forks; fork=qkv and three_way fork steps of one token"
)
class Streams(Choice):
    """On how many streams of a device a step may compute side by side."""

    ONE = "1", "everything on one stream", Auto("branch_fusion", "joined")
    TWO = "2", "up to two branches side by side", *side_by_side(2)
    THREE = "3", "up to three: Q, K and V", *side_by_side(3)
    FOUR = "4", "up to four", *side_by_side(4)
    FIVE = "5", "up to five", *side_by_side(5)
    SIX = "6", "up to six", *side_by_side(6)
    SEVEN = "7", "up to seven", *side_by_side(7)
    EIGHT = "8", "up to eight, llama.cpp's most", *side_by_side(8)


@toggle(
    "fork", "where a step leaves its stream", FORKS, EXACT, STREAMS, refines="streams",
    needs="a step that forks elsewhere by one rule than by the other"
)
class Fork(Choice):
    """Where a step may leave its stream (llama.cpp #16991)."""

    QKV = "qkv", "Q, K and V at attn_norm, steps of one token; llama.cpp's rule"
    THREE_WAY = "three_way", "wherever three nodes read a result, steps of one token"
    ANY = "any", "wherever branches gain by the costs of their ops; nested joins, any tokens"


@toggle(
    "branch_fusion", "fusion where forks are", "graph/branch_fusion.py", ROUNDING, STREAMS,
    needs="a fused node with parts of several branches (fuse=on)"
)
class BranchFusion(Choice):
    """Whether fused nodes may have parts of several branches. Such a node takes the place of the
    fork."""

    AUTO = "auto", "what takes less time by the costs of the ops; joined with streams=1"
    JOINED = "joined", "parts of any branches are joined: Q, K and V are one launch"
    INSIDE = "inside", "only parts of one branch are joined, also with streams=1"


@toggle(
    "lifetimes", "when memory is used again", "graph/arena.py", EXACT, STREAMS,
    off="visibility", refines="streams", needs="memory that branches would use again at once"
)
class Lifetimes(Choice):
    """When bytes of the arena may be used again. One stream makes all three equal."""

    SERIAL = "serial", "after the last reader in graph order: wrong with concurrent streams"
    INTERLEAVED = "interleaved", "the same with branches by turns; llama.cpp's: protects no source"
    VISIBILITY = "visibility", "when the next user's stream knows that all accesses are over"


@toggle(
    "validate", "what branches are checked for", "program/branches.py", EXACT, STREAMS,
    refines="streams", acts=Acts.FORKED_STEPS
)
class Validate(Choice):
    """What a step with branches is checked for before it is issued. A step that fails the check
    runs on one stream."""

    OFF = "off", "nothing"
    WRITES = "writes", "writes of one branch against writes of another; llama.cpp's check"
    ALL = "all", "the hazard checker: every access against every other"
# fmt: on


# names that stand for all toggles `<name>_...`
FAMILIES = tuple(sorted({row.family for row in ROWS.values() if row.family}))


def idle(was: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Why nothing that differs between two sets of toggles acts in any test, by what the rows say
    of toggles; empty where something may act, and where nothing differs. was, now: the value of
    each toggle."""
    why = [_idle(ROWS[name], was, now) for name in was if was[name] != now[name]]
    return "; ".join(dict.fromkeys(why)) if all(why) else ""


def _idle(row: Row, was: Mapping[str, str], now: Mapping[str, str]) -> str:
    of = row.refines
    if row.acts == Acts.REQUESTS:
        return f"{row.name} acts {row.acts.words}"
    if of and was[of] == now[of] == ROWS[of].off:
        return f"{row.name} changes nothing while {of}={was[of]}; give {of} another value"
    return ""


# toggle and value -> the facts that go with it
FACTS = {(row.name, str(v)): v.facts for row in ROWS.values() for v in row.values if v.facts}
CLASHES = [(*of, fact) for of, facts in FACTS.items() for fact in facts if isinstance(fact, Clash)]


def facts_of(name: str, value: str, kind: type[F]) -> list[F]:
    """The facts of one kind that go with a value of a toggle."""
    return [fact for fact in FACTS.get((name, value), ()) if isinstance(fact, kind)]
