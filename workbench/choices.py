"""What toggles can be: their values, each with a word on what it does."""

from enum import StrEnum
from typing import Self


class Choice(StrEnum):
    """A value of a toggle. word: what it does, for a person who chooses."""

    word: str

    def __new__(cls, value: str, word: str) -> Self:
        made = str.__new__(cls, value)
        made._value_, made.word = value, word
        return made


class SyncMode(Choice):
    """Where `program.lower` puts the host's waits before a split (llama.cpp #17795).

    Letters: `s` the host waits, `c` blocking copy, `a` asynchronous copy, `g` the split's work,
    `r` an event is recorded, `w` the device waits for it. llama.cpp before the change is PER_COPY
    with copies on their own stream. What was merged is COPY_BOUNDARY on the compute stream. The
    other modes and streams are what the thread argued about; EVENT_GUARDED and the packed
    ones go beyond it.
    """

    PER_COPY = "per_copy", "scscg: a wait before every copy, each copy blocks; before #17795"
    BLOCKING_COPIES = "blocking_copies", "sccccsg: one wait before all blocking copies, one after"
    COPY_BOUNDARY = "copy_boundary", "saaaasg: asynchronous copies between two waits; as merged"
    WRITE_READ_BOUNDARY = "write_read_boundary", "aaaasg: only the wait between copies and graph"
    IMPLICIT = "implicit", "aaaag: no wait; stream order keeps copies before the graph"
    PACKED_IMPLICIT = "packed_implicit", "ag: as implicit, but all inputs are one copy"
    EVENT_GUARDED = "event_guarded", "saaaarwg: one wait; the graph waits for an event after copies"
    PACKED = "packed", "sasg: as copy_boundary, but all inputs are one copy"
    AUTO = "auto", "the safe mode with the fewest waits on the device; every result names it"


class CopyStream(Choice):
    """Which stream input copies ride. On their own stream, nothing but the host's waits orders a
    copy against the device's work."""

    AUTO = "auto", "own for blocking copies and event_guarded, as in llama.cpp; else compute"
    OWN = "own", "a stream of their own: only waits order copies against the graph"
    COMPUTE = "compute", "the graph's stream: its order keeps copies before the graph"


class HostSource(Choice):
    """What memory input values are copied from. A driver may stage PAGEABLE memory and make the
    call wait. Any memory may be read late. A ring has a buffer for each of the last steps. Before
    the host writes a buffer again, it waits for the copies from it. Behind a step that the host
    waited for, the first buffer is taken again."""

    PINNED = "pinned", "page-locked memory, as in llama.cpp"
    PAGEABLE = "pageable", "ordinary memory, which the driver may stage first"
    PINNED_RING_2 = "pinned_ring_2", "page-locked, two buffers in turn"
    PINNED_RING_4 = "pinned_ring_4", "page-locked, four buffers in turn"


class NCopies(Choice):
    """How many buffers a device has for each input. Several buffers are a ring: before a copy the
    host waits only for the graph that read the buffer last, not for all the device's work.

    llama.cpp has 4 with pipeline parallelism and else 1. One device, or a tensor override, rules
    its pipeline parallelism out; here several need only events. llama.cpp's n_copies also copies
    what the host writes; here the ring of HostSource does."""

    ONE = "1", "one buffer: the host waits for the device's work before it overwrites it"
    FOUR = "4", "four in turn: the host waits only for the graph that read one last"


class InputOrder(Choice):
    """Which of a split's input copies come first. There are two kinds of inputs: the host writes
    some, and another backend computes the others. GRAPH: first the kind that the split uses first.
    USER_FIRST: first what the host writes (llama.cpp #28874)."""

    GRAPH = "graph", "in the order in which the split uses them"
    USER_FIRST = "user_first", "what the host writes first, then what other splits computed"


class StepWait(Choice):
    """Which steps end with a wait of the host. With OUTPUTS a prompt of several ubatches is a train
    with one wait, at its end."""

    EVERY = "every", "the host waits at the end of every step"
    OUTPUTS = "outputs", "only after steps that return logits, so ubatches of a prompt overlap"


class Results(Choice):
    """How logits come to the host. DIRECT spares the step a copy behind its last kernel. It holds
    for up to 8 rows of logits, where the kernels that write them are bound by reading weights.
    With BEHIND the next step may be submitted, and run, before the results of this one are there.
    There are two buffers of results, so the host waits for a step before it issues the second
    behind it."""

    COPY = "copy", "the device's memory has them first, and a copy brings them, as in llama.cpp"
    DIRECT = (
        "direct",
        "the last kernel writes up to 8 rows of them into page-locked host memory",
    )
    BEHIND = "behind", "a copy on the copy stream brings them while the next step runs"


