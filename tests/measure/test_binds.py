"""What binds where a target is missed: recomputed from the recorded files alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from data.measure import binds, counters, readme, targets
from data.measure.recorded import LARGE, NOT_MEASURED, Recorded
from tests.measure.test_targets import PEAK, READ, decode_run, kernel_row, model, record


def us(median: float) -> dict[str, float]:
    return {"median": median, "min": median, "max": median, "n": 5}


# 33.0 MB at 3,000 GB/s: 11.0 us
LAUNCHES = {
    "read_gbps": READ,
    "graph_us": {"plain": us(1.0), "pdl": us(0.5)},
    "stream_us": {"plain": us(2.0), "pdl": us(0.8)},
    "reads": [{"bytes": 33_000_000, "kernel": "read_8 x8", "us": us(12.5)}],
}
ROW = {
    "type": "Q4_0", "shape": "8b.gate_up", "rows": 28672, "cols": 4096, "batch": 1,
    "launch": "plain", "us": 28.0, "share": 22 / 28, "bytes": 66_000_000, "launches": 2,
}  # fmt: skip
# weights of 3 GB at 3,000 GB/s: 1,000 us
STEP: dict[str, Any] = {
    "read_gbps": READ, "product_tflops": PEAK, "n_tokens": 1, "launches": 180,
    "weight_bytes": 3_000_000_000, "product_flops": 6 * 10**12,
    "step_us": us(2100.0), "eager_us": us(2050.0), "graph_us": us(2000.0),
    "kinds": {
        "attention": {"launches": 36, "weight_bytes": 0, "us": us(300.0)},
        "norm": {"launches": 1, "weight_bytes": 0, "us": us(2.0)},
        "glu": {"launches": 36, "weight_bytes": 1_500_000_000, "us": us(900.0)},
    },
}  # fmt: skip


# of 33.0 MB
COUNTED = {
    "type": "Q4_0", "shape": "8b.gate", "batch": 1, "bytes": 33_000_000, "us": 13.0,
    "memory_pct": 70.0, "issue_pct": 62.0, "alu_pct": 40.0, "tensor_pct": 0.0, "warps_pct": 55.0,
    "stalls": {"wait": 1.25, "long_scoreboard": 9.5, "not_selected": 0.5},
}  # fmt: skip
READING = {"type": "read", "shape": "read_8 x16", "batch": 1, "bytes": 33_000_000,
           "memory_pct": 81.0, "issue_pct": 9.0, "stalls": {}}  # fmt: skip
LATENT = (
    "memory 70 % busy (reading alone 81 %), issue slots 62 %, integer units 40 %: none is full "
    "with 55 % of the warps there is room for: latency binds; a warp waits longest (cycles an "
    "instruction) for memory (9.5), fixed latencies (1.2)"
)


ROUGH = "rough: what is left out here leaves the others other bytes to compute on"


def write(folder: Path, name: str, found: dict) -> None:
    (folder / f"cuda-{name}.json").write_text(json.dumps(found))


def test_a_plain_product_is_held_to_reading_and_launching():
    said = binds.product(ROW, READ, LAUNCHES)
    assert said == (
        "a launch takes 14.00 us; reading 33.0 MB 11.00 and an empty launch 1.00, one after the "
        "other, would be 91.7 %; a kernel that only reads takes 12.50 (88.0 %); "
        "the product's own 1.50 us"
    )


def test_without_a_read_of_that_size_launching_alone_is_told():
    said = binds.product(ROW | {"bytes": 33_000_000}, READ, LAUNCHES)
    assert "only reads" not in said and said.endswith("the product's own 7.50 us")  # 14 - 5.5 - 1


def test_a_programmatic_product_is_not_held_to_plain_reading():
    said = binds.product(ROW | {"launch": "pdl"}, READ, LAUNCHES)
    assert "an empty launch 0.50" in said and "only reads" not in said
    assert said.endswith("the product's own 2.50 us")


@pytest.mark.parametrize("launches", [None, {"graph_us": {}}])
def test_a_product_without_measured_launches(launches):
    assert binds.product(ROW, READ, launches) == NOT_MEASURED


def test_a_step_names_what_leaving_out_saves_most_first():
    assert binds.step(STEP) == (
        "step 2100 us, its 180 launches as one graph 2000 (reading weights 1000)",
        "left out, they save: glu 900 (45.0 %, reads for 500), attention 300 (15.0 %); "
        "not of any one of these 800",
        ROUGH,
    )
    assert "(reading weights 1000, tensor cores 10000)" in binds.step(STEP | {"n_tokens": 64})[0]


def test_a_step_names_what_leaving_out_makes_slower():
    worse = {"us": {"median": -120.0}, "weight_bytes": 0}
    said = binds.step(STEP | {"kinds": STEP["kinds"] | {"norm": worse}})
    assert said[1].endswith("of these 800")
    assert said[2:] == ("without these the graph takes longer: norm 120", ROUGH)


def test_costs_are_shares_of_the_graph_they_were_taken_from():
    first, second = binds.step(STEP | {"apart_us": us(2500.0)})
    assert first.endswith("2000 (reading weights 1000), no two tensors in the same memory 2500")
    assert "glu 900 (36.0 %" in second and second.endswith("not of any one of these 1300")
    assert binds.step(STEP | {"unchanged": False})[-1].startswith("void: ")
    assert binds.step(STEP | {"unchanged": True}) == binds.step(STEP)


def test_counters_say_what_is_full():
    assert binds.counted(COUNTED, READING) == LATENT
    assert binds.counted(COUNTED).startswith("memory 70 % busy, issue slots")
    issue = binds.counted(COUNTED | {"issue_pct": 88.0}, READING)
    assert "issue slots 88 %, integer units 40 %: issue slots bind; a warp" in issue
    reading = binds.counted(COUNTED | {"memory_pct": 78.0}, READING)  # of 81: as reading alone
    assert "integer units 40 %: memory binds;" in reading
    assert "latency binds" in binds.counted(COUNTED | {"memory_pct": 78.0})
    both = binds.counted(COUNTED | {"memory_pct": 92.0, "tensor_pct": 85.0, "stalls": {}})
    assert (
        both
        == "memory 92 % busy, tensor cores 85 %, issue slots 62 %: memory and tensor cores bind"
    )


def test_without_what_memory_or_a_unit_did_counters_say_nothing():
    assert binds.counted({"stalls": {}, "memory_pct": 50.0}) == NOT_MEASURED
    assert binds.counted({"stalls": {}, "issue_pct": 50.0}) == NOT_MEASURED


def test_every_wait_that_is_counted_has_words():
    assert set(binds.WAITS) == set(counters.REASONS)
    assert set(binds.PARTS) < set(counters.COUNTERS)


def test_counters_of_a_row_are_those_of_its_type_bytes_and_tokens():
    counters = {"cases": [READING, COUNTED | {"type": "Q4_K", "issue_pct": 99.0}, COUNTED]}
    assert binds.by_counters(counters, ROW) == "by counters: " + LATENT  # two launches of 33 MB
    for other in ({"type": "Q8_0"}, {"batch": 16}, {"launches": 1}):
        assert binds.by_counters(counters, ROW | other) == ""
    assert binds.by_counters(None, ROW) == ""


def test_a_step_of_many_tokens_has_the_counters_of_its_products():
    cases = [
        COUNTED | {"shape": f"8b.{name}", "batch": n, "us": float(n)}
        for name in ("glu", "down") for n in (1, 16, 64)
    ]  # fmt: skip
    glu, down = binds.step_by_counters({"cases": [READING, *cases]}, "llama-3-8b-q4_0", 48)
    assert glu.startswith("by counters, glu of 64 tokens: 64.0 us, memory 70 % busy,")
    assert down.startswith("by counters, down of 64 tokens: 64.0 us, memory")
    for other in ("llama-3-8b-q8_0", "qwen3-4b-q4_0"):
        assert binds.step_by_counters({"cases": cases}, other, 48) == ()
    assert binds.step_by_counters(None, "llama-3-8b-q4_0", 48) == ()


def test_a_step_that_was_not_taken_apart():
    assert binds.step(None) == (NOT_MEASURED,)


def test_only_missed_products_have_a_line(tmp_path):
    rows = [kernel_row("Q4_0", shape, "plain", 0.9) for shape in LARGE[:-1]]
    rows += [kernel_row("Q4_0", LARGE[-1], "plain", 0.8), kernel_row("Q4_K", "8b.o", "pdl", 0.6)]
    rows = [row | {"launches": 1} for row in rows]
    record(tmp_path, "kernels", "kernels", {}, result={"rows": rows, "read_gbps": READ})
    (first, second) = targets.kernel_binds(Recorded(tmp_path))
    assert (first.missed, first.measured) == ("Q4_0 8b.head, plain", "80.0 %")
    assert (second.missed, second.binds) == ("Q4_K 8b.o, pdl", (NOT_MEASURED,))
    write(tmp_path, "launches", LAUNCHES)
    (first, second) = targets.kernel_binds(Recorded(tmp_path))
    assert len(first.binds) == 1
    own = COUNTED | {"bytes": rows[-2]["bytes"]}
    write(tmp_path, "counters", {"cases": [own]})
    (first, second) = targets.kernel_binds(Recorded(tmp_path))
    assert first.binds[1] == "by counters: " + binds.counted(own)
    assert "an empty launch 1.00" in first.binds[0] and "an empty launch 0.50" in second.binds[0]


def test_a_missed_decode_has_the_line_of_its_step(tmp_path):
    decode_run(tmp_path)
    (line,) = targets.decode_binds(Recorded(tmp_path))
    assert line == ("llama-3-8b-f16, tg128", "83.3 %", (NOT_MEASURED,))
    commit = {"hash": "1" * 40, "dirty": False}
    write(tmp_path, "ablation-llama-3-8b-f16", STEP | {"commit": commit})
    (line,) = targets.decode_binds(Recorded(tmp_path))
    assert line.binds[:-1] == binds.step(STEP)
    assert line.binds[-1] == "taken apart at commit 11111111, the run is of 00000000"
    table = readme.made("targets-cuda", Recorded(tmp_path))
    assert f"- **llama-3-8b-f16, tg128: 83.3 %**. S{line.binds[0][1:]}\n" in table
    assert all(f"\n  - {statement}" in table for statement in line.binds[1:])
    write(tmp_path, "launches", {"commit": commit | {"dirty": True}})
    said = "`cuda-launches.json` is of commit 11111111 with uncommitted changes."
    assert readme.made("targets-cuda", Recorded(tmp_path)).endswith(f"\n\n{said}")
    decode_run(tmp_path, us=5500.0)
    assert list(targets.decode_binds(Recorded(tmp_path))) == []


def test_missed_steps_of_many_tokens_take_the_nearest_ablation(tmp_path):
    record(
        tmp_path, "batches-llama-3-8b-q4_0", "bench",
        {"pp16": [20e3] * 5, "pp64": [20e3] * 5, "pp128": [40e3] * 5},
        model=model("llama-3-8b", "Q4_0", 3e9),
        result={
            "read_gbps": READ, "product_tflops": PEAK,
            "product_flops": {"pp16": 0.6e12, "pp64": 9e12, "pp128": 6e12},
        },
    )  # fmt: skip
    (line,) = targets.batch_binds(Recorded(tmp_path))
    assert line.missed == "llama-3-8b-q4_0" and line.binds == (NOT_MEASURED,)
    assert line.measured == "16 tokens 5.0 %, 128 tokens 25.0 %"  # 1,000 us; 10,000 us
    for n in (64, 128):
        write(tmp_path, f"ablation-llama-3-8b-q4_0-{n}", STEP | {"n_tokens": n})
    (line,) = targets.batch_binds(Recorded(tmp_path))
    first, *rest = binds.step(STEP | {"n_tokens": 64})
    assert line.binds == (f"of 64 tokens: {first}", *rest)


def test_a_missed_product_of_many_tokens_names_both_bounds(tmp_path):
    rows = [
        kernel_row("F16", "8b.o", "plain", 0.2, batch=128) | {"us": 9.0},
        kernel_row("F16", "8b.o", "pdl", 0.2, batch=128) | {"us": 8.0},
    ]
    result = {"rows": rows, "read_gbps": READ, "product_tflops": PEAK}
    record(tmp_path, "kernels-batches", "kernels", {}, result=result)
    (line,) = targets.batch_binds(Recorded(tmp_path))
    said = "8.0 us, of which reading alone would take 0.7, tensor cores alone 0.4"
    assert line == ("F16 8b.o, 128 tokens", "8.3 %", (said,))


def test_where_nothing_is_missed_there_is_no_list(tmp_path):
    assert targets.binds_lists(Recorded(tmp_path)) == ""
