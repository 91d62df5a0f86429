"""`make peer-cuda` on a GPU, beside a llama-bench that only says times: our side."""

from __future__ import annotations

import pytest

from data.measure.command import Options
from data.measure.peer import OURS, PeerRun
from tests.peer import cuda, fake_llama_bench
from workbench.benchmarks.runs import results

pytestmark = [pytest.mark.gpu, pytest.mark.alone]
MODEL = "tiny-llama-q8_0"


def test_our_side_is_measured_where_llama_cpp_is(backend, tmp_path, tiny_models):
    program = fake_llama_bench.install(tmp_path / "built")
    card = backend.description.partition(" (sm_")[0]
    (program.parent / "card").write_text(card)
    given = {"tests": "pp32,tg16", "ours": f"{','.join(cuda.SETTINGS)},all"}
    options = Options(out=tmp_path / "out", files=tiny_models)
    cuda.main(MODEL, peer=program, options=options, **given)
    found = results.load_run(tmp_path / "out" / MODEL)
    peer, result = PeerRun(found), found.run["result"]
    assert peer.interleaved and result["peer"]["says"]["gpu_info"] == card
    assert all(answer["holds"] for answer in result["answers"].values())
    assert len(result["turns"]) == 5 * len(found.run["arms"])
    for test in found.run["tests"]:
        best = peer.best(test)
        assert best.arm_ours.startswith(OURS) and best.beside.after > 0
        assert best.beside.ratio.n == 5


def test_another_card_is_refused(tmp_path, tiny_models):
    program = fake_llama_bench.install(tmp_path / "built")
    with pytest.raises(RuntimeError, match="llama-bench computed on no GPU, and the engine on"):
        options = Options(out=tmp_path / "out", files=tiny_models)
        cuda.main(MODEL, peer=program, tests="tg4", options=options)
