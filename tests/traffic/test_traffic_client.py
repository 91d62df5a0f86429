"""The client process against a server with known delays: order and counts, never tight times."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from tests.traffic import fake_server as fake
from tests.traffic.fake_server import Delays, serving
from workbench.common.errors import WorkbenchError
from workbench.traffic import records as rec
from workbench.traffic import targets
from workbench.traffic.http1 import HttpAnswer
from workbench.traffic.load import CLOSED, POISSON, Arrivals, Load, draw, lengths
from workbench.traffic.targets import Asking, model_of, over_http

ALL_AT_ONCE = Arrivals(POISSON, float("inf"))


def loaded(arriving, n, n_prompt="uniform:2-9", n_wanted="3", ids=range(100, 800)) -> Load:
    return draw(arriving, n, lengths("-p", n_prompt), lengths("-n", n_wanted), np.array(ids))


def offered(server, load, asking=None, most_s=float("inf"), **more):
    """The records of a load in the order of their numbers, and the target."""
    target = over_http(server.url, "fake", **more)
    found = [r for part in target.offer(load, asking or Asking(), most_s) for r in part]
    return sorted(found, key=lambda r: r.request), target


def test_times_are_in_order_and_tokens_are_counted():
    load = loaded(Arrivals(CLOSED, 2), 6, n_wanted="uniform:2-6")
    with serving(Delays(0.02, 0.01)) as server:
        records, target = offered(server, load)
    assert [r.request for r in records] == list(range(6)) and {r.status for r in records} == {"ok"}
    assert [r.n_prompt for r in records] == load.n_prompt.tolist()
    for r in records:
        assert r.n_made == r.n_wanted == len(r.times_ns) and r.finish == "length"
        assert 0 <= r.due_ns <= r.sent_ns < r.times_ns[0] and r.times_ns[-1] <= r.end_ns
        assert (np.diff(r.times_ns) >= 5e6).sum() >= len(r.times_ns) // 2
        assert r.times_ns[0] - r.sent_ns >= 19e6
    (spent,) = target.spent
    assert spent.n_chunks == sum(r.n_made for r in records) and 0 < spent.cpu_s < 5
    assert server.most == 2 and 2 <= server.n_connections <= 4
    for i, body in enumerate(sorted(server.seen, key=lambda b: b["seed"])):
        assert body["prompt"] == load.prompt(i).tolist() and body["seed"] == 3000 * i + 2
        assert body["ignore_eos"] is True and body["model"] == "fake" and body["stream"] is True
        assert body["max_tokens"] == load.n_wanted[i] and body["temperature"] == 0
    ends = np.sort([r.end_ns for r in records])
    later = sorted(records, key=lambda r: r.due_ns)[2:]
    assert np.array_equal([r.due_ns for r in later], ends[:4]), "each is due as another ends"


@pytest.mark.parametrize("streamed", [True, False])
def test_a_server_that_closes_its_connections_loses_none(streamed):
    load = loaded(Arrivals(CLOSED, 4), 40, n_wanted="2")
    with serving(Delays(closes=True)) as server:
        records, _ = offered(server, load, Asking(streamed=streamed))
    assert {(r.status, r.why) for r in records} == {(rec.OK, "")} and len(records) == 40
    assert server.n_connections == len(server.seen) == 40, "each was heard once"
    assert all(r.n_made == 2 and (streamed or [*r.times_ns] == [r.end_ns]) for r in records)
    assert streamed == any("stream_options" in body for body in server.seen)


def test_open_arrivals_come_when_they_are_due():
    """However slow the server, and however few it serves at once."""
    load = loaded(Arrivals(POISSON, 100.0), 5, n_wanted="1")
    with serving(Delays(0.1, n_slots=2)) as server:
        records, _ = offered(server, load)
    assert [r.due_ns for r in records] == load.due_ns().tolist()
    assert all(r.sent_ns >= r.due_ns for r in records) and server.most == 2
    assert max(r.times_ns[0] for r in records) >= 2 * 100e6


@pytest.mark.long
def test_several_processes_share_a_load():
    """Tokens may share an event; the server counts them."""
    with serving(Delays(0.005, per_event=4)) as server:
        records, target = offered(server, loaded(Arrivals(CLOSED, 3), 11, "5", "10"), processes=2)
        assert [r.request for r in records] == list(range(11)) and len(target.spent) == 2
        assert server.most <= 3
        assert all(len(r.times_ns) == 3 and r.n_made == 10 for r in records)
        records, target = offered(server, loaded(Arrivals(CLOSED, 1), 3), processes=4)
        assert len(target.spent) == 1 and len(records) == 3


FAULTS = {  # the first id of a prompt -> status, and what is kept of the server's words
    fake.REFUSE: (rec.REFUSED, "all slots are taken"),
    fake.BAD_REQUEST: ("http 400", "the prompt is too long"),
    fake.CLOSE: (rec.DISCONNECTED, "the server closed the connection"),
    fake.HALF: (rec.DISCONNECTED, ""),  # it was heard, so it is not sent again
    fake.GARBAGE: (rec.MALFORMED, '{"choices": [{"tex'),
    fake.NOT_HTTP: (rec.MALFORMED, ""),
    fake.BAD_CHUNK: (rec.MALFORMED, ""),
    fake.NO_TOKEN: (rec.NO_TOKEN, ""),
    fake.ERROR_EVENT: (rec.FAILED, "the engine process has died"),
    fake.HANG: (rec.TIMEOUT, "no end within 0.4 s"),
    fake.SHORT: (rec.OK, ""),
    100: (rec.OK, ""),
}


def test_every_failure_is_counted_by_its_kind():
    load = loaded(Arrivals(CLOSED, 8), 60, "2", "4", [*FAULTS, *[100] * 4])
    with serving() as server:
        records, _ = offered(server, load, Asking(timeout_s=0.4))
    first = [int(load.prompt(i)[0]) for i in range(load.n)]
    assert set(first) == set(FAULTS) and [r.request for r in records] == list(range(60))
    heard = [body["prompt"][0] for body in server.seen]  # each once, or twice where nobody answered
    assert all(heard.count(i) == first.count(i) for i in FAULTS if i != fake.CLOSE)
    assert first.count(fake.CLOSE) <= heard.count(fake.CLOSE) <= 2 * first.count(fake.CLOSE)
    for r, fault in zip(records, first, strict=True):
        status, why = FAULTS[fault]
        assert r.status == status and why in r.why, (r, fault)
        if status == rec.OK:
            assert r.n_made == len(r.times_ns) == (2 if fault == fake.SHORT else 4)


def test_what_was_answered_by_half_is_not_sent_again():
    """On a connection that had an answer before, so that a request unheard would be."""
    load = loaded(Arrivals(CLOSED, 1), 12, "2", "4", [100, fake.HALF])
    with serving() as server:
        records, _ = offered(server, load, Asking(timeout_s=5))
    first = [int(load.prompt(i)[0]) for i in range(load.n)]
    assert (100, fake.HALF) in pairwise(first) and len(server.seen) == load.n
    assert [r.status for r in records] == [FAULTS[i][0] for i in first]


@pytest.mark.long
def test_who_is_not_there_or_wants_a_key_is_said():
    one = loaded(ALL_AT_ONCE, 1)
    with serving(key="sesame") as server:
        assert model_of(server.url, "sesame") == ("fake", 800)
        with pytest.raises(WorkbenchError, match="HTTP Error 401"):
            model_of(server.url)
        assert offered(server, one, key="sesame")[0][0].status == rec.OK
        (refused,) = offered(server, one)[0]
        assert (refused.status, refused.why) == ("http 401", "no such key")
    assert offered(server, one)[0][0].status == rec.NO_CONNECTION
    with pytest.raises(WorkbenchError, match=r"names no models: .*refused"):
        model_of(server.url)


@pytest.mark.parametrize("dies", [False, True])
def test_who_stops_iterating_leaves_no_process(monkeypatch, dies):
    """And a client process that dies is said."""
    children, start = [], targets.start_client
    monkeypatch.setattr(targets, "start_client", lambda: children.append(start()) or children[-1])
    with serving(Delays(0.01)) as server:
        offer = over_http(server.url, "fake").offer(loaded(Arrivals(CLOSED, 1), 500), Asking())
        assert next(offer)
        if dies:
            children[0][1].kill()
            with pytest.raises(WorkbenchError, match="a client process ended before its requests"):
                list(offer)
        offer.close()
    assert [child.returncode for _, child in children] == [-9 if dies else 0]


def test_the_end_of_the_time_ends_what_is_in_flight():
    with serving() as server:
        load = loaded(Arrivals(CLOSED, 2), 9, "2", "4", [fake.HANG])
        records, target = offered(server, load, most_s=0.2)
    assert [r.status for r in records] == [rec.UNFINISHED] * 2 and len(target.spent) == 1


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_a_stream_is_read_the_same_however_it_is_cut(newline):
    going, end = {"text": "a", "finish_reason": None}, {"text": "b", "finish_reason": "length"}
    chat = {"delta": {"content": "x"}}  # counts, too; its end does not
    events = [{"choices": [c]} for c in (going, going | {"text": "\u20ac"}, chat, end)]
    usage = {"choices": [{"delta": {}}], "usage": {"completion_tokens": 7}}
    stream = b": a comment\n\n".join(map(fake.event, [*events, usage])) + fake.DONE
    stream = stream.replace(b"\n", newline)
    for size in range(1, len(stream) + 1):
        ended = []
        answer = HttpAnswer(True, ended.append)
        answer.head(200)
        for i in range(0, len(stream), size):
            answer.body(stream[i : i + size], i)
        answer.complete(len(stream))
        assert ended == [answer] and answer.status == rec.OK, size
        assert (len(answer.times), answer.n_made, answer.finish) == (4, 7, "length")
        assert answer.times == sorted(answer.times)
    cut = HttpAnswer(True, ended.append)
    cut.head(200)
    cut.body(stream[: len(stream) // 2], 5)
    cut.lost(9, "gone")
    assert cut.status == rec.DISCONNECTED and {*cut.times} == {5}
