"""Every run of the campaign, as a row: model, test, toggles, folder.

A row is one run folder, or one JSON file, of data/results. `python -m data.measure` makes the runs,
and tables and targets look rows up by their step, so each folder is named once.

    toggles    a background, and changes to it: `all`, `all fuse=off`, `kept sync=packed`
    compared   the values that an A/B compares, `TOGGLE=BASELINE,VALUE...`, or its sets of toggles,
               `plans=off | plans=ours plan_scope=step`; of a perplexity run, the reference

Backgrounds: `baseline` (everything off), `kept` (programs kept, all else off), `all` (all on except
plans; `pdl` where the device has it), `best` (the preset).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from workbench.benchmarks.compare.until import Until
from workbench.config import CopyStream, SyncMode, Toggles
from workbench.config.toggles import clash_of

# step -> seconds it took on one H100 with a fixed number of rounds, models written included; the
# most important first. What is repeated until it is narrow takes longer on a busy host.
STEPS = {
    "plans": 275, "best": 74, "reuse": 160, "grown": 75, "decode": 150, "kernels": 110,
    "depth": 35, "load": 15, "perplexity": 150, "batches": 40, "kernels-batches": 110, "fusion": 85,
    "ablation": 60, "counters": 80, "gaps": 60, "sync": 480, "pipeline": 420, "together": 150,
    "several": 300, "skip": 180, "energy": 460,
}  # fmt: skip
SEVERAL, SKIP_STEP = "several", "skip"  # for `best` with several sequences; for long prompts
CPU_STEP = "cpu"  # on the devices of a CPU; made only where it is named
FIRST = ("llama-3-8b-q4_0", "llama-3.2-1b-bf16")  # models measured before others

DECODED = (
    "llama-3-8b-f16", "llama-3-8b-q8_0", "llama-3-8b-q4_0", "llama-3.2-1b-bf16", "qwen3-4b-q4_k_m",
)  # fmt: skip
# suffix of the folder -> what is switched off
WITHOUT = {
    "": "all",
    "-unfused": "all fuse=off defer_norm=off",  # a halved norm not joined is one launch more
    "-plain": "all pdl=off",
}
BATCHED = DECODED[:3]  # with steps of 9 to 128 tokens
TOGETHER = "llama-3.2-1b-q4_k_m"  # measured with several sequences
# sequences -> the cells of a step are rounded up to a multiple of this; with 256, every step of
# many sequences would have another shape, and so another program
PADS = {1: 256, 8: 256, 32: 1024, 128: 4096}
SCORED = ("f16", "bf16", "q8_0", "q4_0", "q4_k_m", "q5_k_m", "q6_k", "mxfp4")  # llama-3.2-1b
# Tokens computed at once: tensor cores with cuBLAS, tensor cores on decoded tiles, decode kernels.
SIZES = {512: "", 64: "-ub64", 1: "-ub1"}
# model -> tokens of the steps that are taken apart
APART = {"qwen3-4b-q4_k_m": (1,), "llama-3-8b-q4_0": (1, 64), "llama-3-8b-q8_0": (64,)}

LLAMA_8B, BF16 = "llama-3-8b-q4_0", "llama-3.2-1b-bf16"
ALONE_AND_WITH_ALL = {"alone": "kept", "with-all": "all"}
# Llama has no biases, and BF16 quantises nothing. Half of a norm is joined to a product only where
# norms are halved, so not alone.
FUSED = {
    LLAMA_8B: ("fuse", "pdl", "defer_norm", "fuse_norm_mul", "fuse_add_norm", "fuse_qkv",
               "fuse_rope_store", "fuse_glu", "fuse_norm_quantize", "fuse_epilogue_quantize",
               "fuse_product_norm"),
    BF16: ("fuse", "pdl", "defer_norm"),
}  # fmt: skip
NOT_ALONE = ("fuse_product_norm",)

SYNCED = ("llama-3.2-1b-f16", "llama-3.2-3b-q4_k_m", "qwen3-4b-q4_k_m")
OFF_AND_ON = {"off": "kept", "on": "all"}
MODES = [str(mode) for mode in SyncMode if mode != SyncMode.AUTO]
N_PIPELINED = 8192  # sixteen ubatches
PIPELINED = f"pp{N_PIPELINED},tg128"
RACED = "llama-3.2-1b-q4_0"
RING = "all host_source=pinned_ring_4"


# plans and reuse are taken apart on three models; on the others tg128 is compared
PLANNED = (BF16, LLAMA_8B, "llama-3-8b-q8_0")
COMPARED = ("llama-3.2-1b-q4_k_m", "qwen3-4b-q4_k_m", "llama-3.2-3b-q4_k_m", "llama-3-8b-f16")
ONE_COPY = "sync=packed_implicit copy_stream=compute"  # a plan of a step needs it
OFF, STEP = "plans=off", "plans=ours plan_scope=step"
# additions to a plan of a step
DIRECT, AHEAD, WORD = "results=direct", "launch_ahead=on", "plan_end=word"
WHOLE = f"{STEP} {DIRECT} {AHEAD}"
RULES = tuple(
    f"plans={rule} plan_scope={scope}"
    for rule in Toggles.values("plans")[1:]
    for scope in Toggles.values("plan_scope")
)
# background's pdl -> what is added to a plan of a step
ADDED = {
    "on": (f"{STEP} {DIRECT}", f"{STEP} {AHEAD}", WHOLE, f"{WHOLE} {WORD}"),
    "off": (WHOLE, f"{WHOLE} {WORD}"),
}
# Toggles that make sense only together: preset `best` takes the set that won as a whole. Kind of
# device -> the values that won one by one, then the sets, on a background with everything else.
EARLY = f"{WHOLE} {ONE_COPY} plan_batch=one"
TRAIN = f"{EARLY} step_wait=outputs host_source=pinned_ring_2"
ANY = TRAIN.replace("plan_batch=one", "plan_batch=any")
SETS = {
    "cuda": (f"{OFF} sync=packed copy_stream=auto step_wait=outputs", EARLY, TRAIN,
             TRAIN.replace(f" {AHEAD}", ""), ANY, f"{ANY} plan_warmup=2", f"{ANY} {WORD}"),
    "embedded": (f"{OFF} sync=auto", EARLY, EARLY.replace(f" {AHEAD}", "")),
}  # fmt: skip
# The same for several sequences: the values that won one by one; results that travel while the next
# step runs, without plans and with plans; the set that won for one sequence.
SERVED = ("sync=packed_implicit copy_stream=compute host_source=pinned_ring_2 step_wait=outputs "
          "results=behind")  # fmt: skip
SINGLY = f"{OFF} sync=auto copy_stream=auto"
SETS_SEVERAL = {
    "cuda": (SINGLY, f"{OFF} {SERVED}", f"{STEP} {SERVED}", f"{ANY} {WORD}"),
    "embedded": (SINGLY, f"{OFF} {SERVED}", f"{STEP} {SERVED}"),
}
LAYERS = tuple(name for name in Toggles.names() if name.startswith("redo_"))  # of reuse
N_FRESH = 64  # tokens of a fresh engine
PARTS_ROUNDS, PARTS_TOKENS = 20, 10  # where the parts of a token are measured: tokens of a round
SWEPT = (0, 1024, 2048, 4096, 8192, 12288, 16384)  # depths
# One slow round of five on a busy host, and an interval holds everything. So what README's first
# table shows is repeated until its interval is narrow.
PRECISE = Until(0.01, at_most_s=30.0)
PRECISE_MODES = Until(0.01, at_most_s=100.0)  # a round of every sync mode takes 8 s


def sets(*arms: str) -> str:
    """`compared` of a row that compares sets of toggles, the baseline first."""
    return " | ".join(arms)


class Row(NamedTuple):
    """One run.

    kind: the function that measures it (`steps.KINDS`).
    model: its name in folders; empty where no model is loaded.
    label: the name of the row in a table.
    sizes: tokens computed at once, for kinds that ask.
    gpus: GPUs that the machine must have.
    device: `cuda`, or a device of the CPU.
    until: a comparison is repeated at least `rounds` times, and then until its interval is narrow.
    seconds: about how long it takes on one H200, the model loaded, with `rounds` rounds; 0 where
        unknown.
    """

    step: str
    folder: str
    kind: str
    model: str = ""
    test: str = ""
    toggles: str = "all"
    compared: str = ""
    label: str = ""
    rounds: int = 5
    n_ctx: int = 1024
    sizes: tuple[int, ...] = ()
    n_ubatch: int = 512
    n_seqs: int = 1
    n_kv_pad: int = 256
    n_devices: int = 1
    gpus: int = 1
    device: str = "cuda"
    until: Until | None = None
    seconds: int = 0

    @property
    def most_s(self) -> float:
        """`seconds`; or the time for which it may be repeated, where that is longer."""
        return max(self.seconds, self.until.at_most_s if self.until else 0.0)


def modes_on(stream: str) -> list[str]:
    """The sync modes that are safe with copies on `stream`, the baseline first."""
    races = (SyncMode.IMPLICIT, SyncMode.PACKED_IMPLICIT) if stream == CopyStream.OWN else ()
    given = Toggles().to_dict() | {"copy_stream": stream}
    return [m for m in MODES if m not in races and not clash_of(given | {"sync": m})]


def _fusion() -> Iterator[Row]:
    """Every pattern of graph/fuse.py, all patterns together, halved norms and pdl: off against
    on."""
    for model, toggles in FUSED.items():
        for name in toggles:
            for background, spec in ALONE_AND_WITH_ALL.items():
                if background != "alone" or name not in NOT_ALONE:
                    folder = f"fusion-{name.replace('_', '-')}-{background}-{model}"
                    yield Row("fusion", folder, "ab", model, "tg32", spec, f"{name}=off,on",
                              until=PRECISE)  # fmt: skip


def _sync() -> Iterator[Row]:
    """Every sync mode on both copy streams and backgrounds, in the thread's tests. The first model
    also has graph reuse, and traces of some tokens: with every wait, and with the wait for logits
    alone."""
    for model in SYNCED:
        for name, spec in OFF_AND_ON.items():
            for stream in sorted(map(str, (CopyStream.OWN, CopyStream.COMPUTE))):
                toggles = f"{spec} sync=per_copy copy_stream={stream}"
                compared = f"sync={','.join(modes_on(stream))}"
                folder, tests = f"sync-{stream}-{name}-{model}", "tg128,tg256,tg512"
                shown = (model, name, stream) == (SYNCED[0], "on", CopyStream.OWN)
                until = PRECISE_MODES if shown else None
                yield Row("sync", folder, "ab", model, tests, toggles, compared, until=until)
    first = SYNCED[0]
    yield Row("sync", f"graph-reuse-{first}", "ab", first, "tg32", "baseline",
              "graph_reuse=rebuild,set_rows", "everything else off")  # fmt: skip
    yield Row("sync", f"bench-{first}", "bench", first, "pp512,tg128", "kept")
    implicit = "kept sync=implicit copy_stream=compute"
    for folder, toggles in (("sync-own-off", "kept"), ("sync-compute-off", implicit)):
        yield Row("sync", f"{folder}-{first}", "trace", first, toggles=toggles)


def _pipeline() -> Iterator[Row]:
    """A long prompt and single tokens over two GPUs: the host waits for each ubatch or for the
    last; inputs have one buffer or four, with stream order or with waits of the host; every sync
    mode that is safe in a train. Then the same on one GPU, and what orderings that race do
    (`racing.py`)."""
    train, n_ctx = f"{RING} step_wait=outputs", N_PIPELINED + 256
    modes = f"sync={','.join(modes_on(CopyStream.OWN))}"
    for name, compared, toggles, label, n_devices in (
        ("step-wait", "step_wait=every,outputs", f"{RING} n_copies=4", "two devices", 2),
        ("n-copies", "n_copies=1,4", train, "two devices, step_wait=outputs", 2),
        ("n-copies-per-copy", "n_copies=1,4", f"{train} sync=per_copy copy_stream=own",
         "the same, sync=per_copy, copy_stream=own", 2),
        ("sync", modes, f"{RING} n_copies=4 copy_stream=own",
         "two devices, step_wait=every, copy_stream=own", 2),
        ("one-device", "step_wait=every,outputs", f"{RING} n_copies=4", "one device", 1),
        ("one-device-sync", modes, f"{RING} n_copies=4 copy_stream=own",
         "one device, step_wait=every, copy_stream=own", 1),
    ):  # fmt: skip
        yield Row(
            "pipeline", f"pipeline-{name}-{LLAMA_8B}", "ab", LLAMA_8B, PIPELINED, toggles,
            compared, label, n_ctx=n_ctx, n_devices=n_devices, gpus=n_devices, until=PRECISE,
        )  # fmt: skip
    yield Row("pipeline", f"pipeline-races-{RACED}", "races", RACED, n_devices=2, gpus=2)


# model -> ms of a token on one H200, about; the expected seconds of rows follow from it
TOKEN_MS = {
    BF16: 0.9, LLAMA_8B: 1.8, "llama-3-8b-q8_0": 2.5, "llama-3.2-1b-q4_k_m": 0.6,
    "llama-3.2-3b-q4_k_m": 1.1, "qwen3-4b-q4_k_m": 1.6, "llama-3-8b-f16": 4.2,
}  # fmt: skip


# tokens of a round of `plans`: with half as many plain tokens, and two to warm up
N_TOLD = 128 + PARTS_ROUNDS * (1.5 * PARTS_TOKENS + 2) / 7.5


def _seconds(model: str, n_tokens: float, n_arms: int, more_s: float = 0.0) -> int:
    """Expected seconds of a comparison with a control: five rounds, two or three rounds to warm up,
    and its engines."""
    taken = 7.5 * n_tokens * TOKEN_MS[model] / 1e3
    return round((n_arms + 1) * (taken + 0.2 + more_s))


def _planned() -> Iterator[Row]:
    """Plans, the sets of `best`, ways to keep a graph, and depth."""
    # every rule and scope of plans, and the additions to a plan of a step, with dependent launch
    # and without; then an engine's first tokens. All arms have the ordering that plans need.
    background = f"all {ONE_COPY}"
    for model in PLANNED:
        for pdl, added in ADDED.items():
            suffix, arms = {"on": "", "off": "-plain"}[pdl], (OFF, *RULES, *added)
            yield Row(
                "plans", f"plans{suffix}-{model}", "plans", model, "tg128",
                background + (" pdl=off" if suffix else ""), sets(*arms), until=PRECISE,
                seconds=_seconds(model, N_TOLD, len(arms)),
            )  # fmt: skip
        yield Row(
            "plans", f"fresh-{model}", "fresh", model, f"tg{N_FRESH}", background,
            sets(OFF, STEP, f"{WHOLE} {WORD}"), rounds=8, seconds=_seconds(model, N_FRESH, 3, 2.0),
        )  # fmt: skip
    for model in COMPARED:
        arms = (OFF, STEP, f"{STEP} {DIRECT}", WHOLE, f"{WHOLE} {WORD}", f"{STEP} pdl=off")
        yield Row("plans", f"plans-{model}", "plans", model, "tg128", background, sets(*arms),
                  until=PRECISE, seconds=_seconds(model, N_TOLD, len(arms)))  # fmt: skip
    # the sets that preset `best` could have, beside the values that won one by one
    compared, n = sets(*SETS["cuda"]), len(SETS["cuda"])
    yield Row("best", f"best-fresh-{BF16}", "fresh", BF16, f"tg{N_FRESH},pp512", "all", compared,
              rounds=8, n_ctx=2048, seconds=_seconds(BF16, N_FRESH, n, 4.0))  # fmt: skip
    for model, more_s in {BF16: 0.4, LLAMA_8B: 1.0}.items():
        yield Row("best", f"best-{model}", "ab", model, "tg128,pp512,pp2048", "all", compared,
                  n_ctx=2048, seconds=_seconds(model, 128, n, more_s))  # fmt: skip
    # each layer of reuse disabled: its cost then is what it saves; a graph that is built anew takes
    # so long that 32 tokens are enough (#16490)
    ways = f"graph_reuse={','.join(Toggles.values('graph_reuse'))}"
    layers = sets("redo=off", *(f"{layer}=on" for layer in LAYERS))
    for model in PLANNED:
        build_s = 12 if model == BF16 else 22
        yield Row("reuse", f"reuse-layers-{model}", "ab", model, "tg128", "all", layers,
                  seconds=_seconds(model, 128, 6) + build_s)  # fmt: skip
        yield Row("reuse", f"reuse-ways-{model}", "ab", model, "tg32", "all", ways, until=PRECISE,
                  seconds=_seconds(model, 32, 4) + build_s)  # fmt: skip
    # how the cache grows, and a sweep over depth, with plans and without
    n_ctx = SWEPT[-1] + 1024
    grown = sets(
        *(f"kv_growth={how} {plans}" for plans in (OFF, WHOLE) for how in ("step", "full"))
    )
    for model, more_s in {BF16: 2.0, LLAMA_8B: 5.0}.items():
        yield Row("grown", f"sweep-{model}", "sweep", model, "", background, sets(OFF, WHOLE),
                  n_ctx=n_ctx, seconds=_seconds(model, 32 * len(SWEPT), 2, more_s))  # fmt: skip
        yield Row("grown", f"growth-{model}", "ab", model, "tg64,tg64@d8192", background, grown,
                  n_ctx=n_ctx, seconds=_seconds(model, 160, 4, more_s / 2))  # fmt: skip


# comparisons for several sequences, each on a background with all the others of a kind of device
REGIONS = "kv_cache=per_sequence kv_parts=parallel_blocks skip_masked_kv=auto"
OTHERS = {
    "cuda": f"all defer_norm=one {REGIONS} {STEP} {SERVED}",
    **dict.fromkeys(("embedded", "host"), f"kept {REGIONS} sync=auto"),
}
PARTS = f"kv_parts={','.join(Toggles.values('kv_parts'))}"
SKIPS = f"skip_masked_kv={','.join(Toggles.values('skip_masked_kv'))}"
BOTH = ("kv_cache=unified,per_sequence", "kv_growth=step,geometric,full", PARTS, SKIPS)
ON_GPU = ("fuse=off,on", "defer_norm=off,on,one", "pdl=off,on")  # compared there alone
SMALL = ("defer-norm", "pdl")  # effects of a few percent on a GPU


def _several() -> Iterator[Row]:
    """The values of preset `best` for several sequences: toggles one by one, and then sets."""
    yield from _several_on("cuda", TOGETHER, "pp512+tg32@b8,pp512+tg32@b32", 32 * 768, 32)
    # on a CPU, reading the weights of a real model hides what caches cost
    many = "pp128+tg32@b8,pp128+tg32@b32"
    for device in ("embedded", "host"):
        yield from _several_on(device, "llama-3.2-1b-q4_0", "pp32+tg16@b8", 8 * 256, 8)
        yield from _several_on(device, "tiny-llama-q8_0", many, 32 * 256, 32, 20)


def _several_on(
    device: str, model: str, tests: str, n_ctx: int, n_seqs: int, rounds: int = 5
) -> Iterator[Row]:
    """The rows of `_several` for one kind of device."""
    on_gpu = device == "cuda"
    suffix = "" if model == "llama-3.2-1b-q4_0" else f"-{model}"
    common = Row(
        SEVERAL if on_gpu else CPU_STEP, "", "ab", model, tests, OTHERS[device],
        label=f"{device}, several sequences", rounds=rounds, n_ctx=n_ctx, n_seqs=n_seqs,
        device=device,
    )  # fmt: skip

    def row(name: str, compared: str, **other: Any) -> Row:
        return common._replace(folder=f"several-{name}{suffix}", compared=compared, **other)

    for compared in (*BOTH, *(ON_GPU if on_gpu else ()), "graph_reuse=rebuild,set_rows"):
        name = compared.partition("=")[0].replace("_", "-")
        some = tests.split(",")[-1] if compared.startswith(("graph_reuse", "skip")) else tests
        if on_gpu and name in SMALL:
            yield row(name, compared, test=some.replace("tg32", "tg128"), rounds=10)
        else:
            yield row(name, compared, test=some)
    if on_gpu:  # prompts longer than a region that the gate asks for
        yield row("skip-prompts", SKIPS, test="pp4096+tg8@b4,pp8192+tg8@b4", n_ctx=4 * 8448,
                  n_seqs=4, n_ubatch=4096)  # fmt: skip
        yield row("deep-parts", PARTS, test="pp4096+tg64@b2,pp4096+tg64@b4", n_ctx=4 * 4352,
                  n_seqs=4)  # fmt: skip
    if device in SETS_SEVERAL:
        background = OTHERS[device].partition(f" {STEP}")[0]
        yield row("sets", sets(*SETS_SEVERAL[device]), toggles=background)


def _skipped() -> Iterator[Row]:
    """Every way to leave masked cells unread in prompts of one sequence, with the gate and with the
    gate open; and the number of parts into which attention splits deep caches."""
    ways = (*(f"skip_masked_kv={way}" for way in Toggles.values("skip_masked_kv")),
            "skip_masked_kv=tail skip_gate=always", "skip_masked_kv=classes skip_gate=always",
            "skip_masked_kv=auto skip_gate=always")  # fmt: skip
    for model in (TOGETHER, LLAMA_8B):
        for n_ubatch, tests in ((2048, "pp4096"), (4096, "pp4096,pp8192")):
            yield Row(SKIP_STEP, f"skip-one-{n_ubatch}-{model}", "ab", model, tests, "best", SKIPS,
                      f"prompts, {n_ubatch} at once", n_ctx=8448, n_ubatch=n_ubatch)  # fmt: skip
        yield Row(SKIP_STEP, f"skip-gate-{model}", "ab", model, "pp512,pp4096", "best",
                  sets(*ways), "prompts, 512 at once, gate open", n_ctx=8448)  # fmt: skip
        yield Row(SKIP_STEP, f"parts-one-{model}", "ab", model, "tg64,tg64@d2048,tg64@d8192",
                  "best", PARTS, "deep caches", n_ctx=8448)  # fmt: skip


# What costs or saves energy: name, the arm without, the arm with; each arm is changes to `best`.
# A plan of a step needs all inputs in one copy, so other waits are compared without plans.
NO_PLANS = f"{OFF} launch_ahead=off plan_end=event"
ENERGY = (
    ("a wait that spins on a word", "plan_end=event", WORD),
    ("plans, launched ahead", NO_PLANS, WORD),
    ("fusion", "fuse=off defer_norm=off", WORD),
    ("no wait around copies", f"{NO_PLANS} sync=per_copy copy_stream=own", NO_PLANS),
    ("dependent launch", "pdl=off", WORD),
)
ENERGY_MODELS = {TOGETHER: 215, LLAMA_8B: 245}  # seconds


def _energy() -> Iterator[Row]:
    """Joules a token of the arms of ENERGY, in windows of 5 s by the GPU's counter."""
    arms = dict.fromkeys((WORD, *(arm for _, *both in ENERGY for arm in both)))
    # what `best` is on a GPU, on any device
    background = f"best fuse=on defer_norm=on {ANY} {WORD}"
    for model, seconds in ENERGY_MODELS.items():
        yield Row("energy", f"energy-{model}", "energy", model, "tg128", background, sets(*arms),
                  seconds=seconds)  # fmt: skip


