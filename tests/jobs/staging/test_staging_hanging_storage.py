"""Storage that answers nothing: who reads from it waits in the kernel, and cannot be ended."""

import tarfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.cluster import need
from support.staging_nodes import hanging

from hpc.base.errors import BadNodeError
from jobs.staging.coordination import StagingGroup
from jobs.staging.stager import Stager


@pytest.fixture
def mounted() -> Iterator[ExitStack]:
    """What a test mounts."""
    need("umount")
    with ExitStack() as stack:
        yield stack


@pytest.mark.timeout(60)
@pytest.mark.parametrize("moment", ["listing", "copying", "unpacking"])
def test_node_whose_mount_hangs_gives_up_and_names_it(
    tmp_path: Path, mounted: ExitStack, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("copy", "copy_progress"):  # the threads will not end
        monkeypatch.setattr(f"jobs.staging.{module}._JOIN_SECONDS", 0.1)
    source, local = tmp_path / "data", tmp_path / "local"
    source.mkdir()
    local.mkdir()
    (source / "image.jpg").write_bytes(b"i" * 1000)
    if moment == "unpacking":
        with tarfile.open(source / "data.tar", "w") as archive:
            archive.add(source / "image.jpg", "image.jpg")
    data = source / "data.tar" if moment == "unpacking" else source
    group = StagingGroup()
    if moment == "listing":
        mounted.enter_context(hanging(source))
    else:  # it hangs once the source is listed
        monkeypatch.setattr(group, "publish_listing", lambda *_: mounted.enter_context(hanging(source)))
    with (
        pytest.raises(BadNodeError, match=f"has got nothing of {data} for 1 s: that mount"),
        Stager(local, group=group, timeout_seconds=1) as stager,
    ):
        stager.stage(data)
    assert not list(local.glob("torchrelay-*/.*")), "no part of the copy is left"
