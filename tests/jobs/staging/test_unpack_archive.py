"""Unpacking: archives of data sets, damaged archives, hostile archives."""

import gzip
import io
import os
import stat
import subprocess
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.staging_nodes import contents, stage

from hpc.base.errors import TorchrelayError
from hpc.sources.archive import check
from hpc.sources.zstd import ZstdFile
from jobs.staging.copy_progress import CopyProgress
from jobs.staging.stager import Stager
from jobs.staging.store import open_store
from jobs.staging.unpack_archive import unpack

MB = 2**20


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    path = tmp_path / "photos"
    (path / "train" / "ä b").mkdir(parents=True)
    (path / "train" / "ä b" / "1.jpg").write_bytes(os.urandom(1000))
    (path / "train" / "empty").write_bytes(b"")
    (path / "large").write_bytes(os.urandom(17 * MB))
    (path / "run.sh").write_bytes(b"#!")
    (path / "run.sh").chmod(0o755)
    (path / "nothing in it").mkdir()
    return path


def make(archive: Path, tree: Path) -> Path:
    """As people make them."""
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
            for path in sorted(tree.rglob("*")):
                file.write(path, path.relative_to(tree))
    elif archive.suffix == ".zst":
        plain = archive.with_suffix("")
        subprocess.run(["tar", "cf", plain, "-C", tree, "."], check=True)
        with ZstdFile(archive, "wb") as compressed:
            compressed.write(plain.read_bytes())
    else:
        flags = {".gz": "czf", ".tgz": "czf", ".xz": "cJf"}.get(archive.suffix, "cf")
        subprocess.run(["tar", flags, archive, "-C", tree, "."], check=True, env={**os.environ, "XZ_OPT": "-0"})
    return archive


@pytest.mark.parametrize("suffix", ["tar", "tar.gz", "tgz", "tar.xz", "tar.zst", "zip"])
def test_what_is_unpacked_equals_what_was_packed(tree: Path, tmp_path: Path, local: Path, suffix: str) -> None:
    archive = make(tmp_path / f"photos.{suffix}", tree)
    check(archive)
    staged = stage(archive, local)
    assert contents(staged.path) == contents(tree)
    assert (staged.path / "nothing in it").is_dir()
    assert (staged.path / "run.sh").stat().st_mode & stat.S_IXUSR
    assert not (staged.path / "large").stat().st_mode & 0o077
    assert stage(archive, local).reused
    # What was unpacked is known file by file.
    [entry] = open_store(local).entries()
    manifest = entry.manifest()
    assert manifest is not None
    before_a_power_cut = replace(manifest, boot="an earlier one")
    assert entry.find_damaged(before_a_power_cut, lambda: False) == []
    (staged.path / "large").write_bytes(bytes(17 * MB))
    assert entry.find_damaged(before_a_power_cut, lambda: False) == ["large"]
    (staged.path / "run.sh").unlink()
    assert entry.find_damaged(before_a_power_cut, lambda: False) == ["large", "run.sh"]
    assert not stage(archive, local).reused


def test_symlinks_inside_are_kept_and_hard_links_become_files(tree: Path, tmp_path: Path) -> None:
    (tree / "link").symlink_to("train/ä b")
    os.link(tree / "run.sh", tree / "zz-again")
    target = tmp_path / "target"
    target.mkdir()
    unpack(make(tmp_path / "a.tar", tree), target, 2**40, lambda _: False)
    assert contents(target) == contents(tree)
    assert (target / "link").is_symlink()
    assert (target / "zz-again").stat().st_nlink == 1
    assert (target / "zz-again").stat().st_mode == (target / "run.sh").stat().st_mode


@pytest.mark.parametrize("mtime", ["inf", "nan", "-1", str(2**70)])
def test_times_that_no_file_system_stores_are_ignored(tmp_path: Path, mtime: str) -> None:
    target = tmp_path / "target"
    target.mkdir()
    unpack(tar_of(member("a", pax_headers={"mtime": mtime}))(tmp_path), target, 2**20, lambda _: False)
    assert (target / "a").read_bytes() == b"x"


def member(name: str, content: bytes = b"x", **fields: object) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for key, value in fields.items():
        setattr(info, key, value)
    return info, content


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, b"", type=kind, linkname=target)


