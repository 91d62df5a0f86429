"""A panel's run is in a thread of its own; a GPU belongs to whichever thread uses it."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from workbench.benchmarks.workload import parse
from workbench.common.errors import UsageError
from workbench.config import Toggles
from workbench.engine.engine import Engine
from workbench.engine.exclusive import measuring
from workbench.jupyter import pair

pytestmark = pytest.mark.gpu


def test_a_comparison_in_another_thread_is_right_and_the_first_goes_on(tiny_model):
    model = tiny_model("tiny-llama", "Q8_0")
    with Engine.load(model, device="cuda", n_ctx=128, toggles=Toggles()) as engine:
        before = engine.step([1]).copy()
        found, seen = [], []

        def run() -> None:
            with measuring("the panel", engine):
                try:
                    main.set()
                    assert go.wait(60)
                    found.append(
                        pair.compare(
                            engine, Toggles(), Toggles(sync="copy_boundary"), parse("tg8"), rounds=5
                        )
                    )
                except BaseException as error:
                    seen.append(error)

        main, go = threading.Event(), threading.Event()
        thread = threading.Thread(target=run)
        thread.start()
        assert main.wait(60)
        with pytest.raises(UsageError, match="the panel is measuring on this engine"):
            engine.step([2])
        go.set()
        thread.join()
        assert not seen and found[0].answer.holds and found[0].traces is not None
        engine.reset()
        assert np.array_equal(engine.step([1]), before)