def _cpu() -> Iterator[Row]:
    """What preset `best` takes and leaves out on the devices of a CPU."""
    modes = [mode for mode in MODES if mode != SyncMode.IMPLICIT]
    every = {
        "defer_norm=off,on": f"best {OFF} fuse=on", "fuse=off,on": f"best {OFF}",
        "graph_reuse=rebuild,set_rows": f"best {OFF}", "step_wait=every,outputs": f"best {OFF}",
        f"sync={','.join(modes)},auto": f"best {OFF}",
    }  # fmt: skip
    for device, wanted in {"embedded": list(every), "host": list(every)[1:3]}.items():
        for compared in wanted:
            name = compared.partition("=")[0]
            train = name == "step_wait"
            yield Row(
                CPU_STEP, name.replace("_", "-"), "ab", "llama-3.2-1b-q4_0",
                "pp512" if train else "tg32", every[compared], compared,
                f"{device}, all else best", rounds=10, n_ctx=2048, device=device,
                n_ubatch=64 if train else 512,
            )  # fmt: skip
    for folder, kind, test in (("best", "ab", "tg32,pp64"), ("best-fresh", "fresh", "tg16,pp64")):
        yield Row(CPU_STEP, folder, kind, "llama-3.2-1b-q4_0", test, "kept",
                  sets(*SETS["embedded"]), "embedded, all else best", rounds=10, n_ctx=2048,
                  device="embedded")  # fmt: skip


