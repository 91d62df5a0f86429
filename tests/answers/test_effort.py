"""How often notebooks repeat: as asked on a CPU, until told on a GPU; loads until all is built, and
in turn."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import workbench as wb
from workbench.answers.effort import AT_MOST_S, effort, fastest, until_built
from workbench.traffic.bench import ServeBench, ServedRow
from workbench.traffic.load import CLOSED, Arrivals


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


def test_of_several_turns_the_fastest_is_kept(tmp_path):
    """Only the device's name is asked for."""
    rates, turns = {"a": [1.0, 3.0], "b": [5.0, 4.0]}, []

    def load(name: str, folder: Path) -> ServeBench:
        turns.append(name)
        folder.mkdir()
        tps = rates[name][turns.count(name) - 1]
        (folder / "rate").write_text(str(tps))
        row = ServedRow(Arrivals(CLOSED, 1), 1, {"output_throughput": tps}, {})
        return ServeBench([row], {})

    loads = {tmp_path / "runs" / name: partial(load, name) for name in rates}
    for device, kept, order in (
        ("cuda", ("3.0", "5.0"), "abab"),
        ("embedded", ("1.0", "5.0"), "ab"),
    ):
        turns.clear()
        found = fastest(SimpleNamespace(device=device), loads)
        assert "".join(turns) == order, "in turn"
        assert [(folder / "rate").read_text() for folder in found] == [*kept]
        assert [made.rows[0].figures["output_throughput"] for made in found.values()] == [
            *map(float, kept)
        ]
        assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["a", "b"]
        shutil.rmtree(tmp_path / "runs")
