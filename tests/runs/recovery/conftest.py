"""Fixtures of the tests that interrupt one training in different ways, and compare the results."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cluster import TEN_EPOCHS, Site, shared_directory, tiny_data

from hpc.core.rundir import RunDir


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    path = shared_directory()
    path.chmod(0o755)
    tiny_data(path / "data")
    yield path
    shutil.rmtree(path)


@pytest.fixture
def site(testbed: dict[str, Any], place: Path) -> Iterator[Site]:
    here = Site(place, testbed["slurm_conf"])
    yield here
    here.end_all_jobs()


@pytest.fixture(scope="module")
def undisturbed(testbed: dict[str, Any], place: Path) -> RunDir:
    """The same training on two nodes with a rank each, without interruption."""
    run = Site(place, testbed["slurm_conf"]).submit("--data=data", "--name=undisturbed", "--nodes=2", *TEN_EPOCHS)
    run.wait_for_state("completed")
    return run.directory
