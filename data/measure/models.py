"""Runs of whole models for data/results: decode, depth, batches, loading, perplexity, fusion.

Every function is one step of `data.measure`; names in brackets are those of its folders.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import workbench as wb
from data.measure.session import Session, add_to_result, everything, product_flops, slug
from workbench.bench import provenance
from workbench.bench.llama_bench import bench
from workbench.bench.perplexity import parse_against, perplexity_by_size
from workbench.bench.token_source import open_source
from workbench.output import write_text

DECODED = [
    ("llama-3-8b", "Q4_0"), ("llama-3.2-1b", "BF16"), ("llama-3-8b", "F16"),
    ("llama-3-8b", "Q8_0"), ("qwen3-4b", "Q4_K_M"),
]  # fmt: skip
# suffix of the folder -> what is switched off
WITHOUT: dict[str, tuple[str, ...]] = {
    "": (),
    "-unfused": ("fuse", "defer_norm"),  # halved norms are more launches where nothing joins them
    "-plain": ("pdl",),
}


def decode(session: Session) -> None:
    """tg128 and pp512 with everything on but plans, and with fusion or pdl off
    [decode-MODEL, decode-MODEL-unfused, decode-MODEL-plain]."""
    for preset, quant in DECODED:
        if not session.takes(preset, quant):
            continue
        folders = {
            suffix: session.folder(f"decode-{slug(preset, quant)}{suffix}", needs="read_gbps")
            for suffix in WITHOUT
        }
        if not any(folders.values()):
            continue
        with session.engine(preset, quant) as engine:
            rates = session.rates(engine.backend)
            for suffix, folder in folders.items():
                toggles = everything(engine)
                for name in WITHOUT[suffix]:
                    toggles = toggles.switched(name, "off")
                if folder is not None:
                    _bench(session, engine, toggles, folder, rates, (512,), (128,))


def _bench(
    session: Session,
    engine: wb.Engine,
    toggles: wb.Toggles,
    folder: Path,
    rates: dict,
    prompts: tuple[int, ...],
    gens: tuple[int, ...],
    depths: tuple[int, ...] = (0,),
) -> None:
    """One run of llama-bench's tests; the folder also says what a step computes."""
    if session.quick:
        prompts, gens = tuple(min(n, 128) for n in prompts), tuple(min(n, 8) for n in gens)
    with engine.variant(toggles) as side:
        rows = bench(side, prompts, gens, depths, 2 if session.quick else 5, out=folder)
        flops = {f"pp{n}": product_flops(side, n) for n in prompts}
    cells = 256
    cache = sum(t.nbytes for pair in engine.model.caches(cells) for t in pair) // cells
    add_to_result(folder, **rates, product_flops=flops, cache_bytes_per_token=cache)
    said = ", ".join(f"{row.workload.name} {row.values()['avg_ts']:.1f} t/s" for row in rows)
    print(f"{folder.name}: {said}; {rates['read_gbps']:.0f} GB/s read", flush=True)


DEPTH = 16384


def depth(session: Session) -> None:
    """tg32 of llama-3-8b Q4_0 into an empty cache and behind 16,384 tokens
    [depth-llama-3-8b-q4_0]."""
    n = 512 if session.quick else DEPTH
    _one(session, "depth", ("llama-3-8b", "Q4_0"), n + 256, (), (32,), (0, n))


BATCH_SIZES = (9, 16, 32, 64, 128)


def batches(session: Session) -> None:
    """Steps of 9 to 128 tokens at once, as prompts of one ubatch [batches-MODEL]."""
    for model in (("llama-3-8b", "Q4_0"), ("llama-3-8b", "Q8_0"), ("llama-3-8b", "F16")):
        _one(session, "batches", model, 1024, BATCH_SIZES, ())


def _one(
    session: Session,
    name: str,
    model: tuple[str, str],
    n_ctx: int,
    prompts: tuple[int, ...],
    gens: tuple[int, ...],
    depths: tuple[int, ...] = (0,),
) -> None:
    if not session.takes(*model):
        return
    folder = session.folder(f"{name}-{slug(*model)}", needs="read_gbps")
    if folder is None:
        return
    with session.engine(*model, n_ctx=n_ctx) as engine:
        rates = session.rates(engine.backend)
        _bench(session, engine, everything(engine), folder, rates, prompts, gens, depths)


LOADS = 3


