import subprocess
import sys
from pathlib import Path

from support.cluster import need

_ASK = """
import sys
from pathlib import Path
from hpc.base.kernel import mounted_directory
print(*(mounted_directory(Path(path)) for path in sys.argv[1:]))
"""


def test_directory_behind_a_bind_mount(tmp_path: Path) -> None:
    """Such as the one that job_container/tmpfs mounts at /tmp for job 7."""
    need("unshare", "mount")
    private, point = tmp_path / "7" / ".7", tmp_path / "tmp"
    # In a file system of its own: the path there does not depend on where this machine keeps its temporary files.
    mounts = f"mount -t tmpfs tmpfs {tmp_path} && mkdir -p {private} {point} && mount --bind {private} {point}"
    command = ["unshare", "--mount", "sh", "-ec", f'{mounts}; exec "$@"', "sh", sys.executable, "-c", _ASK]
    done = subprocess.run([*command, str(point / "data"), str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["/7/.7", "/"]