def tar_of(*members: tuple[tarfile.TarInfo, bytes]) -> Callable[[Path], Path]:
    def build(directory: Path) -> Path:
        path = directory / "hostile.tar"
        with tarfile.open(path, "w") as file:
            for info, content in members:
                file.addfile(info, io.BytesIO(content))
        return path

    return build


def zip_of(*members: tuple[str | zipfile.ZipInfo, bytes]) -> Callable[[Path], Path]:
    def build(directory: Path) -> Path:
        path = directory / "hostile.zip"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
            for name, content in members:
                file.writestr(name, content)
        return path

    return build


def zip_link(name: str, target: str) -> tuple[zipfile.ZipInfo, bytes]:
    info = zipfile.ZipInfo(name)
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    return info, target.encode()


def zip_that_lies(directory: Path) -> Path:
    """Says that its file has 10 bytes, and unpacks to 10 MB."""
    path = zip_of(("bomb", bytes(10 * MB)))(directory)
    content = path.read_bytes()
    lie = content.replace((10 * MB).to_bytes(4, "little"), (10).to_bytes(4, "little"))
    assert lie != content
    path.write_bytes(lie)
    return path


def negative_size(directory: Path) -> Path:
    path = tar_of(member("a"))(directory)
    header = bytearray(path.read_bytes())
    header[124:136] = (-512).to_bytes(12, "big", signed=True)
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header[:512])
    path.write_bytes(header)
    return path


def many_headers(directory: Path) -> Path:
    """Names of names, 3000 deep."""
    info = tarfile.TarInfo("././@LongLink")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 2
    path = directory / "hostile.tar"
    path.write_bytes((info.tobuf(tarfile.GNU_FORMAT) + b"a".ljust(512, b"\0")) * 3000 + bytes(1024))
    return path


