"""How often notebooks repeat: as asked on a CPU, until told on a GPU; loads until all is built."""

from __future__ import annotations

from types import SimpleNamespace

import workbench as wb
from workbench.answers.effort import AT_MOST_S, effort, until_built


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
