"""The bound that `benchmarks/scaling` compares with. The measurement itself needs a testbed and minutes."""

import pytest

from benchmarks.scaling import __main__ as scaling
from benchmarks.scaling.__main__ import Bound, Options, Variant


def test_a_ring_sends_its_share_of_the_gradients_at_the_rate_of_the_link() -> None:
    # 1 GB of payload takes 8 s on 1 Gbit/s, and a little more with the headers.
    assert scaling.wire_seconds(2, 10**9, 1e9) == pytest.approx(8 * 1514 / 1448)
    assert scaling.wire_seconds(4, 10**9, 1e9) == pytest.approx(1.5 * scaling.wire_seconds(2, 10**9, 1e9))
    assert scaling.wire_seconds(1, 10**9, 1e9) == scaling.wire_seconds(4, 10**9, None) == 0


def test_steps_are_compared_with_compute_and_wire() -> None:
    bound = Bound(nodes=2, compute=1.0, gradient_bytes=50_000_000, one_node=64.0)
    wire = scaling.wire_seconds(2, 50_000_000, 200e6)
    row = bound.row("200mbit", Variant(name="ours"), 128, [1.0 + wire, 9.0, 1.0 + wire])
    assert row.of_no_overlap == pytest.approx(1.0, abs=0.001)
    assert row.of_perfect_overlap == pytest.approx(wire / (1 + wire), abs=0.001)
    assert row.efficiency == pytest.approx(1 / (1 + wire), abs=0.001)


def test_compression_halves_the_wire_and_accumulation_multiplies_the_compute() -> None:
    bound = Bound(nodes=2, compute=1.0, gradient_bytes=50_000_000, one_node=64.0)
    plain, bf16, four = (
        bound.row("200mbit", variant, 128, [5.0])
        for variant in (Variant(name="a"), Variant(name="b", bf16=True), Variant(name="c", accumulate=4))
    )
    assert bf16.wire_seconds == pytest.approx(plain.wire_seconds / 2, abs=0.001)
    assert (four.compute_seconds, four.wire_seconds) == (4.0, plain.wire_seconds)


def test_one_node_compares_ours_with_the_loop_alone() -> None:
    assert [variant.ours for variant in scaling.variants(Options(), 1)] == [True, False]
    assert len(scaling.variants(Options(), 4)) == 5
