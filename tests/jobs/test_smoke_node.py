"""What a node says of itself in `hpc smoke`."""

import os
from pathlib import Path

import pytest

from jobs import smoke_node

MODULE = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\nGCC version: 12\n"
OPEN_MODULE = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.10  Release Build  (root@x)\n"
DRIVERS = {MODULE: "550.54.15", OPEN_MODULE: "570.86.10", "": None}


@pytest.mark.parametrize("text", DRIVERS)
def test_driver_version(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "version"
    monkeypatch.setattr(smoke_node, "_NVIDIA_VERSION", file)
    assert smoke_node.driver_version() is None, "there is no such file without a driver"
    file.write_text(text)
    assert smoke_node.driver_version() == DRIVERS[text]


def test_machine_and_its_disk(tmp_path: Path) -> None:
    machine = smoke_node.machine()
    assert machine["cpus"] == os.cpu_count()
    assert machine["memory_bytes"] == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    rate = smoke_node.write_rate(tmp_path)
    assert rate is not None
    assert rate > 0
    assert list(tmp_path.iterdir()) == []