MATRIX: tuple[Row, ...] = (
    *_planned(),
    *(Row("decode", f"decode-{model}{suffix}", "bench", model, "pp512,tg128", toggles)
      for model in DECODED for suffix, toggles in WITHOUT.items()),
    Row("kernels", "kernels", "kernels", test="all", sizes=(1,)),
    Row("depth", f"depth-{LLAMA_8B}", "bench", LLAMA_8B, "tg32,tg32@d16384", n_ctx=16384 + 256),
    Row("load", f"load-{LLAMA_8B}", "load", LLAMA_8B, toggles="baseline"),
    *(Row("perplexity", f"perplexity-llama-3.2-1b-{quant}{suffix}", "perplexity",
          f"llama-3.2-1b-{quant}", "sample:2048", compared="activations=float", n_ctx=2048,
          sizes=(n,))
      for quant in SCORED for n, suffix in SIZES.items()),
    *(Row("batches", f"batches-{model}", "bench", model, "pp9,pp16,pp32,pp64,pp128")
      for model in BATCHED),
    Row("kernels-batches", "kernels-batches", "kernels", test="8b",
        sizes=(2, 4, 8, 9, 16, 32, 64, 128)),
    *(Row("together", f"together-{TOGETHER}-{n}", "together", TOGETHER, f"pp1024+tg64@b{n}", "best",
          rounds=3 if n < 128 else 1, n_ctx=n * (1024 + 64), n_seqs=n, n_kv_pad=pad)
      for n, pad in PADS.items()),
    *_fusion(),
    *(Row("ablation", f"ablation-{model}" + (f"-{n}" if n > 1 else ""), "ablation", model,
          sizes=(n,))
      for model, sizes in APART.items() for n in sizes),
    Row("ablation", "launches", "launches"),
    Row("counters", "counters", "counters"),
    *(Row("gaps", f"gaps-{name}-{model}", "gaps", model, toggles=spec)
      for model in SYNCED for name, spec in OFF_AND_ON.items()),
    *_sync(),
    *_pipeline(),
    *_several(),
    *_skipped(),
    *_energy(),
    *_cpu(),
)  # fmt: skip


def rows(step: str, kind: str = "", toggle: str = "") -> list[Row]:
    """The rows of a step, or only those of a kind or of a compared toggle."""
    return [
        row for row in MATRIX
        if row.step == step and kind in ("", row.kind)
        and toggle in ("", row.compared.partition("=")[0])
    ]  # fmt: skip


def the(folder: str, kind: str = "", device: str = "cuda") -> Row:
    """The row of a folder; kind: where several kinds share the folder."""
    (found,) = (
        row
        for row in MATRIX
        if row.folder == folder and row.kind == (kind or row.kind) and row.device == device
    )
    return found
