"""Listing a source."""

import random
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from jobs.staging.source import SourceWalk


def test_listing_many_files_sorts_one_directory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # One sort of all names would hold the GIL for so long that the node counts as lost.
    lengths = list[int]()

    def recorded(values: Collection[Any]) -> list[Any]:
        lengths.append(len(values))
        return sorted(values)

    monkeypatch.setattr("jobs.staging.source.sorted", recorded, raising=False)
    for directory in range(30):
        (tmp_path / f"class-{directory}").mkdir()
        for number in random.Random(directory).sample(range(40), k=40):
            (tmp_path / f"class-{directory}/{number}.jpg").touch()
    listing = SourceWalk(tmp_path).run()
    assert len(listing.files) == 30 * 40
    assert sum(lengths) >= len(listing.files), "names were sorted by something that this test does not see"
    assert max(lengths) == 40


def test_listing_has_every_directory_and_file_in_a_fixed_order(tmp_path: Path) -> None:
    for name in ("b/2", "b/1", "b-c/3", "a", "b/c/4"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "empty").mkdir()
    listing = SourceWalk(tmp_path).run()
    assert [file.name for file in listing.files] == ["a", "b/1", "b/2", "b-c/3", "b/c/4"]
    assert listing.directories == ("b", "b-c", "b/c", "empty")
    assert SourceWalk(tmp_path).run().version == listing.version
