"""What checks of branches see (#16991): an arena that is forced to use a source's bytes again.

K's rotation is given the bytes of what Q, K and V multiply. On one stream that is right: all three
products are over by then. On a stream of its own it runs beside V's product, which may still read
them. Writes of the branches never meet, so llama.cpp's check sees nothing wrong:

    stream 1   K product . K rope: writes where norm's result lies
    stream 2   ........... V product: reads norm's result       held by a gate, as on a busy GPU
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

import workbench as wb
from tests.gates import hold
from tests.oracles.adversary import SEEDS, Adversary
from workbench.graph import arena
from workbench.program.check.hazards import check_cycle
from workbench.program.commands import Launch, Program

SOURCE, WRITER, READER, OTHER = "attn_norm-0 (w)", "Kcur_rope-0", "Vcur-0", "Qcur-0"
STREAMS = {"graph_reuse": "set_rows", "streams": "3", "copy_stream": "compute"}
PROMPT, NEXT, GATE_S = [5, 900, 17, 403], 77, 0.03


@pytest.fixture(scope="module")
def engine(tiny_model) -> Iterator[wb.Engine]:
    path = tiny_model("tiny-llama", "F32")
    with wb.Engine.load(path, device="embedded", n_ctx=256, toggles=wb.Toggles()) as made:
        yield made


@pytest.fixture(scope="module")
def wanted(engine) -> np.ndarray:
    """The logits of one stream, from an arena that nobody forces."""
    return decoded(engine, {"graph_reuse": "set_rows"})


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


def decoded(engine: wb.Engine, toggles: dict[str, str], held: bool = False) -> np.ndarray:
    """Logits after PROMPT and NEXT. held: while the stream of READER is held for a while."""
    with engine.variant(wb.Toggles(**toggles)) as one:
        one.prefill(PROMPT[:-1])
        one.step(PROMPT[-1:])
        if not held:
            return one.step([NEXT])
        with hold(one.backend, launch(one.program(), READER).stream.id) as gate:
            timer = threading.Timer(GATE_S, gate.open)
            timer.start()
            found = one.step([NEXT])
            timer.join()
        return found


def launch(program: Program, name: str) -> Launch:
    return next(c for c in program.commands if isinstance(c, Launch) and c.node.name == name)


def n_streams(program: Program) -> int:
    return len({c.stream for c in program.commands if isinstance(c, Launch) and not c.by_host})


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
    for is_forced in (False, True):
        if is_forced:
            request.getfixturevalue("forced")
        with engine.variant(wb.Toggles(**toggles)) as one:
            before = one.counters["programs_unforked"]
            assert n_streams(one.program()) == (streams if is_forced else 3)
            dropped = is_forced and streams == 1
            assert one.counters["programs_unforked"] == before + dropped
        found = decoded(engine, toggles, held=True)
        assert np.array_equal(found, wanted) == (right or not is_forced)
    np.testing.assert_array_equal(decoded(engine, {"graph_reuse": "set_rows"}), wanted)


@pytest.mark.parametrize("lifetimes", ["serial", "interleaved"])
@pytest.mark.parametrize("validate", ["writes", "all"])
def test_what_a_check_drops_runs_on_one_stream_and_is_right(engine, wanted, lifetimes, validate):
    """The serial arena lets branches write the same bytes; so each check drops its branches. In the
    order of llama.cpp's arena, one stream is right as well."""
    toggles = STREAMS | {"lifetimes": lifetimes, "validate": validate}
    with wb.Engine.load(
        engine.model.path, device="embedded", n_ctx=256, unsafe=True, toggles=wb.Toggles()
    ) as unsafe:
        with unsafe.variant(wb.Toggles(**toggles)) as one:
            safe = check_cycle([one.program()]).safe
        assert safe or validate == "writes"
        if safe:
            np.testing.assert_array_equal(decoded(unsafe, toggles), wanted)
