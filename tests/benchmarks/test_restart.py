"""What `benchmarks/restart` concludes; and one restart, of one rank."""

import pytest
from support.real_images import needs_fashion_mnist

from benchmarks.restart import __main__ as restart
from benchmarks.restart.marks import Mark

CASE = restart.Case(kind="forked", model="small-cnn", ranks=1)


def test_a_part_of_a_restart_ends_where_the_last_process_has_passed_it() -> None:
    """But the notice, where the first torchrun has passed it: that of the killed rank."""
    found = [
        Mark(who=who, pid=1, name=name, at=at)
        for who, name, at in [
            ("torchrun-0", "noticed", 101.0), ("torchrun-1", "noticed", 109.0),
            ("rank-0", "imported", 103.0), ("rank-1", "imported", 105.0),
            ("rank-0", "stepped", 107.0), ("rank-1", "stepped", 106.0),
        ]
    ]  # fmt: skip
    parts = restart.parts_of(found, killed_at=100.0, last=2)
    assert set(parts) == {*restart.PARTS, "total"}
    passed = {name: seconds for name, seconds in parts.items() if seconds}
    assert passed == {"notice": 1.0, "import": 4.0, "first step": 2.0, "total": 7.0}
    row = restart.row(CASE, [parts, {}])
    assert (row["total, s"], row["least, s"], row["restarts"], row["hung"]) == (7.0, 7.0, 1, 1)


@pytest.mark.slow
@needs_fashion_mnist
def test_parts_of_a_restart_add_up_to_its_total(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart, "_SECONDS_BETWEEN_KILLS", 0.0)
    parts = dict(*restart.restart(CASE, kills=1))
    total = parts.pop("total")
    assert sum(parts.values()) == pytest.approx(total)
    assert all(seconds > 0 for seconds in parts.values()), "every mark was passed"
