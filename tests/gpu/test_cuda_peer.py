"""`make peer-cuda` on a GPU, beside a llama-bench that only says times: our side."""

from __future__ import annotations

import pytest

from data.measure.peer import OURS, PeerRun
from tests.peer import cuda, fake_llama_bench
from workbench.bench import results

pytestmark = [pytest.mark.gpu, pytest.mark.alone]
MODEL = "tiny-llama-q8_0"


def test_our_side_is_measured_where_llama_cpp_is(backend, tmp_path, tiny_models):
    program = fake_llama_bench.install(tmp_path / "built")
    card = backend.description.partition(" (sm_")[0]
    (program.parent / "card").write_text(card)
    given = {"files": tiny_models, "tests": "pp32,tg16", "ours": f"{','.join(cuda.SETTINGS)},all"}
    cuda.main(MODEL, peer=program, out=tmp_path / "out", **given)
    found = results.load_run(tmp_path / "out" / MODEL)
    peer, result = PeerRun(found), found.run["result"]
    assert peer.interleaved and result["peer"]["says"]["gpu_info"] == card
    assert all(answer["holds"] for answer in result["answers"].values())
    assert len(result["turns"]) == 5 * len(found.run["arms"])
    for test in found.run["tests"]:
        best = peer.best(test)
        assert best.arm_ours.startswith(OURS) and best.ours > 0 and best.ratio.n == 5


def test_another_card_is_refused(tmp_path, tiny_models):
    program = fake_llama_bench.install(tmp_path / "built")
    with pytest.raises(RuntimeError, match="llama-bench computed on no GPU, and the engine on"):
        cuda.main(MODEL, peer=program, out=tmp_path / "out", files=tiny_models, tests="tg4")
