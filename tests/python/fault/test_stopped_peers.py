"""A SIGSTOPped rank: a timeout that names rank and phase; when it wakes it learns at once and joins the next sync."""

from __future__ import annotations

import re

import pytest
from scenario import RECEIVER_PHASES, SOURCE_PHASES, struck

from support.markers import each_transport, fault
from support.ranks import Pool, names_rank

pytestmark = fault

TIMEOUT_S = 0.8
CASES = [(0, phase) for phase in SOURCE_PHASES] + [
    (1, phase) for phase in RECEIVER_PHASES if phase != "after_stream_loop"
]
PHASE_WORDS = re.compile(r"hello|rendezvous|connect|join|begin|plan|bucket|transfer|commit", re.IGNORECASE)


@each_transport
@pytest.mark.parametrize(("victim", "phase"), CASES)
def test_stopped_rank_is_reported_at_the_deadline_and_joins_the_next_sync(
    pool: Pool, transport: str, victim: int, phase: str
) -> None:
    group = pool.group(3)
    running = group.start(struck, transport, victim, phase, "freeze", TIMEOUT_S)
    group.wait_mark(victim, "frozen")
    others = [rank for rank in range(3) if rank != victim]
    for rank in others:
        group.wait_mark(rank, "ended", TIMEOUT_S + 10)
    woken_at = group.cont(victim)
    outcomes = running.join(30)
    seen = {rank: outcomes[rank].result() for rank in range(3)}
    for rank in others:
        failure = seen[rank].expect("SyncTimeout", "PeerFailed")
        took = seen[rank].ended_at - seen[rank].began_at
        assert 0.7 * TIMEOUT_S <= took <= 2 * TIMEOUT_S + 0.7, f"rank {rank}'s wait took {took:.3f} s"
        assert PHASE_WORDS.search(failure.message), f"no phase in: {failure.message}"
    # The rank that waits for the victim itself must name it. A receiver waits for the source, so when another
    # receiver is stuck it may learn the name from the source or see only the source's silence.
    direct = [0] if victim != 0 else others
    for rank in direct:
        failure = seen[rank].expect("SyncTimeout")
        assert names_rank(failure.message, victim), failure.message
    assert seen[victim].failure is not None, "the stopped rank thinks that its sync succeeded"
    if phase not in ("first_call", "before_call"):
        assert seen[victim].ended_at - woken_at < 1.0, "the woken rank did not learn of the failure at once"


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_rank_that_is_stopped_for_less_than_the_deadline_only_delays(pool: Pool, transport: str) -> None:
    for victim, phase in ((0, "item_12"), (1, "load_12"), (2, "stream_12")):
        group = pool.group(3)
        running = group.start(struck, transport, victim, phase, "freeze", 20.0)
        group.wait_mark(victim, "frozen")
        group.cont(victim)
        for seen in running.results(30):
            assert seen.failure is None and seen.version == 2
