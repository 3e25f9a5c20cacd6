"""The fixture of the verbs that are tested without Slurm."""

from collections.abc import Iterator

import pytest
from support.cluster import Site, site_without_slurm


@pytest.fixture(scope="module")
def local_site() -> Iterator[Site]:
    """One directory for all tests of a module, with a small data set, for `--cluster local`."""
    with site_without_slurm() as site:
        yield site
