"""The targets: computed from run folders alone; what is missed or missing is said, never hidden."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from data.measure import __main__ as measure
from data.measure import blocks, matrix, readme, recorded, session, targets
from data.measure.recorded import LARGE, SMALL, TYPES, Recorded
from workbench.benchmarks.runs import results
from workbench.common.errors import UsageError
from workbench.config import Toggles

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "data" / "results"
READ = 3000.0  # GB/s, of the made-up runs
PEAK = 600.0  # TFLOP/s

UNTESTED = "(older sources: no evidence that today's pass)"


def record(folder: Path, name: str, kind: str, samples: dict[str, list[float]], **fields) -> None:
    """A made-up run folder. samples: test -> us of each repetition, all of one row."""
    table = results.SampleTable(name)
    for test, every in samples.items():
        for repetition, us in enumerate(every):
            n = int(test.removeprefix("pp")) if test.startswith("pp") else 1
            table.add("engine", False, test, repetition, np.array([us * 1e3]), np.array([n]))
    run = {
        "schema": 1, "run_id": name, "kind": kind, "name": name, "status": "complete",
        "started": "2026-01-02T03:04:05Z", "duration_s": 1.0, "command": [], "versions": {},
        "commit": {"hash": "0" * 40, "number": 1, "dirty": False}, "machine": {},
        "engine": {"device_description": "a GPU"}, "seed": 0, "tests": list(samples),
        "repetitions": 5, "model": {}, "arms": [], "result": {},
    }  # fmt: skip
    results.write_run(folder / f"cuda-{name}", run | fields, table.frame())


def model(name: str, quant: str, weight_bytes: float) -> dict:
    return {
        "name": f"{name} with random weights", "quant": quant, "n_layer": 32,
        "architecture": "llama", "weight_bytes_per_token": weight_bytes,
    }  # fmt: skip


def arm(launches: int) -> dict:
    program = {"tg128": {"counts": {"launches": launches}}}
    same = {"name": "engine", "is_control": False, "sync_mode": "implicit", "counters": {}}
    return same | {"toggles": Toggles().to_dict(), "program": program}


def test_sequences_together_stand_beside_their_bound(tmp_path: Path):
    """Two sequences with 6 tokens of prompt and 3 generated ones, a second a step: a step reads
    1 GB of weights and 12 + 2 * (3 + 1) / 2 = 16 cells of 0.5 GB, the mean of three steps."""
    name = f"together-{matrix.TOGETHER}-8"
    record(tmp_path, name, "bench", {}, tests=["pp6+tg3@b2"],
           model=model("llama-3.2-1b", "Q4_K", 1e9),
           result={"read_gbps": 18.0, "cache_bytes_per_token": 5e8})  # fmt: skip
    table = results.SampleTable(name)
    for repetition in range(3):
        ns = np.array([4e9, 1e9, 1e9, 2e9])
        table.add("engine", False, "pp6+tg3@b2", repetition, ns, np.array([12, 2, 2, 2]))
    run = Recorded(tmp_path).run(name)
    assert run is not None
    found = recorded.together(run._replace(samples=table.frame()))
    wanted = {"n_seqs": 2, "pp": 3, "tg": 2, "each": 1, "step_ms": 1000, "step_gb": 9, "bound": 4}
    assert wanted.items() <= found.items()
    assert f"{found['share']:.1f}" == "50.0"
    lines = list(blocks.TOGETHER.lines(Recorded(RESULTS)))
    assert [line.values["n_seqs"] for line in lines] == [1, 8, 32, 128]


def decode_run(folder: Path, launches: int = 228, us: float = 6000.0) -> None:
    """llama-3-8b F16, 15 GB a token: at 3 TB/s 5,000 us; here a token takes `us`."""
    record(
        folder, "decode-llama-3-8b-f16", "bench", {"tg128": [us] * 5, "pp512": [20_000.0] * 5},
        model=model("llama-3-8b", "F16", 15e9), arms=[arm(launches)],
        result={"read_gbps": READ, "product_tflops": PEAK, "product_flops": {"pp512": 6e12}},
    )  # fmt: skip


def kernel_row(dtype: str, shape: str, launch: str, share: float, batch: int = 1) -> dict:
    """1000 x 1000 weights of 2 bytes; us such that they are read at `share` of READ."""
    us = 2e6 / (share * READ) / 1e3
    return {
        "type": dtype, "shape": shape, "launch": launch, "share": share, "batch": batch,
        "rows": 1000, "cols": 1000, "bytes": 2_000_000, "us": us,
    }  # fmt: skip


def table(name: str, folder: Path) -> str:
    return readme.made(name, Recorded(folder))


def by_name(folder: Path) -> dict[str, targets.Result]:
    return {target.what: target for target in targets.targets(Recorded(folder))}


def the(folder: Path, start: str) -> targets.Result:
    (found,) = [t for what, t in by_name(folder).items() if what.startswith(start)]
    return found


def test_readme_has_the_table_of_the_recorded_runs():
    assert table("targets-cuda", RESULTS) in (ROOT / "data/results/README.md").read_text()


def test_without_runs_nothing_is_met(tmp_path):
    found = by_name(tmp_path).values()
    assert len(found) == 31
    assert {t.met for t in found} == {t.measured for t in found} == {recorded.NOT_MEASURED}
    for name in blocks.BLOCKS:
        assert table(name, tmp_path).endswith("not measured.")


def test_decode_is_weights_a_second_of_the_run_s_own_bandwidth(tmp_path):
    decode_run(tmp_path)
    share = the(tmp_path, "tg128 llama-3-8b-f16")
    assert share.measured == "83.3 %, 166.7 t/s" and share.met == "**missed**"
    beside = the(tmp_path, "tg128: more")
    assert beside.measured == "llama-3-8b-f16 166.7 (169.5)"
    assert beside.met.startswith("**missed**: llama-3-8b-f16; not measured: llama-3-8b-q8_0, ")
    launches = the(tmp_path, "launches")
    assert launches.measured == "llama-3-8b-f16 7" and launches.met.startswith("not measured: ")
    prompt = the(tmp_path, "pp512 llama-3-8b-f16")
    assert prompt.measured == "25600 t/s, 50.0 % of a large product's rate"
    assert prompt.met == "yes"
    assert " 83.3 |" in table("decode-cuda", tmp_path)


def test_a_better_run_meets_what_a_worse_one_missed(tmp_path):
    decode_run(tmp_path, launches=9 * 32, us=5500.0)
    assert the(tmp_path, "tg128 llama-3-8b-f16").met == "yes"
    assert the(tmp_path, "launches").met.startswith("**missed**: llama-3-8b-f16; ")


def test_a_type_is_as_good_as_its_worst_shape(tmp_path):
    rows = [
        kernel_row(dtype, shape, launch, 0.9 if shape != "8b.head" or dtype != "Q8_0" else 0.87)
        for dtype in TYPES[:-1]
        for shape in (*LARGE, *SMALL)
        for launch in ("plain", "pdl")
    ]
    rows += [kernel_row("MXFP4", shape, "plain", 0.9) for shape in LARGE[:-1]]
    result = {"rows": rows, "read_gbps": READ, "void": ""}
    record(tmp_path, "kernels", "kernels", {}, result=result)
    large = the(tmp_path, "gate/up and head of 8B, plain: 88")
    assert "Q8_0 87.0 % (head)" in large.measured and large.met == "**missed**: Q8_0"
    assert the(tmp_path, "gate/up and head of 8B, plain: 80").met == "not measured: MXFP4"
    assert the(tmp_path, "qkv, o and down of 8B, `pdl`").met == "not measured: MXFP4"
    assert "87 / 87" in table("kernels-cuda", tmp_path)


def test_runs_that_count_for_nothing_are_named(tmp_path):
    rows = [kernel_row("F16", shape, "plain", 0.9) for shape in LARGE]
    result = {"rows": rows, "read_gbps": READ, "void": "void: slow"}
    record(tmp_path, "kernels", "kernels", {}, result=result)
    decode_run(tmp_path)
    path = tmp_path / "cuda-decode-llama-3-8b-f16" / "run.json"
    path.write_text(path.read_text().replace('"complete"', '"interrupted"'))
    assert {t.met for t in by_name(tmp_path).values()} == {recorded.NOT_MEASURED}
    shown = table("targets-cuda", tmp_path)
    assert "cuda-kernels is void: slow" in shown
    assert "cuda-decode-llama-3-8b-f16 is interrupted" in shown


def test_a_batch_is_held_to_memory_or_to_tensor_cores(tmp_path):
    # 15 GB at 3 TB/s: 5,000 us; 6e12 operations at 600 TFLOP/s: 10,000 us
    record(
        tmp_path, "batches-llama-3-8b-f16", "bench", {"pp16": [8e3] * 5, "pp128": [25e3] * 5},
        model=model("llama-3-8b", "F16", 15e9),
        result={
            "read_gbps": READ, "product_tflops": PEAK,
            "product_flops": {"pp16": 0.75e12, "pp128": 6e12},
        },
    )  # fmt: skip
    few, many = recorded.batch_steps(Recorded(tmp_path), "llama-3-8b-f16")
    assert few == pytest.approx((16, 2000.0, 0.625, 0.15625))
    assert (few.share, few.bound) == (few.read, "memory")
    assert many == pytest.approx((128, 5120.0, 0.2, 0.4))
    assert (many.share, many.bound) == (many.product, "tensor cores")
    cells = [re.split(r" *\| *", line) for line in table("batches-cuda", tmp_path).splitlines()]
    assert [cell[2:8] for cell in cells[2:4]] == [
        ["16", "2000", "62.5", "15.6", "memory", "62.5"],
        ["128", "5120", "20.0", "40.0", "tensor cores", "40.0"],
    ]
    assert the(tmp_path, "steps of 9").measured == "llama-3-8b-f16 40.0 % (128 tokens)"
    rows = [
        kernel_row("F16", "8b.o", "plain", 0.9, batch=2),
        kernel_row("F16", "8b.o", "plain", 0.2, batch=16),
        kernel_row("F16", "8b.o", "pdl", 0.6, batch=16),
        kernel_row("F16", "8b.o", "plain", 0.5, batch=1000),  # 2e9 operations: 3.33 us, reads 0.67
    ]
    result = {"rows": rows, "read_gbps": READ, "product_tflops": PEAK}
    record(tmp_path, "kernels-batches", "kernels", {}, result=result)
    run = Recorded(tmp_path).run("kernels-batches")
    assert recorded.worst_batch(run, "F16") == pytest.approx((0.6, "8b.o", 16))
    assert recorded.worst_batch(run, "Q4_0") is None
    rows.append(kernel_row("F16", "8b.down", "plain", 0.8, batch=16))
    record(tmp_path, "kernels-batches", "kernels", {}, result=result)
    head, _, line = table("kernels-batches-cuda", tmp_path).splitlines()[:3]
    assert re.findall(r"\d+", head) == ["2", "16", "1000"]
    assert re.findall(r"\d+\.\.\d+", line) == ["90..90", "60..80", "250..250"]


def test_depth_is_held_to_reading_the_cache(tmp_path):
    # 16384 cells of 131,072 bytes at 3 TB/s: 715.8 us
    record(
        tmp_path, "depth-llama-3-8b-q4_0", "bench", {"tg32": [2000.0], "tg32@d16384": [3000.0]},
        result={"read_gbps": READ, "cache_bytes_per_token": 131_072},
    )  # fmt: skip
    assert recorded.depth_ratio(Recorded(tmp_path)) == {
        "ratio": pytest.approx(1000 / 715.828, rel=1e-4)
    }
    assert the(tmp_path, "depth").measured == "1.40 times"
    assert the(tmp_path, "depth").met == "**missed**"


def test_loading_and_answers(tmp_path):
    (tmp_path / "cuda-load-llama-3-8b-q4_0.json").write_text(json.dumps({"seconds": [2.0, 11.0]}))
    assert the(tmp_path, "llama-3-8b Q4_0 ready").met == "**missed**"
    for quant, kl in (("Q8_0", 1e-4), ("Q6_K", 1e-2), ("Q4_0", None)):
        scored_run(tmp_path, quant, None, kl, 1e-6)
    scored_run(tmp_path, "F16", None, 0.0, 0.0)  # beside itself: shows nothing
    met = the(tmp_path, "prefill kernels against").met
    assert met == "**missed**: q4_0, q6_k; not measured: f16, bf16, q4_k_m, q5_k_m, mxfp4"
    assert the(tmp_path, "decode kernels against").met == recorded.NOT_MEASURED


def test_checks_are_clean_only_if_every_tool_ran_and_found_nothing(tmp_path):
    run = {"tests": 5, "errors": 0, "seconds": 2.5, "exit": 0}
    found = {
        "runs": dict.fromkeys(("before", *targets.TOOLS), run), "duration_s": 55.0, "device": "GPU",
        "date": "2026-01-02T03", "tool": "Version 1", "source_hash": "0123456789",
    }  # fmt: skip
    what = "errors that compute-sanitizer"

    def met(changed: dict | None = None, **fields) -> str:
        written = found | {"runs": found["runs"] | (changed or {})} | fields
        (tmp_path / "gpu-sanitizer.json").write_text(json.dumps(written))
        return the(tmp_path, what).met

    assert met() == "yes"
    shown = table("correctness-cuda", tmp_path)
    assert all(f"| {tool} " in shown for tool in targets.TOOLS)
    assert shown.endswith(f"tools: GPU, 55 s in all, sources 01234567, 2026-01-02 {UNTESTED}; "
                          "compute-sanitizer Version 1.")  # fmt: skip
    for wrong in ({"errors": 1}, {"errors": None}, {"exit": 1}, {"tests": 0}):
        assert met({"racecheck": run | wrong}) == "**missed**"
    met({"racecheck": run | {"errors": None}})
    assert "none told" in table("correctness-cuda", tmp_path)
    assert met(duration_s=500.0) == "**missed**"
    assert met(runs={"memcheck": run}) == "**missed**"
    assert "racecheck not run" in the(tmp_path, what).measured
    tests = {
        "device": "GPU", "passed": 7, "failed": 2, "skipped": 1, "duration_s": 9.0,
        "date": "2026-01-02T03", "source_hash": "abcdefghij",
    }  # fmt: skip
    (tmp_path / "gpu-tests.json").write_text(json.dumps(tests))
    shown = table("correctness-cuda", tmp_path)
    assert re.search(r"make test-gpu .* \| +9 \| +2 \| +9.0 \|", shown)
    assert f"make test-gpu: GPU, sources abcdefgh, 2026-01-02 {UNTESTED}, 1 skipped" in shown


def test_a_cpu_is_held_to_llama_cpp_s(tmp_path):
    rows = [{"preset": "llama-3.2-1b", "quant": "Q8_0", "ratio": 0.89}]
    (tmp_path / "peer-cpu.json").write_text(json.dumps({"decode": rows}))
    found = the(tmp_path, "decode on two CPU threads")
    assert found.measured == "llama-3.2-1b Q8_0 89 %"
    assert found.met == "**missed**: llama-3.2-1b Q8_0; not measured: llama-3.2-1b Q4_0"


def test_changes_on_top_of_a_commit_are_told(tmp_path):
    decode_run(tmp_path)
    assert "; commit 00000000; " in table("decode-cuda", tmp_path)
    path = tmp_path / "cuda-decode-llama-3-8b-f16" / "run.json"
    path.write_text(path.read_text().replace('"dirty": false', '"dirty": true'))
    assert "commit 00000000 with uncommitted changes; " in table("decode-cuda", tmp_path)


def scored_run(
    folder: Path, quant: str, size: int | None, kl: float | None, nmse: float | None
) -> None:
    """A perplexity run of llama-3.2-1b. size None: as runs were before they said theirs."""
    agreement = {"kl_mean": kl, "nmse": nmse, "same_argmax": 0.9}
    said = {"agreement": agreement, "engine": {"n": 2048}}
    suffix = "" if size in (None, 512) else f"-ub{size}"
    record(
        folder, f"perplexity-llama-3.2-1b-{quant.lower()}{suffix}", "perplexity", {},
        model=model("llama-3.2-1b", quant, 1e9),
        engine={"device_description": "a GPU", "config": {"n_ubatch": 512}},
        result=said if size is None else said | {"n_ubatch": size},
    )  # fmt: skip


def test_decode_kernels_are_judged_by_runs_of_one_token_at_a_time(tmp_path):
    for size, kl in ((512, 3e-4), (64, 4e-4)):
        scored_run(tmp_path, "Q4_0", size, kl, 2 * kl)
    scored_run(tmp_path, "F16", 512, 3e-6, 2e-6)
    prefill = the(tmp_path, "prefill kernels against")
    assert prefill.measured == "f16 3e-06/2e-06, q4_0 4e-04/8e-04"
    assert the(tmp_path, "decode kernels against").met == recorded.NOT_MEASURED
    scored_run(tmp_path, "Q4_0", 1, 3e-4, 6e-4)
    scored_run(tmp_path, "F16", 1, 3e-6, 2e-6)  # decode rounds nothing: held to more
    decode = the(tmp_path, "decode kernels against")
    assert decode.measured == "f16 3e-06/2e-06, q4_0 3e-04/6e-04"
    assert decode.met.startswith("**missed**: f16; not measured: bf16")
    assert the(tmp_path, "prefill kernels against") == prefill
    assert prefill.met.startswith("not measured: bf16")
    head, _, f16, q4_0 = table("perplexity-cuda", tmp_path).splitlines()[:4]
    assert re.findall(r"\S+ at once", head) == ["512 at once", "64 at once", "1 at once"]
    assert "3.0e-04 / 6.0e-04 | 4.0e-04 / 8.0e-04 | 3.0e-04 / 6.0e-04" in q4_0
    assert re.search(r"3.0e-06 / 2.0e-06 \| +\| 3.0e-06 / 2.0e-06 \| 5e-06 / 1e-05", f16)


@pytest.mark.slow
def test_the_steps_run_and_go_on_where_they_were(tmp_path, tiny_models, capsys):
    """A few steps with tiny models on the embedded device; a second call measures nothing."""

    def go() -> str:
        names = ("decode", "depth", "load", "batches", "perplexity")
        measure.measure(*names, out=tmp_path, models=tiny_models, device="embedded", quick=True)
        return capsys.readouterr().out

    assert "there already" not in go()
    assert not list(tmp_path.glob("embedded-*")), "a quick run must not be taken for a real one"
    found = Recorded(tmp_path, "quick-embedded")
    assert isinstance(recorded.depth_ratio(found)["ratio"], float)
    assert len(found.file("load-llama-3-8b-q4_0")["seconds"]) == 3
    run = found.run("decode-llama-3-8b-q4_0")
    assert run is not None and run.run["result"]["read_gbps"] > 0
    assert run.run["arms"][0]["toggles"]["fuse_glu"] == "on"
    unfused = found.run("decode-llama-3-8b-q4_0-unfused")
    assert unfused is not None and unfused.run["arms"][0]["toggles"]["fuse_glu"] == "off"
    # the last layer goes on with the last token alone once attention is done
    flops = run.run["result"]["product_flops"]["pp128"]
    attention, ffn, head = 256 * (256 + 2 * 128) + 256 * 256, 3 * 256 * 512, 256 * 1024
    assert flops == 2 * (128 * (2 * attention + ffn) + ffn + head)
    for size, suffix in matrix.SIZES.items():
        run = found.run(f"perplexity-llama-3.2-1b-q4_0{suffix}")
        assert run is not None and run.run["result"]["n_ubatch"] == size
        assert run.run["arms"][0]["toggles"]["activations"] == "q8"
        assert run.run["arms"][1]["toggles"]["activations"] == "float"
    assert [a.n_ubatch for a in recorded.scored(found, "q4_0")] == [512, 64, 1]
    # a CPU rounds no activation of float weights; halved norms, of a few tokens, add in other order
    assert [a.n_ubatch for a in recorded.scored(found, "f16")] == [1]
    assert go().count("there already") == 3 * 5 + 1 + 1 + 3 + 3 * 8


def test_measure_refuses_a_step_that_is_none(tmp_path):
    with pytest.raises(UsageError, match="step 'speed' does not exist; choose from plans"):
        measure.measure("speed", out=tmp_path)


def test_sizes_of_models_are_those_of_their_files():
    assert session.file_gb("llama-3-8b-q4_0") == pytest.approx(4.66, abs=0.02)
    assert session.file_gb("qwen3-4b-q4_k_m") == pytest.approx(2.5, abs=0.1)