HOSTILE = {
    "absolute": (tar_of(member("/etc/evil")), "leads out of the archive"),
    "upwards": (tar_of(member("a/../../evil")), "leads out of the archive"),
    "device": (tar_of(member("null", b"", type=tarfile.CHRTYPE)), "is a device"),
    "link out": (tar_of(link("out", "/etc")), "is a link to '/etc', outside of the archive"),
    "link upwards": (tar_of(link("a/out", "../../..")), "outside of the archive"),
    "link by a link": (tar_of(link("d/e/a", "../.."), link("b", "d/e/a/..")), "outside of the archive"),
    "file through a link": (tar_of(link("d", "/tmp"), member("d/evil")), "is in it twice"),
    "hard link out": (tar_of(link("evil", "../../secret", tarfile.LNKTYPE)), "which is not a file in it"),
    "hard link over a link": (
        tar_of(member("good"), link("a", "../../secret"), link("a", "good", tarfile.LNKTYPE)),
        "is in it twice|outside of the archive",
    ),
    "many empty files": (
        tar_of(*(member(str(number), b"") for number in range(5000))),
        "larger than the available 20 MB; nothing of it was kept: use --stage-dir with a larger disk",
    ),
    "directories of directories": (
        tar_of(*(member(f"{number}/" + "d/" * 90, b"", type=tarfile.DIRTYPE) for number in range(60))),
        "larger than the available 20 MB",
    ),
    "deep": (tar_of(member("d/" * 1000 + "f")), "is more than 100 directories deep"),
    "long link zip": (zip_of(zip_link("out", "a" * 5000)), "cannot be unpacked .*File name too long"),
    "many headers": (many_headers, "cannot be unpacked"),
    "negative size": (negative_size, "cannot be unpacked|has -"),
    "twice": (tar_of(member("a"), member("a")), "is in it twice"),
    "file and directory": (tar_of(member("a"), member("a/b")), "is a file and a directory at once"),
    "bomb": (zip_of(("bomb", bytes(50 * MB))), "larger than the available 20 MB"),
    "bomb that lies": (zip_that_lies, "cannot be unpacked"),
    "sparse": (tar_of(member("sparse", b"", type=tarfile.GNUTYPE_SPARSE, size=0)), "sparse file|cannot be unpacked"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_archives_are_refused(tmp_path: Path, kind: str) -> None:
    build, why = HOSTILE[kind]
    target = tmp_path / "outer" / "target"
    target.mkdir(parents=True)
    (tmp_path / "secret").write_text("s")
    with pytest.raises(TorchrelayError, match=why):
        unpack(build(tmp_path), target, 20 * MB, lambda _: False)
    assert (tmp_path / "secret").read_text() == "s"
    assert sorted(path.name for path in tmp_path.iterdir() if "hostile" not in path.name) == ["outer", "secret"]
    assert list(target.parent.iterdir()) == [target]
    assert not Path("/etc/evil").exists()
    assert not Path("/tmp/evil").exists()


def test_nothing_of_a_refused_archive_is_kept(tmp_path: Path, local: Path) -> None:
    archive = tar_of(member("good"), member("../evil"))(tmp_path)
    with pytest.raises(TorchrelayError, match=r"hostile\.tar is refused: '\.\./evil' leads out"):
        stage(archive, local)
    assert open_store(local).entries() == []
    assert [path.name for path in (local / f"torchrelay-{os.getuid()}").iterdir()] == ["locks"]


@pytest.mark.parametrize("suffix", ["tar", "tar.gz", "tar.zst", "zip"])
def test_damaged_archive_is_reported(tree: Path, tmp_path: Path, local: Path, suffix: str) -> None:
    archive = make(tmp_path / f"photos.{suffix}", tree)
    os.truncate(archive, archive.stat().st_size // 2)
    with pytest.raises(TorchrelayError, match=rf"photos\.{suffix} cannot be unpacked|bytes, but the archive declares"):
        stage(archive, local)
    archive.write_bytes(b"no archive at all")
    with pytest.raises(TorchrelayError, match="cannot be unpacked"):
        check(archive)


BREAKS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "a damaged header": (lambda content: content[:2058] + b"!" + content[2059:], "bad checksum at byte 2048"),
    "an empty header": (
        lambda content: content[:2048] + bytes(512) + content[2560:], "it ends at byte 2048, but more data follow"
    ),
    "an end in a header": (lambda content: content[:2100], "truncated header at byte 2048"),
    "an end between two files": (lambda content: content[:2048], "empty header at byte 2048"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BREAKS)
@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gz"])
def test_archive_without_its_end_is_refused(tmp_path: Path, kind: str, pack: Callable[[bytes], bytes]) -> None:
    target = tmp_path / "target"
    target.mkdir()
    archive = tar_of(*(member(str(number)) for number in range(4)))(tmp_path)
    spoil, message = BREAKS[kind]
    archive.write_bytes(pack(spoil(archive.read_bytes())))
    with pytest.raises(TorchrelayError, match=message):
        unpack(archive, target, 20 * MB, lambda _: False)


def test_compressed_archive_with_another_checksum_is_refused(tree: Path, tmp_path: Path) -> None:
    archive = make(tmp_path / "photos.tar.gz", tree)
    archive.write_bytes(archive.read_bytes()[:-8] + bytes(8))
    target = tmp_path / "target"
    target.mkdir()
    with pytest.raises(TorchrelayError, match=r"cannot be unpacked \(CRC check failed"):
        unpack(archive, target, 2**30, lambda _: False)


def test_archive_that_cannot_be_read_is_retried_and_then_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpc.sources.source_files._RETRY_SECONDS", (0.1, 0.1))
    archive = tmp_path / "photos.tar"
    archive.symlink_to("/proc/self/mem")  # reading its first byte is an input/output error
    with pytest.raises(TorchrelayError, match=r"photos\.tar could not be read on .* \(Input/output error\), 3 times"):
        unpack(archive, tmp_path, 2**30, lambda _: False)


def test_archive_that_changes_while_it_is_unpacked_is_refused(tmp_path: Path, local: Path) -> None:
    archive = tar_of(member("large", bytes(64 * MB)))(tmp_path)

    def change(progress: CopyProgress | None) -> bool:
        if progress is not None and progress.activity == "unpacking":
            os.utime(archive, (1, 1))
        return False

    with pytest.raises(TorchrelayError, match=r"hostile\.tar was changed"), Stager(local, watch=change) as stager:
        stager.stage(archive)
    assert open_store(local).entries() == []
