"""`hpc smoke`: measures nodes of the cluster before the first run, and says what is slow. Runs on the login node."""

import io
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import tyro
from rich.console import Console

from hpc import cli
from hpc.core.errors import TorchrelayError, UserError
from hpc.core.files import write_atomic
from hpc.core.node_info import node_speed
from hpc.doctor.node_check import NodeJob, plan, read_documents, run_on_nodes
from hpc.slurm import client as slurm
from hpc.smoke.judgement import Change, Slowness, changes, judge
from hpc.smoke.measurements import SmokeResult, document_of, keep, newest, result_of
from hpc.smoke.tables import show
from hpc.spec import Network, Resources
from hpc.submit.checks import check_runs_dir
from hpc.submit.options import reading_of

_WIDTH = 140
# What every node stages: files of a megabyte, as many as nodes have memory for.
_FILES, _FILE_BYTES = 64, 2**20
_DATA = "data"


@dataclass(frozen=True, kw_only=True)
class SmokeOptions(cli.RunsOptions):
    """Measure nodes of the cluster in a short job: devices, disks, staging, clocks, and the network of each pair.

    hpc smoke lists what is slow compared with the median. It saves the result next to the runs, as JSON and as text for
    the administrators, and compares it with the previous result. Exit codes: 0 nothing is slow, 1 something is slow or
    the measurement failed.
    """

    node: tuple[str, ...] | None = None
    """Nodes to measure. Default: any nodes (--nodes of them)."""
    stage_dir: Path = Path("/tmp")  # noqa: S108 - submit's default
    """Directory on each node's own disk."""
    resources: tyro.conf.OmitArgPrefixes[Resources] = field(default_factory=Resources)
    network: tyro.conf.OmitArgPrefixes[Network] = field(default_factory=Network)


def smoke(options: SmokeOptions) -> int:
    """Measure, judge, keep and print. Returns 1 if something is slow."""
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
    """Run the job, and read what its nodes have printed.

    Raises:
        UserError: there is no Slurm, no such partition, or a flag does not suit.
        TorchrelayError: no node has answered.
    """
    if (reason := slurm.why_unavailable()) is not None:
        raise UserError(f"hpc smoke measures nodes of a cluster, but there is no Slurm here ({reason})")
    names = options.node or ()
    check_runs_dir(options.runs_dir, on_cluster=True)
    resources = plan(options.resources, slurm.query_cluster(options.resources.partition), names)
    job = NodeJob(
        module="jobs.smoke_node", resources=resources, network=options.network, names=names,
        stage_dir=options.stage_dir,
    )  # fmt: skip
    nodes = read_documents(run_on_nodes(job, options.runs_dir, write_data), node_speed)
    if not nodes:
        raise TorchrelayError(
            "the job ended before a node answered (see the messages of srun): nothing was saved; type hpc smoke again"
        )
    return result_of(nodes, resources.partition or "", resources.max_nodes)


def write_data(directory: Path) -> None:
    """Write what the nodes stage. Random, because storage that compresses must not look faster."""
    data = directory / _DATA
    data.mkdir()
    for number in range(_FILES):
        (data / f"{number:03d}.bin").write_bytes(os.urandom(_FILE_BYTES))


def _print(
    result: SmokeResult, slow: Sequence[Slowness], changed: Sequence[Change], *, has_before: bool, files: Sequence[Path]
) -> None:
    console = Console()
    console.width = console.width if console.is_terminal else max(console.width, _WIDTH)
    show(console, result, slow, changed)
    if not slow:
        print("nothing is slow compared with the median of these nodes")
    if has_before and not changed:
        print("nothing has changed since the last hpc smoke")
    print("kept:", *files, sep="\n  ")


main = partial(cli.run, smoke, SmokeOptions, "smoke", reading=reading_of(SmokeOptions, all_flags=True))

if __name__ == "__main__":
    sys.exit(main())
