"""Targets: computed from run folders alone; what is missed or missing is said, never hidden."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from data.measure import binds, blocks, recorded, targets
from data.measure.readme import made
from data.measure.recorded import LARGE, NOT_MEASURED, SMALL, TYPES, Recorded
from tests.measure.made import PEAK, READ, arm, model, record, target

GIVEN = {"read_gbps": READ, "product_tflops": PEAK}


def decode_run(folder: Path, launches: int = 228, us: float = 6000.0) -> None:
    """llama-3-8b F16, 15 GB a token: at 3 TB/s 5,000 us; here a token takes `us`."""
    fields = {"model": model("llama-3-8b", "F16", 15e9), "arms": [arm("engine", launches=launches)]}
    record(folder, "decode-llama-3-8b-f16", "bench", {"tg128": us, "pp512": 20_000.0},
           fields=fields, product_flops={"pp512": 6e12}, **GIVEN)  # fmt: skip


def kernel_row(dtype: str, shape: str, launch: str, share: float, batch: int = 1) -> dict:
    """1000 x 1000 weights of 2 bytes; us such that they are read at `share` of READ."""
    us = 2e6 / (share * READ) / 1e3
    return {
        "type": dtype, "shape": shape, "launch": launch, "share": share, "batch": batch,
        "rows": 1000, "cols": 1000, "bytes": 2_000_000, "us": us, "launches": 1,
    }  # fmt: skip


def test_without_runs_nothing_is_met(tmp_path):
    found = targets.targets(Recorded(tmp_path))
    assert len(found) == 31
    assert {t.met for t in found} == {t.measured for t in found} == {NOT_MEASURED}
    for name in blocks.BLOCKS:
        assert made(name, Recorded(tmp_path)).endswith("not measured.")
    assert targets.binds_lists(Recorded(tmp_path)) == ""


def test_decode_is_a_share_of_its_own_bandwidth(tmp_path):
    decode_run(tmp_path)
    share = target(tmp_path, "tg128 llama-3-8b-f16")
    assert share.measured == "83.3 %, 166.7 t/s" and share.met == "**missed**"
    beside = target(tmp_path, "tg128: more")
    assert beside.measured == "llama-3-8b-f16 166.7 (169.5)"
    assert beside.met.startswith("**missed**: llama-3-8b-f16; not measured: llama-3-8b-q8_0, ")
    assert target(tmp_path, "launches").measured == "llama-3-8b-f16 7"
    prompt = target(tmp_path, "pp512 llama-3-8b-f16")
    assert prompt.measured == "25600 t/s, 50.0 % of a large product's rate" and prompt.met == "yes"
    decode_run(tmp_path, launches=9 * 32, us=5500.0)
    assert target(tmp_path, "tg128 llama-3-8b-f16").met == "yes"
    assert target(tmp_path, "launches").met.startswith("**missed**: llama-3-8b-f16; ")
    path = tmp_path / "cuda-decode-llama-3-8b-f16" / "run.json"
    text = path.read_text()
    path.write_text(text.replace('"dirty": false', '"dirty": true'))
    assert "00000000 with uncommitted changes; " in made("decode-cuda", Recorded(tmp_path))
    path.write_text(text.replace('"complete"', '"interrupted"'))
    assert target(tmp_path, "tg128 llama-3-8b-f16").met == NOT_MEASURED
    shown = made("targets-cuda", Recorded(tmp_path))
    assert "cuda-decode-llama-3-8b-f16 is interrupted" in shown


def test_a_type_is_as_good_as_its_worst_shape(tmp_path):
    rows = [
        kernel_row(dtype, shape, launch, 0.9 if shape != "8b.head" or dtype != "Q8_0" else 0.87)
        for dtype in TYPES[:-1]
        for shape in (*LARGE, *SMALL)
        for launch in ("plain", "pdl")
    ]
    rows += [kernel_row("MXFP4", shape, "plain", 0.9) for shape in LARGE[:-1]]
    record(tmp_path, "kernels", "kernels", {}, rows=rows, void="", **GIVEN)
    large = target(tmp_path, "gate/up and head of 8B, plain: 88")
    assert "Q8_0 87.0 % (head)" in large.measured and large.met == "**missed**: Q8_0"
    assert target(tmp_path, "gate/up and head of 8B, plain: 80").met == "not measured: MXFP4"
    record(tmp_path, "kernels", "kernels", {}, rows=rows, void="void: slow", **GIVEN)
    assert target(tmp_path, "gate/up and head of 8B, plain: 80").met == NOT_MEASURED
    assert "cuda-kernels is void: slow" in made("targets-cuda", Recorded(tmp_path))


def test_a_batch_is_held_to_memory_or_to_tensor_cores(tmp_path):
    # 15 GB at 3 TB/s: 5,000 us; 6e12 operations at 600 TFLOP/s: 10,000 us
    fields = {"model": model("llama-3-8b", "F16", 15e9)}
    record(tmp_path, "batches-llama-3-8b-f16", "bench", {"pp16": 8e3, "pp128": 25e3},
           fields=fields, product_flops={"pp16": 0.75e12, "pp128": 6e12}, **GIVEN)  # fmt: skip
    few, many = recorded.batch_steps(Recorded(tmp_path), "llama-3-8b-f16")
    assert few == pytest.approx((16, 2000.0, 0.625, 0.15625))
    assert (few.share, few.bound) == (few.read, "memory")
    assert many == pytest.approx((128, 5120.0, 0.2, 0.4))
    assert (many.share, many.bound) == (many.product, "tensor cores")
    assert target(tmp_path, "steps of 9").measured == "llama-3-8b-f16 40.0 % (128 tokens)"
    rows = [kernel_row("F16", "8b.o", *of) for of in (
        ("plain", 0.9, 2), ("plain", 0.2, 16), ("pdl", 0.6, 16), ("plain", 0.5, 1000),
    )]  # fmt: skip  # of 1000: 2e9 operations, 3.33 us; reads 0.67
    rows.append(kernel_row("F16", "8b.down", "plain", 0.8, 16))
    record(tmp_path, "kernels-batches", "kernels", {}, rows=rows, **GIVEN)
    assert recorded.worst_batch(Recorded(tmp_path).run("kernels-batches"), "F16") == pytest.approx(
        (0.6, "8b.o", 16)
    )
    _, _, line = made("kernels-batches-cuda", Recorded(tmp_path)).splitlines()[:3]
    assert re.findall(r"\d+\.\.\d+", line) == ["90..90", "60..80", "250..250"]


def scored_run(folder: Path, quant: str, size: int | None, kl: float | None, nmse: float) -> None:
    """A perplexity run of llama-3.2-1b. size None: as runs were before they said theirs."""
    said: dict[str, Any] = {"agreement": {"kl_mean": kl, "nmse": nmse, "same_argmax": 0.9}}
    said |= {"engine": {"n": 2048}} | ({} if size is None else {"n_ubatch": size})
    fields = {"model": model("llama-3.2-1b", quant), "result": said,
              "engine": {"device_description": "a GPU", "config": {"n_ubatch": 512}}}  # fmt: skip
    suffix = "" if size in (None, 512) else f"-ub{size}"
    name = f"perplexity-llama-3.2-1b-{quant.lower()}{suffix}"
    record(folder, name, "perplexity", {}, fields=fields)


def test_answers_depth_and_loading_are_held_to_bounds(tmp_path):
    """Decode kernels by runs of one token at a time; a figure that is missing holds nothing."""
    for quant, kl in (("Q8_0", 1e-4), ("Q6_K", 1e-2), ("Q4_0", None)):
        scored_run(tmp_path, quant, None, kl, 1e-6)
    scored_run(tmp_path, "F16", None, 0.0, 0.0)  # beside itself: shows nothing
    met = target(tmp_path, "prefill kernels against").met
    assert met == "**missed**: q4_0, q6_k; not measured: f16, bf16, q4_k_m, q5_k_m, mxfp4"
    assert target(tmp_path, "decode kernels against").met == NOT_MEASURED
    for quant, kl in (("Q4_0", 3e-4), ("F16", 3e-6)):  # decode rounds nothing: held to more
        for size in (512, 1):
            scored_run(tmp_path, quant, size, kl, 2 * kl)
    assert target(tmp_path, "decode kernels against").met.startswith("**missed**: f16; not")
    # 16384 cells of 131,072 bytes at 3 TB/s: 715.8 us
    record(tmp_path, "depth-llama-3-8b-q4_0", "bench", {"tg32": 2000.0, "tg32@d16384": 3000.0},
           cache_bytes_per_token=131_072, **GIVEN)  # fmt: skip
    depth = target(tmp_path, "depth")
    assert (depth.measured, depth.met) == ("1.40 times", "**missed**")
    (tmp_path / "cuda-load-llama-3-8b-q4_0.json").write_text(json.dumps({"seconds": [2.0, 11.0]}))
    assert target(tmp_path, "llama-3-8b Q4_0 ready").met == "**missed**"


# weights of 3 GB at 3,000 GB/s: 1,000 us
STEP: dict[str, Any] = GIVEN | {
    "n_tokens": 1, "launches": 180, "weight_bytes": 3_000_000_000, "product_flops": 6 * 10**12,
    "step_us": {"median": 2100.0}, "eager_us": {"median": 2050.0}, "graph_us": {"median": 2000.0},
    "kinds": {
        "attention": {"launches": 36, "weight_bytes": 0, "us": {"median": 300.0}},
        "norm": {"launches": 1, "weight_bytes": 0, "us": {"median": -120.0}},
        "glu": {"launches": 36, "weight_bytes": 1_500_000_000, "us": {"median": 900.0}},
    },
}  # fmt: skip


def test_a_step_names_what_leaving_out_saves_most_first():
    whole = STEP | {"apart_us": {"median": 2500.0}, "unchanged": True}
    first, saved, slower = binds.step(whole)
    assert first.startswith(
        "step 2100 us, its 180 launches as one graph 2000 (reading weights 1000)"
    )
    assert saved.startswith("left out, they save: glu 900 (36.0 %, reads for 500), attention 300 (")
    assert saved.endswith("not of any one of these 1300")
    assert slower == "without these the graph takes longer: norm 120"
    assert "(reading weights 1000, tensor cores 10000)" in binds.step(whole | {"n_tokens": 64})[0]
    assert binds.step(whole | {"unchanged": False})[-1].startswith("void: ")
    assert binds.step(None) == [NOT_MEASURED]
