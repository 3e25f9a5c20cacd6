"""`hpc smoke`: measure nodes of the cluster before the first run, and list slow parts. Runs on the login node."""

import io
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from hpc.base.errors import TorchrelayError, UserError
from hpc.base.files import write_atomic
from hpc.cluster.doctor.node_job import NodeOptions, node_verb, plan, run_on_nodes
from hpc.cluster.smoke.judgement import Change, Slowness, changes, judge
from hpc.cluster.smoke.measurements import SmokeResult, document_of, keep, newest, result_of
from hpc.cluster.smoke.tables import show
from hpc.commands import cli
from hpc.slurm import client as slurm
from hpc.slurm import cluster_config
from hpc.status.printing import console_for
from hpc.submissions.checks import check_runs_dir

_WIDTH = 140
# Every node stages this many files of this size. They also fit into a /tmp in memory.
_FILES, _FILE_BYTES = 64, 2**20
_DATA = "data"


@dataclass(frozen=True, kw_only=True)
class SmokeOptions(NodeOptions):
    """Measure nodes of the cluster in a short job: devices, disks, staging, clocks, and the network of each pair.

    hpc smoke lists what is slow compared with the median. It saves the result next to the runs, as JSON and as text for
    the administrators, and compares it with the previous result. Exit codes: 0 nothing is slow, 1 something is slow or
    the measurement failed.
    """

    stage_dir: Path = Path("/tmp")  # noqa: S108 - submit's default
    """Directory on each node's own disk."""


def smoke(options: SmokeOptions) -> int:
    """Measure the nodes, and judge, save and print the result. Returns 1 if something is slow."""
    runs_dir = options.runs_dir.expanduser().resolve()
    before, result = newest(runs_dir), measure(options)
    slow, changed = judge(result), changes(before, result) if before else []
    path = keep(result, runs_dir)
    text = path.with_suffix(".txt")
    page = io.StringIO()
    show(Console(file=page, width=_WIDTH), result, slow, changed)
    write_atomic(text, page.getvalue())
    if options.json:
        found = {"slow": [asdict(one) for one in slow], "changes": [asdict(one) for one in changed]}
        cli.print_json({**document_of(result), **found, "files": [str(path), str(text)]})
    else:
        _print(result, slow, changed, has_before=before is not None, files=(path, text))
    return int(bool(slow))


def measure(options: SmokeOptions) -> SmokeResult:
    """Run the job, and read the output of its nodes.

    Raises:
        UserError: there is no Slurm, no such partition, or a flag is wrong.
        TorchrelayError: no node has answered.
    """
    if (reason := slurm.why_unavailable()) is not None:
        raise UserError(f"hpc smoke measures nodes of a cluster, but there is no Slurm here ({reason})")
    check_runs_dir(options.runs_dir, on_cluster=True)
    job = plan("smoke", options, cluster_config.query_cluster(options.resources.partition), options.stage_dir)
    nodes = run_on_nodes(job, options.runs_dir, write_data)
    if not nodes:
        raise TorchrelayError(
            "the job ended before a node answered (see the messages of srun): nothing was saved; type hpc smoke again"
        )
    return result_of(nodes, job.resources.partition or "", job.resources.nodes.most)


def write_data(directory: Path) -> None:
    """Write the data for the nodes to stage: random bytes, because storage that compresses must not look faster."""
    data = directory / _DATA
    data.mkdir()
    for number in range(_FILES):
        (data / f"{number:03d}.bin").write_bytes(os.urandom(_FILE_BYTES))


def _print(
    result: SmokeResult, slow: Sequence[Slowness], changed: Sequence[Change], *, has_before: bool, files: Sequence[Path]
) -> None:
    console = console_for(_WIDTH)
    show(console, result, slow, changed)
    if not slow:
        print("nothing is slow compared with the median of these nodes")
    if has_before and not changed:
        print("nothing has changed since the last hpc smoke")
    print("kept:", *files, sep="\n  ")


main = node_verb(smoke, SmokeOptions, "smoke")
