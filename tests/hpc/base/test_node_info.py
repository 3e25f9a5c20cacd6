"""What a machine is like, from what its kernel, its Slurm and its torch say."""

import subprocess
from pathlib import Path

import pytest
from support.cluster import mounted_volume

from hpc.base.kernel import driver_version, file_system_type, mounted_type
from hpc.base.node_info import parse_torch_version


def test_file_system_is_the_innermost_and_last_mount() -> None:
    mounts = (
        "rootfs / rootfs rw 0 0", "/dev/sda1 / ext4 rw 0 0", "server:/home /home nfs4 rw 0 0",
        "tmpfs /home/a\\040b tmpfs rw 0 0",
    )  # fmt: skip
    paths = ("/home/me", "/home/a b/c", "/homes", "/")
    assert [mounted_type(mounts, Path(path)) for path in paths] == ["nfs4", "tmpfs", "ext4", "ext4"]
    assert mounted_type((), Path("/")) is None


def test_overlay_in_memory_is_memory(tmp_path: Path) -> None:
    """The root of a diskless node; but of one whose upper directory is hidden, as in a container, nothing is known."""
    (tmp_path / "lower").mkdir()
    with mounted_volume(tmp_path / "ram disk", "size=1m") as memory:
        for name in ("upper", "work", "root"):
            (memory / name).mkdir()
        options = f"lowerdir={tmp_path}/lower,upperdir={memory}/upper,workdir={memory}/work"
        subprocess.run(["mount", "-t", "overlay", "-o", options, "overlay", str(memory / "root")], check=True)
        try:
            assert file_system_type(memory / "root" / "tmp") == "tmpfs"
        finally:
            subprocess.run(["umount", str(memory / "root")], check=True)
    hidden = "overlay / overlay rw,lowerdir=/a,upperdir=/b/c,workdir=/b/w 0 0"
    assert mounted_type([hidden], Path("/tmp")) == "overlay"


@pytest.mark.parametrize(
    ("lines", "accelerator"),
    [
        ("__version__ = '2.15.0+cu132'\ncuda: Optional[str] = '13.2'\nhip: Optional[str] = None\n", "CUDA 13.2"),
        ("__version__ = '2.9.0+rocm6.4'\ncuda: Optional[str] = None\nhip: Optional[str] = '6.4'\n", "ROCm 6.4"),
        ("__version__ = '2.9.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n", None),
    ],
)
def test_accelerator_of_a_torch_build(lines: str, accelerator: str | None) -> None:
    build = parse_torch_version(lines)
    assert build.accelerator == accelerator
    assert build.version.startswith("2.")


def test_driver_version(tmp_path: Path) -> None:
    file = tmp_path / "version"
    assert driver_version(file) is None, "there is no such file without a driver"
    for text, version in (
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 2024\nGCC 12\n", "550.54.15"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.10  Release Build  (root@x)\n", "570.86.10"),
        ("", None),
    ):
        file.write_text(text)
        assert driver_version(file) == version
