"""What binds where a target is missed: recomputed from the recorded files alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.test_targets import PEAK, READ, decode_run, kernel_row, model, record
from workbench.report import binds, targets
from workbench.report.recorded import LARGE, NOT_MEASURED, Recorded


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
STEP = {
    "read_gbps": READ, "product_tflops": PEAK, "n_tokens": 1, "launches": 180,
    "weight_bytes": 3_000_000_000, "product_flops": 6 * 10**12,
    "step_us": us(2100.0), "eager_us": us(2050.0), "graph_us": us(2000.0),
    "kinds": {
        "attention": {"launches": 36, "weight_bytes": 0, "us": us(300.0)},
        "norm": {"launches": 1, "weight_bytes": 0, "us": us(2.0)},
        "glu": {"launches": 36, "weight_bytes": 1_500_000_000, "us": us(900.0)},
    },
}  # fmt: skip


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
        "step 2100 us, its 180 launches as one graph 2000 (reading weights 1000); left out, they "
        "save: glu 900 (45.0 %, reads for 500), attention 300 (15.0 %); "
        "not of any one of these 800"
    )
    assert "(reading weights 1000, tensor cores 10000)" in binds.step(STEP | {"n_tokens": 64})


def test_a_step_names_what_leaving_out_makes_slower():
    worse = {"us": {"median": -120.0}, "weight_bytes": 0}
    said = binds.step(STEP | {"kinds": STEP["kinds"] | {"norm": worse}})
    assert said.endswith("of these 800; without these the graph takes longer: norm 120")


def test_a_step_that_was_not_taken_apart():
    assert binds.step(None) == NOT_MEASURED


def test_only_missed_products_have_a_line(tmp_path):
    rows = [kernel_row("Q4_0", shape, "plain", 0.9) for shape in LARGE[:-1]]
    rows += [kernel_row("Q4_0", LARGE[-1], "plain", 0.8), kernel_row("Q4_K", "8b.o", "pdl", 0.6)]
    rows = [row | {"launches": 1} for row in rows]
    record(tmp_path, "kernels", "kernels", {}, result={"rows": rows, "read_gbps": READ})
    (first, second) = targets.kernel_binds(Recorded(tmp_path))
    assert (first.missed, first.measured) == ("Q4_0 8b.head, plain", "80.0 %")
    assert (second.missed, second.binds) == ("Q4_K 8b.o, pdl", NOT_MEASURED)
    write(tmp_path, "launches", LAUNCHES)
    (first, second) = targets.kernel_binds(Recorded(tmp_path))
    assert "an empty launch 1.00" in first.binds and "an empty launch 0.50" in second.binds


def test_a_missed_decode_has_the_line_of_its_step(tmp_path):
    decode_run(tmp_path)
    (line,) = targets.decode_binds(Recorded(tmp_path))
    assert line == ("llama-3-8b-f16, tg128", "83.3 %", NOT_MEASURED)
    write(tmp_path, "ablation-llama-3-8b-f16", STEP)
    (line,) = targets.decode_binds(Recorded(tmp_path))
    assert line.binds == binds.step(STEP)
    assert line.binds in targets.table(tmp_path)
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
    assert line.missed == "llama-3-8b-q4_0, 16 tokens" and line.binds == NOT_MEASURED
    assert line.measured == "16: 5.0 %, 128: 25.0 %"  # 1,000 us; 10,000 us
    for n in (64, 128):
        write(tmp_path, f"ablation-llama-3-8b-q4_0-{n}", STEP | {"n_tokens": n})
    (line,) = targets.batch_binds(Recorded(tmp_path))
    assert line.binds == "of 64 tokens: " + binds.step(STEP | {"n_tokens": 64})


def test_a_missed_product_of_many_tokens_names_both_bounds(tmp_path):
    rows = [
        kernel_row("F16", "8b.o", "plain", 0.2, batch=128) | {"us": 9.0},
        kernel_row("F16", "8b.o", "pdl", 0.2, batch=128) | {"us": 8.0},
    ]
    result = {"rows": rows, "read_gbps": READ, "product_tflops": PEAK}
    record(tmp_path, "kernels-batches", "kernels", {}, result=result)
    (line,) = targets.batch_binds(Recorded(tmp_path))
    assert line == ("F16 8b.o, 128 tokens", "8.0 us", "8.0 us; reading 0.7, tensor cores 0.4")


def test_where_nothing_is_missed_there_is_no_table(tmp_path):
    assert targets.binds_table(Recorded(tmp_path)) == ""