def load(session: Session) -> None:
    """Time until llama-3-8b Q4_0 is ready, three times, its file in the page cache
    [load-llama-3-8b-q4_0.json]."""
    model = ("llama-3-8b", "Q4_0")
    out = session.out / f"{session.prefix}-load-{slug(*model)}.json"
    if not session.takes(*model):
        return
    path, seconds = session.path(*model), []
    with open(path, "rb", buffering=0) as file:
        while file.read(64 << 20):
            pass  # what is read is then in the page cache
    for _ in range(LOADS):
        begin = time.perf_counter()
        with wb.Engine.load(
            path, device=session.device, n_ctx=1024, toggles=wb.Toggles()
        ) as engine:
            seconds.append(round(time.perf_counter() - begin, 3))
            found = {
                "date": provenance.utc_now(),
                **provenance.collect(engine),
                "seconds": seconds,
            }
    write_text(out, json.dumps(found, indent=1) + "\n", parents=True)
    print(f"{out.name}: {seconds} s", flush=True)


SCORED = ("Q4_0", "Q8_0", "Q4_K_M", "MXFP4", "BF16", "F16", "Q6_K", "Q5_K_M")
N_SCORED = 2048
# Tokens computed at once: tensor cores with cuBLAS, tensor cores on decoded tiles, decode kernels.
SIZES = {512: "", 64: "-ub64", 1: "-ub1"}


def perplexities(session: Session) -> None:
    """2,048 tokens drawn from llama-3.2-1b and fed back, everything on against the float path with
    everything off, for every type and 512, 64 and 1 tokens at once [perplexity-MODEL,
    perplexity-MODEL-ub64, perplexity-MODEL-ub1]."""
    preset, n = "llama-3.2-1b", 64 if session.quick else N_SCORED
    for quant in SCORED:
        if not session.takes(preset, quant):
            continue
        begin, name = time.monotonic(), f"perplexity-{slug(preset, quant)}"
        found = {
            size: session.folder(f"{name}{suffix}", needs="n_ubatch")
            for size, suffix in SIZES.items()
        }
        folders = {size: folder for size, folder in found.items() if folder is not None}
        if not folders:
            continue
        with session.engine(preset, quant, n_ctx=n) as engine:
            with engine.variant(everything(engine)) as fast:
                source = open_source(fast, None, f"sample:{n}")
                against = parse_against("activations=float")
                runs = perplexity_by_size(fast, source, folders, against=against)
            for made in runs:
                print("\n".join([made.folder.name, *made.lines()]), flush=True)
                if made.agreement is not None:
                    outside = made.agreement.outside(engine.model.quant, made.n_ubatch)
                    print(outside or "within the bounds")
        print(f"{name}: {time.monotonic() - begin:.0f} s", flush=True)
        if any(made.interrupted for made in runs):
            raise KeyboardInterrupt


BACKGROUNDS = ("alone", "with-all")
# Toggles and backgrounds, by model. Llama has no biases, and BF16 quantises nothing. The half of a
# norm is joined to a product only where norms are halved, which is so in the second background.
FUSED: dict[tuple[str, str], dict[str, tuple[str, ...]]] = {
    ("llama-3.2-1b", "BF16"): dict.fromkeys(("fuse", "pdl", "defer_norm"), BACKGROUNDS),
    ("llama-3-8b", "Q4_0"): {
        **dict.fromkeys(
            ("fuse", "pdl", "defer_norm", "fuse_norm_mul", "fuse_add_norm", "fuse_qkv",
             "fuse_rope_store", "fuse_glu", "fuse_norm_quantize", "fuse_epilogue_quantize"),
            BACKGROUNDS,
        ),
        "fuse_product_norm": ("with-all",),
    },
}  # fmt: skip


def fusion(session: Session) -> None:
    """Every pattern of graph/fuse.py, all of them together, halved norms and pdl, off against on:
    with all else off (programs kept), and with all else on [fusion-TOGGLE-alone-MODEL,
    ...-with-all-...]."""
    for (preset, quant), toggles in FUSED.items():
        if not session.takes(preset, quant):
            continue
        with session.engine(preset, quant) as engine:
            others = dict(
                zip(BACKGROUNDS, (wb.Toggles(graph_reuse="set_rows"), everything(engine)),
                    strict=True)
            )  # fmt: skip
            for name, background in [(n, b) for n, found in toggles.items() for b in found]:
                if name == "pdl" and everything(engine).pdl == "off":
                    continue
                run = f"fusion-{name.replace('_', '-')}-{background}-{slug(preset, quant)}"
                compare(session, engine, run, f"{name}=off,on", "tg32", 5, others[background])


def compare(
    session: Session,
    engine: wb.Engine,
    name: str,
    toggle: str,
    test: str,
    rounds: int,
    background: wb.Toggles,
) -> None:
    """One comparison in a folder of its own."""
    folder = session.folder(name)
    if folder is None:
        return
    if session.quick:
        test, rounds = "tg8", 1
    found = wb.ab(
        engine, toggle, tests=test, rounds=rounds, background=background, out=folder,
        name=folder.name, smoke=session.quick,
    )  # fmt: skip
    print(found.verdict, flush=True)
    if found.interrupted:
        raise KeyboardInterrupt
