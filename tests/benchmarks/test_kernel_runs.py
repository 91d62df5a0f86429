"""`bench-kernels`: what is chosen, how it is measured and recorded, on a rig that is told times
and the null device; and the command itself on the embedded one."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

from tests.oracles.dequantize import dequantize
from workbench.backend.null import NullBackend, open_backend
from workbench.benchmarks.kernels import kernel_cases as cases
from workbench.benchmarks.kernels import kernel_rigs
from workbench.benchmarks.kernels.kernel_bench import KernelMatrix, KernelRun, bench_kernels
from workbench.benchmarks.kernels.kernel_cases import SHAPES, KernelCase
from workbench.benchmarks.kernels.kernel_memory import Copies, Launches
from workbench.benchmarks.kernels.kernel_rigs import PDL, PLAIN, Calls, CpuRig, CudaRig
from workbench.common.errors import UsageError
from workbench.graph.ir import F16, MXFP4, Q4_0
from workbench.report import roofline


class FakeRig:
    """Every launch takes 10 us plain and 8 us early; `left` repetitions, then Ctrl-C."""

    kinds, how, cache_bytes, least_launches, pass_bytes = (PLAIN, PDL), "faked", 1 << 10, 200, 1

    def __init__(self, stop_after: int = 1 << 30):
        self.left, self.n_open, self.n_made = stop_after, 0, 0
        self.order: list[str] = []

    def repeats(self, issues) -> SimpleNamespace:
        name, us = ((PLAIN, 10.0), (PDL, 8.0))[self.n_made % 2]  # plain is asked for first
        self.n_made, self.n_open = self.n_made + 1, self.n_open + 1

        def time_us(n: int) -> list[float]:
            self.order.append(name)
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
            return [len(issues) * us] * n

        def close() -> None:
            self.n_open -= 1

        return SimpleNamespace(time_us=time_us, close=close)

    def read_rates(self) -> dict[str, float]:
        return {"one": 900.0, "two": 1000.0}

    def void(self, read_gbps: float) -> str:
        return ""


@pytest.fixture
def backend() -> NullBackend:
    return open_backend(programmatic=True)


def matrix(types="Q4_0", shapes="qwen3-30b-a3b.gate", batches="1", quick=True) -> KernelMatrix:
    chosen = cases.parse_types(types), cases.parse_shapes(shapes), cases.parse_batches(batches)
    return KernelMatrix(*chosen, quick)


def test_names_choose_types_shapes_and_batches():
    assert cases.parse_types("q4_0,F16,Q4_0") == [Q4_0, F16]
    assert cases.parse_types("all") == list(cases.TYPES)
    for text, names in (
        ("8b.O,gpt-oss-20b", ["8b.o", "gpt-oss-20b.expert"]),
        ("4b.o", ["4b.o"]),
        ("all", [*SHAPES]),
    ):
        assert [shape.name for shape in cases.parse_shapes(text)] == names
    assert cases.parse_batches("1,2-4,8") == [1, 2, 3, 4, 8]
    for parse, text, says in (
        (cases.parse_types, "Q4_0,Q3_K", "type 'Q3_K' does not exist; did you mean Q6_K"),
        (cases.parse_shapes, "8b.ffn", "shape '8b.ffn' does not exist"),
        (cases.parse_batches, "4-2", "batch '4-2' is no"),
    ):
        with pytest.raises(UsageError, match=says):
            parse(text)
    # rows and columns of the published models, written out
    expected = {
        "1b.qkv": ((2048, 512, 512), 2048), "1b.down": ((2048,), 8192), "4b.o": ((2560,), 4096),
        "8b.glu": ((14336, 14336), 4096), "8b.head": ((128256,), 4096),
        "gpt-oss-20b.expert": ((2880,), 2880), "qwen3-30b-a3b.down": ((2048,), 768),
    }  # fmt: skip
    assert {name: SHAPES[name][1:3] for name in expected} == expected


def test_copies_have_their_own_addresses_and_launches(backend):
    """Finite weights, in many places; every launch finds its tensors, one copy after another."""
    assert kernel_rigs.rotating_bytes(50 << 20, quick=False) == 256 << 20
    assert kernel_rigs.rotating_bytes(100 << 20, quick=False) > 400 << 20, "more than four caches"
    assert kernel_rigs.rotating_bytes(100 << 20, quick=True) == 64 << 20
    case = KernelCase(MXFP4, SHAPES["qwen3-30b-a3b.down"])
    taken, load = [], backend.load_weight
    backend.load_weight = lambda tensor, data: (taken.append(data), load(tensor, data))[1]
    copies = Copies(backend, case, 10 * case.nbytes - 1, seed=0)
    assert len(copies.addresses) == 10 == len({a for p in copies.addresses for a in p.values()})
    assert len({data.ctypes.data for data in taken}) == 10  # used in place where that is how it is
    values = dequantize(taken[0], MXFP4, (2048, 768))
    assert np.isfinite(values).all() and values.std() > 0
    copies.free()
    assert not copies.addresses
    case = KernelCase(Q4_0, SHAPES["1b.gate_up"])
    copies = Copies(backend, case, 1, seed=0)
    launches = Launches(backend, case.nodes(copies.tensors, 3), copies, seed=0)
    issues = launches.issues(programmatic=False)
    assert len(issues) == 2 * len(copies.addresses) == 4
    backend.log.clear()
    for issue in issues:
        issue()
    assert [entry[3] for entry in backend.log] == ["y0", "y1"] * 2


def test_ways_to_launch_alternate_and_rows_say_so(backend, tmp_path):
    rig, seen, notes, ready = FakeRig(), [], list[str](), list[str]()
    backend.make_ready = lambda nodes, left: ready.extend(node.op for node in nodes)
    p = matrix("Q4_0,Q6_K", "qwen3-30b-a3b.gate,gpt-oss-20b", "1,2", quick=False)
    out = tmp_path / "run"
    made = bench_kernels(backend, p, out, rig=rig, on_row=seen.append, on_note=notes.append)
    (skipped,) = made.run["result"]["skipped"]
    assert skipped["why"] == "rows of 2880 are no multiple of the 256 in a block of Q6_K"
    assert notes[0].startswith("skipped Q6_K gpt-oss-20b.expert: rows of 2880")
    assert notes[1] == "read bandwidth 1000.0 GB/s (two, the best of 2)"
    assert rig.order[:6] == [PLAIN, PDL, PDL, PLAIN, PDL, PLAIN] and ready == ["mul_mat"] * 6
    assert rig.n_made == 2 * 3 * 2 and not rig.n_open
    assert made.rows == seen and len(seen) == 12 and not made.interrupted
    first, early = seen[:2]
    assert first[:2] == ("Q4_0", "qwen3-30b-a3b.gate") and (first.batch, first.launch) == (1, PLAIN)
    assert (first.us, early.us) == pytest.approx((10.0, 8.0))
    assert first.bytes == 768 * 2048 // 32 * 18 and first.copies * first.bytes >= 256 << 20
    assert first.gbps == pytest.approx(first.bytes / 10 / 1e3)
    assert first.share == pytest.approx(first.gbps / 1000)
    assert first.intensity == pytest.approx(2 * 32 / 18) == seen[2].intensity / 2
    assert first.per_replay % first.copies == 0 and first.replays == 15
    table = roofline.table(made.run)
    assert list(table["batch"]) == [1, 2] * 3 and dict(table.iloc[0])["us pdl"] == "8.00"
    made.run["result"]["void"] = "void: it reads slowly"
    assert roofline.caption(made.run).endswith("void: it reads slowly")
    left, right = roofline.roofline(made.run).axes
    assert "VOID" in left.get_title(loc="left"), "its shares do not count"
    roof, *points = left.get_lines()
    assert roof.get_ydata() == pytest.approx(1000 * np.asarray(roof.get_xdata()))
    drawn = sorted(xy for line in points for xy in zip(*line.get_data(), strict=True))
    assert np.array(drawn) == pytest.approx(np.array(sorted((r.intensity, r.gflops) for r in seen)))
    shares = sorted(x for line in right.get_lines()[:-1] for x in line.get_data()[0])
    assert shares == pytest.approx(sorted(100 * r.share for r in seen if r.batch == 1))


def test_a_run_reads_back_and_ctrl_c_keeps_the_finished(backend, tmp_path):
    made = bench_kernels(backend, matrix(), tmp_path / "run", rig=FakeRig(), reason="because")
    back = KernelRun.load(tmp_path / "run")
    assert back.run == json.loads(json.dumps(made.run)) and back.rows == made.rows
    assert back.run["kind"] == "kernels" and back.run["tests"] == ["Q4_0 qwen3-30b-a3b.gate b1"]
    assert [arm["toggles"] for arm in back.run["arms"]] == [{"pdl": "off"}, {"pdl": "on"}]
    row = back.rows[0]
    assert row.us == 10.0 and row.per_replay > row.copies, "a replay goes over them several times"
    samples = back.samples[back.samples["arm"] == row.launch]
    us = samples["ns"] / samples["n_tokens"] / 1e3
    assert len(samples) == row.replays and us.median() == pytest.approx(row.us)
    rig = FakeRig(stop_after=5)  # one batch is two rounds of two
    made = bench_kernels(backend, matrix(batches="1-3"), tmp_path / "cut", rig=rig)
    assert made.interrupted and [row.batch for row in made.rows] == [1, 1]
    assert KernelRun.load(tmp_path / "cut").rows == made.rows
    assert not rig.n_open


def test_the_first_of_calls_is_not_timed(monkeypatch):
    log, now, took = list[str](), [0], iter([9000, 1000, 2000])

    def launch() -> None:
        log.append("a")
        now[0] += next(took)

    monkeypatch.setattr(kernel_rigs.time, "perf_counter_ns", lambda: now[0])
    calls = Calls([launch, lambda: log.append("b")], lambda: log.append("wait"))
    assert calls.time_us(2) == [1.0, 2.0] and log == ["a", "b", "wait"] * 3


@pytest.mark.parametrize(
    ("name", "gbps", "void"),
    [("NVIDIA H100 80GB HBM3 (sm_90)", 2990.0, True), ("NVIDIA H100 PCIe (sm_90)", 1900.0, False),
     ("NVIDIA H100 80GB HBM3 (sm_90)", 3090.0, False), ("NVIDIA A100 (sm_80)", 1500.0, False)],
)  # fmt: skip
def test_an_h100_that_reads_slowly_voids_the_run(name, gbps, void):
    rig = object.__new__(CudaRig)
    rig._backend = open_backend(name=name)
    assert rig.void(gbps).startswith("void: this H100 reads 2990 GB/s") == void


def test_the_command_measures_and_writes_a_folder(call, backend, tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_rigs, "QUICK_ROTATING", 1 << 20)
    rates = CpuRig(backend, quick=True).read_rates()
    assert set(rates) == set(kernel_rigs.READERS) and all(rate > 0.01 for rate in rates.values())
    out = tmp_path / "run"
    _, text, _ = call(
        "bench-kernels", "--device", "embedded", "--types", "Q4_0", "--shapes", "1b.o", "--quick",
        "--out", out,
    )  # fmt: skip
    assert "| Q4_0 | 1b.o  | 2048 | 2048 |" in text and "quick: no figures to quote" in text
    (row,) = KernelRun.load(out).rows
    assert row.us > 0 and row.copies == 2
    assert (out / "roofline.png").read_bytes().startswith(b"\x89PNG")