class GraphReuse(Choice):
    """What happens to the graph and program of a step (llama.cpp #8366), and so how the cache is
    stored to. All but REBUILD keep them by step shape.

    PATCH_POINTERS: cache stores are copies to views of cells in a row, so the address of each
    changes from token to token, and is patched. POINTER_TABLE (#9017): the copies read where to
    from a table, one more input, with an entry for each store. SET_ROWS (#14482), also of REBUILD:
    two inputs have a row for each token. The first two want the cells of a step in a row, and have
    no launch that joins RoPE and store (fuse_rope_store). The ways are equal to the bit, but for
    one launch: on CUDA of compute capability 9.0 or later, the joined one also norms heads (of
    qwen3) for up to 8 tokens, and rounds. So where it is on, copies are compared with rows as what
    rounds."""

    REBUILD = "rebuild", "graph and program are built from nothing for every step"
    PATCH_POINTERS = "patch_pointers", "kept by step shape; every store's address is patched"
    POINTER_TABLE = "pointer_table", "kept by step shape; stores look up their cell in a table"
    SET_ROWS = "set_rows", "kept by step shape; cache rows are an input"


class Redo(Choice):
    """Whether a phase is done again where its result is kept. What it makes is dropped, so that a
    step costs that phase more and nothing else changes."""

    OFF = "off", "what the phase made is kept with the program"
    ON = "on", "done again for every step that reuses a program, and dropped"


class KVGrowth(Choice):
    """How many cells attention looks at. With FULL the shape of a step never changes; cells that
    nobody owns are masked."""

    STEP = "step", "up to the last cell in use, rounded up to n_kv_pad"
    GEOMETRIC = "geometric", "rounded up to a power of two, or half as much more, times n_kv_pad"
    FULL = "full", "the whole cache, masked: one shape for all depths"


class KVCacheKind(Choice):
    """Whose cells the cache has."""

    UNIFIED = "unified", "any sequence has any cell, and every token's mask spans them all"
    PER_SEQUENCE = "per_sequence", "each sequence has as many cells of its own (llama.cpp: streams)"


class SkipMaskedKV(Choice):
    """Which masked cells attention leaves unread (llama.cpp #14924). All see the same mask, and
    add the same terms in the same order."""

    OFF = "off", "none: masked cells are read, and count for nothing"
    IN_LOOP = "in_loop", "tiles that are masked for all their tokens, seen as they come (#13584)"
    TAIL = "tail", "all behind the last 256 cells that a token sees; a kernel looks for them first"
    CLASSES = "classes", "every 64 cells that a token does not see; what it sees whole has no mask"
    AUTO = "auto", "by size: classes for long prompts, tail for sequences with deep caches, or none"


class SkipGate(Choice):
    """Where skipping is on."""

    REFERENCE = "reference", "the proposal's: n_kv a multiple of 256, and 1024 tokens or 2 regions"
    ALWAYS = "always", "in every step"
    NEVER = "never", "in no step"


class SlotChoice(Choice):
    """Which free slot a request gets. A slot keeps the cells of its last request, and what a new
    one has in common with it is not computed again."""

    LONGEST_PREFIX = (
        "longest_prefix",
        "the one that has most of the prompt, else the longest idle",
    )
    LOWEST_FREE = "lowest_free", "the one with the lowest number"


class Defrag(Choice):
    """Whether cells of a cache that all share are moved together. A cache with a region for each
    sequence has no holes."""

    OFF = "off", "cells stay where they are, unless a step finds none in a row"
    CELLS = "cells", "holes are filled from behind where attention looks at fewer cells then"


class BatchSizes(Choice):
    """How many tokens, sequences and outputs a step has. With PADDED steps of nearly as many share
    a program and a plan; what is added sees nothing, and is stored nowhere."""

    EXACT = "exact", "those of the work"
    PADDED = "padded", "rounded up, so that there are few shapes"


class SampleOn(Choice):
    """Where tokens are drawn from logits. A device that draws them goes on with them itself: no
    logits come to the host, and the next step may be issued before anybody knows its tokens."""

    HOST = "host", "on the host, from the logits of each step"
    DEVICE = "device", "by a kernel behind the output; the host is given the tokens"


class AttnKernel(Choice):
    """Which kernels compute attention."""

    AUTO = "auto", "what is fastest for the shape"
    VEC = "vec", "one token of a sequence at a time, no tiles of queries"
    TILE = "tile", "tiles of queries, plain multiply-add"
    MMA = "mma", "tiles of queries, matrix units; CUDA, caches of F16"


class KVParts(Choice):
    """Into how many parts attention splits the cells, which are then combined in a fixed order."""

    OFF = "off", "one"
    PARALLEL_BLOCKS = "parallel_blocks", "as many for each query row as fill the device"
    STREAM_K = "stream_k", "every block has as many tiles, which may be of several query rows"
    AUTO = "auto", "by size: parallel_blocks, or one where a head's cells are few"


class Activations(Choice):
    """What products are given.

    Q8: for quantised weights activations quantised to 8 bits in blocks of 32, once for all products
    that share them, and integer dot products (as llama.cpp does). For float weights float32, which
    a backend may round to the weights' type where tokens are many. FLOAT rounds nothing.
    """

    Q8 = "q8", "8-bit activations for quantised weights, integer dot products"
    FLOAT = "float", "float32 activations and decoded weights: slow, the yardstick"


