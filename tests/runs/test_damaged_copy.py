"""A run whose staged copy is damaged: the copy is blamed, and not its user's data."""

import os
import subprocess
import time
from collections.abc import Iterator

import pytest
from support.cluster import SHORT_LOCAL, Run, Site, site_without_slurm

from jobs.staging.store import open_store

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def site() -> Iterator[Site]:
    with site_without_slurm() as here:
        yield here


def train(site: Site, name: str) -> Run:
    run = site.submit(*SHORT_LOCAL, "--epochs=1", f"--name={name}", "--stage-dir=disk")
    run.wait_for_state("completed")
    return run


def test_copy_that_a_disk_has_damaged_is_replaced(site: Site) -> None:
    (site.path / "disk").mkdir()
    subprocess.run(["gzip", "-r", str(site.path / "data")], check=True)
    train(site, "first")
    [entry] = open_store(site.path / "disk").entries()
    [images] = entry.data.glob("train-images*")
    content = bytearray(images.read_bytes())
    content[-5] ^= 1  # in the checksum
    images.write_bytes(content)
    # As if the disk had changed the bytes itself: no time tells.
    os.utime(entry.path / "manifest", (time.time() + 3600,) * 2)

    run = train(site, "second")
    [event] = run.events("interruption")
    assert event["cause"] == "crashed"
    assert "the copy of the data on this node was damaged (1 files), and has been replaced" in event["detail"]
    assert not run.status()["steps_lost"]
