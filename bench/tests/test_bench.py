"""The benchmark is only worth what its checks are worth: these test the checks."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest

from bench import render, results
from bench.harness import BenchError, Case, PeerSpec, Sample
from bench.pattern import PIECE_BYTES, Pattern
from bench.workloads import load


def test_moe_has_the_names_of_the_model_and_the_bytes_asked_for() -> None:
    moe = load("moe")
    assert len(moe.specs) == len({s.name for s in moe.specs}) == 18_867
    assert moe.nbytes == pytest.approx(300e6, rel=0.01)


def test_dense_has_the_shapes_of_the_model() -> None:
    dense = load("dense")
    assert len(dense.specs) == 310
    assert dense.nbytes == 596_049_920 * 2  # the published number of parameters, without the tied head


def test_lora_tensors_are_8_to_64_kib() -> None:
    sizes = [s.nbytes for s in load("lora").specs]
    assert (len(sizes), min(sizes), max(sizes)) == (4000, 8 << 10, 64 << 10)


def test_scaling_keeps_every_name() -> None:
    assert [s.name for s in load("dense", 0.1).specs] == [s.name for s in load("dense").specs]


def test_every_byte_changes_every_round() -> None:
    pattern, view = Pattern(), np.zeros(3 * PIECE_BYTES + 5, dtype=np.uint8)
    pattern.fill(7, view, 1)
    before = view.copy()
    pattern.fill(7, view, 2)
    assert not np.any(before == view)


@pytest.mark.parametrize("position", [0, PIECE_BYTES - 1, PIECE_BYTES, 3 * PIECE_BYTES + 4])
def test_one_wrong_byte_is_found(position: int) -> None:
    pattern, view = Pattern(), np.zeros(3 * PIECE_BYTES + 5, dtype=np.uint8)
    pattern.fill(7, view, 3)
    assert pattern.wrong_bytes(7, view, 3) == 0
    view[position] ^= 1
    assert pattern.wrong_bytes(7, view, 3) == 1


def test_last_rounds_bytes_and_another_tensors_bytes_are_found() -> None:
    pattern, view = Pattern(), np.zeros(1000, dtype=np.uint8)
    pattern.fill(7, view, 3)
    assert pattern.wrong_bytes(7, view, 4) == 1000
    assert pattern.wrong_bytes(8, view, 3) > 900


def test_pieces_that_changed_places_are_found() -> None:
    pattern, view = Pattern(), np.zeros(2 * PIECE_BYTES, dtype=np.uint8)
    pattern.fill(7, view, 3)
    swapped = np.concatenate([view[PIECE_BYTES:], view[:PIECE_BYTES]])
    assert pattern.wrong_bytes(7, swapped, 3) > PIECE_BYTES


def _row(peer: str, seconds: float, **options: object) -> results.Row:
    sample = Sample(seconds, seconds, seconds, 0, 0.0, [0, 0], [{}, {}])
    return results.make_row(load("dense", 0.01), 1, PeerSpec(peer, "fastsync", dict(options)), sample, [sample] * 5)


def test_a_missed_figure_is_called_missed_and_an_absent_one_not_measured() -> None:
    table = results.Table([_row(results.SHM, 0.10), _row(results.BUCKETED, 0.39), _row(results.MIRROR, 0.17)])
    found = {v.what: v.met for v in results.verdicts(table)}
    assert found["shm, dense, 1 receiver: against bucketed Gloo"] is False
    assert found["shm, dense, 1 receiver: against the mirror"] is True
    assert found["shm, dense, 2 receivers: against bucketed Gloo"] is None


def test_rows_are_json() -> None:
    table = results.Table([_row(results.SHM, 0.1), _row(results.MIRROR, 0.2)])
    table.add_ratios()
    assert json.loads(json.dumps(table.rows[0].to_dict()))["ratios"] == {"vs mirror": pytest.approx(2.0)}
    assert "| mirror |" in render.markdown(table, results.verdicts(table))


@pytest.fixture(scope="module", params=[1, 2], ids=["1-receiver", "2-receivers"])
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    with Case("dense", 0.01, request.param, timeout_s=60.0) as made:
        yield made


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("gloo_per_tensor", {"window": 1}),
        ("gloo_per_tensor", {"window": 4}),
        ("gloo_bucketed", {"bucket_bytes": 1 << 20}),
        ("gloo_bucketed", {"bucket_bytes": 30_000}),  # nearly every tensor spans buckets
        ("gloo_raw", {"bucket_bytes": 1 << 20, "buffers": 2}),
        ("gloo_raw", {"bucket_bytes": 64 << 20, "buffers": 2}),
        ("mirror", {"loop": "copy"}),
        ("mirror", {"loop": "foreach"}),
        ("copy", {"mode": "torch"}),
    ],
)
def test_peer_moves_every_byte(case: Case, kind: str, options: dict[str, object]) -> None:
    case.make(PeerSpec("peer", kind, dict(options)))
    assert case.sync("peer", first=True).seconds > 0
    assert case.sync("peer").seconds > 0
    case.drop("peer")


def test_a_rank_that_dies_is_an_error_at_once() -> None:
    with Case("dense", 0.01, 1, timeout_s=60.0) as case:
        case.make(PeerSpec("peer", "gloo_per_tensor"))
        case._processes[1].kill()
        with pytest.raises(BenchError, match=r"rank 1|gone"):
            case.sync("peer", first=True)
