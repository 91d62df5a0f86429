"""What checks of branches see (#16991): an arena that is forced to use a source's bytes again.

K's rotation is given the bytes of what Q, K and V multiply. On one stream that is right: all three
products are over by then. On a stream of its own it runs beside V's product, which may still read
them. Writes of the branches never meet, so llama.cpp's check sees nothing wrong.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

import workbench as wb
from tests.gates import hold
from tests.oracles.adversary import SEEDS, Adversary
from workbench.common.errors import UsageError
from workbench.graph import arena
from workbench.program.check.hazards import check_cycle
from workbench.program.commands import Launch, Program

SOURCE, WRITER, READER, OTHER = "attn_norm-0 (w)", "Kcur_rope-0", "Vcur-0", "Qcur-0"
ONE_STREAM = {"graph_reuse": "set_rows"}
STREAMS = ONE_STREAM | {"streams": "3", "copy_stream": "compute"}
PROMPT, NEXT, GATE_S = [5, 900, 17, 403], 77, 0.03


@pytest.fixture(scope="module")
def engine(tiny_model) -> Iterator[wb.Engine]:
    path, off = tiny_model("tiny-llama", "F32"), wb.Toggles()
    with wb.Engine.load(path, device="embedded", n_ctx=256, unsafe=True, toggles=off) as made:
        yield made


@pytest.fixture(scope="module")
def wanted(engine) -> np.ndarray:
    """The logits of one stream, from an arena that nobody forces."""
    return decoded(engine, ONE_STREAM)


@pytest.fixture
def forced(monkeypatch) -> None:
    """An arena in which WRITER lies where SOURCE does, after everything else."""
    plain = arena.layout

    def layout(nodes, *given, **named):
        made = plain(nodes, *given, **named)
        two = [t for t in made.offsets if t.name in (SOURCE, WRITER)]
        if len(two) < 2:
            return made
        there = made.offsets | dict.fromkeys(two, made.nbytes)
        return made._replace(offsets=there, nbytes=made.nbytes + max(t.nbytes for t in two))

    monkeypatch.setattr(arena, "layout", layout)


def decoded(engine: wb.Engine, toggles: dict[str, str]) -> np.ndarray:
    """Logits after PROMPT and NEXT, while the stream of READER is held for a while."""
    with engine.variant(wb.Toggles(**toggles)) as one:
        one.prefill(PROMPT[:-1])
        one.step(PROMPT[-1:])
        reader = next(c for c in launches(one.program()) if c.node.name == READER)
        with hold(one.backend, reader.stream.id) as gate:
            timer = threading.Timer(GATE_S, gate.open)
            timer.start()
            found = one.step([NEXT])
            timer.join()
        return found


def launches(program: Program) -> list[Launch]:
    return [c for c in program.commands if isinstance(c, Launch) and not c.by_host]


def test_the_checker_names_both_and_the_adversary_reads_it(engine, forced):
    with engine.variant(wb.Toggles(**STREAMS)) as one:
        findings = check_cycle([one.program()])
        named = {(r.first.command.label, r.second.command.label) for r in findings.races}
        assert named == {(READER, WRITER), (OTHER, WRITER)}
        assert {race.kind for race in findings.races} == {"read-write"}
        adversary = Adversary([one.program()])
        wrong = [w for seed in SEEDS for w in adversary.run(seed)]
        assert {READER, OTHER} & {w.reader.command.label for w in wrong if w.reader}


@pytest.mark.parametrize(
    ("validate", "streams", "right"), [("off", 3, False), ("writes", 3, False), ("all", 1, True)]
)
def test_logits_are_wrong_unless_everything_is_checked(
    engine, wanted, request, validate, streams, right
):
    """Writes against writes see nothing. An arena by visibility passes every check."""
    toggles = STREAMS | {"validate": validate}
    for n_streams, is_right in ((3, True), (streams, right)):
        with engine.variant(wb.Toggles(**toggles)) as one:
            before = one.counters["programs_unforked"]
            assert len({c.stream for c in launches(one.program())}) == n_streams
            assert one.counters["programs_unforked"] == before + (n_streams == 1)
        assert np.array_equal(decoded(engine, toggles), wanted) == is_right
        request.getfixturevalue("forced")
    np.testing.assert_array_equal(decoded(engine, ONE_STREAM), wanted)


def test_a_race_of_a_step_that_rotates_cells_is_refused_at_loading(tiny_model):
    """llama.cpp's check sees no scratch, in which rotations of two layers meet."""
    path = tiny_model("tiny-llama", "Q8_0")
    toggles = wb.Toggles(streams="3", fork="any", lifetimes="serial", validate="writes")
    with pytest.raises(UsageError, match="streams=3 race: launch rope_shift k_shift-0"):
        wb.Engine.load(path, device="embedded", toggles=toggles)
    on_one = toggles.switched("validate", "all")
    with wb.Engine.load(path, device="embedded", toggles=on_one) as engine:
        engine.prefill([1, 2, 3], "last")
        engine.cache.remove(0, 0, 1)
        engine.cache.shift(0, -1, 1)
        engine.step([4])
        assert engine.counters["programs_unforked"] and engine.cache.moved is None


@pytest.mark.parametrize("lifetimes", ["serial", "interleaved"])
@pytest.mark.parametrize("validate", ["writes", "all"])
def test_what_a_check_drops_runs_on_one_stream_and_is_right(engine, wanted, lifetimes, validate):
    """The serial arena lets branches write the same bytes; so each check drops its branches. In the
    order of llama.cpp's arena, one stream is right as well."""
    toggles = STREAMS | {"lifetimes": lifetimes, "validate": validate}
    with engine.variant(wb.Toggles(**toggles)) as one:
        safe = check_cycle([one.program()]).safe
    assert safe or validate == "writes"
    if safe:
        np.testing.assert_array_equal(decoded(engine, toggles), wanted)