class Switch(Choice):
    OFF = "off", "separate launches"
    ON = "on", "one launch"


class Half(Choice):
    """Whether norms are computed in two halves (graph/defer.py). From two tokens on that costs a
    GPU more than it saves: ONE leaves such steps alone."""

    OFF = "off", "a norm ends before the next product begins"
    ON = "on", "the norm's scale is applied after the product, which need not wait for it"
    ONE = "one", "on, in steps of one token"


class Pdl(Choice):
    """Programmatic dependent launch."""

    OFF = "off", "a kernel starts after the one in front of it has ended"
    ON = "on", "a kernel starts early and waits on the device; compute capability 9.0 or later"


class PlanRule(Choice):
    """When commands of a device are captured as a plan and replayed (llama.cpp #16548)."""

    OFF = "off", "every command is issued by a call of its own"
    PR = "pr", "as proposed: as many splits on the same backends are updated, else all anew"
    TODAY = "today", "llama.cpp's: captured at the second equal call, launches after a change"
    OURS = (
        "ours",
        "by structure: replay equal work, update what differs in addresses, else capture",
    )


class PlanScope(Choice):
    """What is in a plan. STEP wants an ordering without a wait of the host between the first copy
    and the last launch. Of several devices each has a plan, which waits in front for all that its
    part of the step needs, also for room on the next device. So devices that overlap in a train of
    ubatches (step_wait=outputs) take turns with STEP, unless inputs have several buffers."""

    SPLIT = "split", "the launches of each split"
    STEP = (
        "step",
        "input copies, launches, copies of results: all of a step where one device is; several "
        "devices overlap only with n_copies=4",
    )


class PlanWarmup(Choice):
    """How many equal calls a capture wants."""

    AUTO = "auto", "2 with plans=today, else 0"
    NONE = "0", "the first call is captured"
    TWO = "2", "the second of two equal calls is captured; a change begins again"


class PlanEvict(Choice):
    """Which plans go."""

    AUTO = "auto", "as the rule has it: never with pr, idle with today, lru with ours"
    NEVER = "never", "none, as long as programs live"
    IDLE = "idle", "what was not replayed for 10 s, looked for every 5 s"
    LRU = "lru", "the least recently replayed of more than 256"


class PlanBatch(Choice):
    """Which steps have plans."""

    ANY = "any", "steps of any number of tokens"
    ONE = "one", "steps of one token, llama.cpp's rule until 2026"


class LaunchAhead(Choice):
    """When the plan of a step is launched, where it is a step like the one before (a token more of
    each sequence, in the same shape). Traced steps are launched when they are submitted."""

    OFF = "off", "when the step is submitted"
    ON = "on", "while the device computes the step before; it waits there for the step's inputs"


class PlanEnd(Choice):
    """How the host learns that the plan of a step is over, where it waits for that plan alone. A
    GPU raises an event some microseconds behind the plan. A word comes sooner."""

    EVENT = "event", "by an event behind the plan, as for every other step"
    WORD = "word", "by a word of pinned memory that the plan's last kernel writes"


class Streams(Choice):
    """On how many streams of a device a step may compute side by side."""

    ONE = "1", "everything on one stream"
    TWO = "2", "up to two branches side by side"
    THREE = "3", "up to three: Q, K and V"
    FOUR = "4", "up to four"
    FIVE = "5", "up to five"
    SIX = "6", "up to six"
    SEVEN = "7", "up to seven"
    EIGHT = "8", "up to eight, llama.cpp's most"


class Fork(Choice):
    """Where a step may leave its stream (llama.cpp #16991)."""

    QKV = "qkv", "Q, K and V at attn_norm, steps of one token; llama.cpp's rule"
    THREE_WAY = "three_way", "wherever three nodes read a result, steps of one token"
    ANY = "any", "wherever branches gain by the costs of their ops; nested joins, any tokens"


class BranchFusion(Choice):
    """Whether fused nodes may have parts of several branches. Where they do, the fork is gone."""

    AUTO = "auto", "what takes less time by the costs of the ops; joined with streams=1"
    JOINED = "joined", "parts of any branches are joined: Q, K and V are one launch"
    INSIDE = "inside", "only parts of one branch are joined, also with streams=1"


class Lifetimes(Choice):
    """When bytes of the arena may be used again. One stream makes all three equal."""

    SERIAL = "serial", "behind the last reader in graph order: wrong beside concurrent streams"
    INTERLEAVED = "interleaved", "the same with branches in turn; llama.cpp's: protects no source"
    VISIBILITY = "visibility", "behind all accesses that the next user's stream knows to be over"


class Validate(Choice):
    """What a step with branches is checked for before it is issued. One that fails runs on one
    stream."""

    OFF = "off", "nothing"
    WRITES = "writes", "writes of one branch against writes of another; llama.cpp's check"
    ALL = "all", "the hazard checker: every access against every other"
