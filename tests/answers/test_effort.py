"""How often notebooks repeat: as asked on a CPU, until told on a GPU; loads until all is built, and
in turn."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import workbench as wb
from workbench.answers.effort import AT_MOST_S, effort, fastest, until_built
from workbench.traffic.bench import ServeBench, load_served


def test_a_gpu_repeats_until_the_interval_is_narrow():
    """Only the device's name is asked for."""
    for device, more in (("embedded", {}), ("cuda", {"until": "2%", "at_most_s": AT_MOST_S})):
        engine = SimpleNamespace(device=device)
        assert effort(engine, 5, "2%") == {"rounds": 5} | more
        assert effort(engine, 4, "2%") == {"rounds": 4, "smoke": True}


def test_a_load_is_served_until_nothing_is_built(tiny_model):
    path, sizes = tiny_model("tiny-llama", "Q8_0"), [1, 2, 2, 3]
    kept = wb.Toggles(graph_reuse="set_rows")
    with wb.Engine.load(path, device="null", toggles=kept) as engine:

        def serve() -> None:
            engine.step(range(1, 1 + sizes.pop(0)))

        until_built(engine, serve, most=4)
        assert sizes == [3], "the third pass built nothing"
        until_built(engine, serve, most=1)
        assert sizes == [], "at most so often"


def test_of_several_turns_the_fastest_is_kept(tiny_model, tmp_path):
    """Only the device's name is asked for. What takes turns is what one engine really served."""
    asked = {"slots": 2, "concurrency": "2", "n_prompt": "4", "n_gen": "3", "n_requests": 4}
    rates, turns = {"a": [1.0, 3.0], "b": [5.0, 4.0]}, []
    path = tiny_model("tiny-llama", "Q8_0")
    with wb.Engine.load(path, device="embedded", n_seqs=2) as engine:

        def load(name: str, out: Path) -> ServeBench:
            turns.append(name)
            made = wb.serve_bench(engine, out=out, seed=turns.count(name), **asked)
            made.rows[-1].figures["output_throughput"] = rates[name][turns.count(name) - 1]
            return made

        loads = {tmp_path / name: partial(load, name) for name in rates}
        for device, kept, order in (("cuda", (2, 1), "abab"), ("embedded", (1, 1), "ab")):
            turns.clear()
            fastest(SimpleNamespace(device=device), loads)
            assert "".join(turns) == order, "in turn"
            runs = [load_served(folder) for folder in loads]
            assert [made.run["seed"] for made in runs] == [*kept]
            assert [made.run["run_id"] for made in runs] == ["a", "b"]
            assert all(made.rows[0].figures["completed"] == 4 for made in runs)
            assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
            for folder in loads:
                shutil.rmtree(folder)
