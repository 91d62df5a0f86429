"""How copies and waits are ordered on a device: what `auto` chooses, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.common.errors import DeviceError, UsageError
from workbench.config import CopyStream, HostSource, InputOrder, NCopies, StepWait, SyncMode
from workbench.engine.choose import choose_ordering
from workbench.program.capabilities import Capabilities
from workbench.program.sync_modes import Ordering, race_of

ASYNC = Capabilities(True, True, True, False, 2)
SYNCHRONOUS = Capabilities(False, False, True, False, 0)
UNORDERED = Capabilities(True, True, False, False, 2)


@pytest.mark.parametrize(
    ("capabilities", "copy_stream", "step_wait", "chosen"),
    [
        (ASYNC, "compute", "every", "implicit"),
        (ASYNC, "own", "every", "write_read_boundary"),
        (ASYNC, "own", "outputs", "packed"),
        (SYNCHRONOUS, "compute", "every", "blocking_copies"),
        (UNORDERED, "compute", "every", "write_read_boundary"),
        (UNORDERED, "compute", "outputs", "packed"),
    ],
)
def test_auto_chooses_the_safe_mode_with_fewest_waits(capabilities, copy_stream, step_wait, chosen):
    wanted = Ordering("auto", copy_stream, step_wait=step_wait)
    assert choose_ordering(wanted, capabilities, "dev") == wanted._replace(sync=chosen)


@pytest.mark.parametrize("sync", [mode for mode in SyncMode if mode != SyncMode.AUTO])
def test_copies_that_block_or_are_guarded_have_a_stream(sync):
    own = sync in (SyncMode.PER_COPY, SyncMode.BLOCKING_COPIES, SyncMode.EVENT_GUARDED)
    wanted, one = Ordering(sync, "auto"), replace(ASYNC, n_streams=1)
    assert choose_ordering(wanted, ASYNC, "dev").copy_stream == ("own" if own else "compute")
    if sync != SyncMode.EVENT_GUARDED:
        assert choose_ordering(wanted, one, "dev").copy_stream == "compute"


@pytest.mark.parametrize(
    ("toggles", "able", "says"),
    [
        ({"n_copies": "4"}, SYNCHRONOUS, "it has no events; use n_copies=1"),
        ({"host_source": "pinned_ring_4"}, SYNCHRONOUS, "it has no events; use host_source=pinned"),
        ({"host_source": "pinned_ring_2"}, UNORDERED,
         "its events do not wait for copies; use host_source=pinned"),
        ({"sync": "event_guarded"}, replace(ASYNC, n_streams=1),
         "it has one stream, and the event orders two"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_toggle_that_it_is_of(toggles, able, says):
    of = next(f"{name}={value}" for name, value in toggles.items())
    for sync in ("per_copy", "auto"):
        wanted = Ordering(**{"sync": sync, "copy_stream": "compute", **toggles})
        with pytest.raises(DeviceError, match=f"^the dev device cannot honour {of}: {says}"):
            choose_ordering(wanted, able, "dev")


@given(
    st.builds(Capabilities, *[st.booleans()] * 4, st.integers(0, 2)),
    st.builds(Ordering, st.just("auto"), *map(st.sampled_from, (
        CopyStream, HostSource, InputOrder, StepWait, NCopies))),
)  # fmt: skip
def test_auto_finds_a_mode_wherever_there_is_one(able, wanted):
    """That mode can be asked for by name, then, and what is refused is refused by name, too."""
    try:
        chosen = choose_ordering(wanted, able, "dev")
    except DeviceError as refused:
        with pytest.raises(DeviceError, match=re.escape(str(refused))):
            choose_ordering(wanted._replace(sync="per_copy"), able, "dev")
    else:
        assert choose_ordering(chosen, able, "dev") == chosen and not race_of(chosen, able)


@pytest.mark.parametrize(
    ("ordering", "says"),
    [
        (Ordering("implicit", "own"), "nothing orders a copy before the graph that reads"),
        (Ordering("implicit", "compute", step_wait="outputs"), "inputs are written where copies"),
        (Ordering("event_guarded", "own", step_wait="outputs"), "inputs are written where copies"),
        (Ordering("write_read_boundary", "own", step_wait="outputs"), "the graph of the step bef"),
    ],
)
def test_toggles_that_race_are_refused_unless_wanted(ordering, says):
    with pytest.raises(UsageError, match=r"race on the dev device: .*; use sync=auto") as refused:
        choose_ordering(ordering, ASYNC, "dev")
    assert says in str(refused.value) and "\n" not in str(refused.value)
    assert choose_ordering(ordering, ASYNC, "dev", unsafe=True) is ordering
    assert not race_of(ordering, SYNCHRONOUS)
