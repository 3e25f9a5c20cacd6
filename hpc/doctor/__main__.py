"""`hpc doctor`: what in this cluster's configuration will hurt, what it costs, and what to change. On the login node.

What is true of compute nodes is said only with `--node`, of nodes that were looked at (`hpc.doctor.node_check`).
"""

import resource
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hpc import cli
from hpc.core import ledger, node_info
from hpc.core.errors import TorchrelayError, UserError
from hpc.core.kernel import file_system_type
from hpc.core.node_info import NodeInfo
from hpc.core.rundir import RunDir
from hpc.doctor.findings import Finding, Severity, costs, judge, merge, note
from hpc.doctor.node_check import NodeCheckRequest, look_at_nodes, plan
from hpc.doctor.node_findings import OF_LOGIN, OF_MACHINE, OF_NODE, OF_RUN, LoginNode, RunMeasurements, is_handed_on
from hpc.doctor.slurm_findings import OF_SLURM, ClusterFacts
from hpc.slurm import client as slurm
from hpc.slurm import cluster
from hpc.slurm.cluster import ClusterConfig
from hpc.spec import Resources, RunSpec
from hpc.status.warnings import save_seconds

_STYLES = {Severity.COST: "red", Severity.NOTE: "yellow", Severity.UNKNOWN: "dim"}
_PIPE_WIDTH, _WHERE_WIDTH = 120, 24
_STAGE_DIR = Path("/tmp")  # noqa: S108 - submit's default


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(cli.Common):
    """Say what in this cluster's configuration will hurt, what it costs, and the line to ask the administrators for."""

    run: tyro.conf.Positional[str | None] = None
    """Run whose saves have to fit into the time that there is; by default the newest that has saved."""
    runs_dir: Path = Path("runs")
    """Directory of the runs."""
    node: tuple[str, ...] | None = None
    """Look at compute nodes too, in a short job: at these, or without a name at any (--nodes says how many)."""
    resources: tyro.conf.OmitArgPrefixes[Resources] = field(default_factory=Resources)


def main(argv: Sequence[str] | None = None) -> int:
    """The verb."""
    return cli.run(doctor, DoctorOptions, argv, "doctor")


def doctor(options: DoctorOptions) -> int:
    """Gather, judge, tell. 1: something will cost runs something."""
    found = merge(examine(options, find_run(options)))
    if options.json:
        cli.print_json([asdict(finding) for finding in found])
    else:
        tell(found, debug=options.debug)
    return int(any(finding.severity is Severity.COST for finding in found))


def find_run(options: DoctorOptions) -> RunDir | None:
    """The run that was named, or the newest that has saved anything."""
    if options.run is not None:
        return cli.find_run(options.run, options.runs_dir)
    runs = reversed(cli.all_runs(options.runs_dir))
    return next((run for run in runs if save_seconds(ledger.read(run.events)) is not None), None)


def experience_of(run: RunDir) -> RunMeasurements:
    """What a run has met with, from its events."""
    events = ledger.read(run.events)
    attempt = max((event.get("attempt", 0) for event in events), default=0)
    last = [event for event in events if event.get("attempt") == attempt]
    staged = [event.get("in_place") for event in last if event["event"] == "staged"]
    without = [event.get("reason") for event in last if event["event"] == "snapshot_off"]
    return RunMeasurements(
        name=run.name,
        save_seconds=save_seconds(events),
        is_script=RunSpec.load(run).train is None,
        in_place=next(filter(None, staged), None),
        no_snapshots=next(filter(None, without), None),
    )


def examine(options: DoctorOptions, run: RunDir | None) -> list[Finding]:
    """All findings.

    Raises:
        UserError: no such partition, or `--node` without Slurm.
    """
    spec = RunSpec.load(run) if run else None
    stage_dir = Path(spec.stage_dir) if spec else _STAGE_DIR
    experience = experience_of(run) if run else None
    found = judge(OF_RUN, experience, f"run {experience.name}") if experience else []
    if not slurm.is_available():
        if options.node is not None:
            raise UserError("--node asks Slurm for nodes, and there is no Slurm here (no sbatch, or no slurm.conf)")
        here = node_info.inspect_node(stage_dir)
        return [_no_slurm(), *found, *judge(OF_MACHINE, here, here.name)]
    try:
        site = cluster.query_cluster(options.resources.partition or (spec.resources.partition if spec else None))
    except UserError:
        raise
    except TorchrelayError as error:
        return [_silent_slurm(error), *found, *judge(OF_LOGIN, look_at_login(options.runs_dir), "login")]
    ask = None if options.node is None else plan(options.resources, site, options.node)
    nodes = look_at_nodes(ask, options.runs_dir, stage_dir) if ask else []
    login = look_at_login(options.runs_dir, site, nodes)
    return [
        *judge(OF_SLURM, ClusterFacts(cluster=site, run=experience), "cluster"),
        *found,
        *judge(OF_LOGIN, login, "login"),
        *(finding for node in nodes for finding in judge(OF_NODE, node, node.name)),
        *([_silent_nodes(len(nodes), ask)] if ask and len(nodes) < ask.resources.max_nodes else []),
    ]


def _no_slurm() -> Finding:
    verdict = note(
        "there is no Slurm here (no sbatch, or no slurm.conf)",
        "runs use this machine alone (--cluster local), and nothing goes on elsewhere should it fail",
        "type it on a login node",
    )
    return Finding(check="slurm", where="login", **vars(verdict))


def _silent_slurm(error: TorchrelayError) -> Finding:
    verdict = costs(
        str(error),
        "nothing can be submitted; runs go on, but cannot be requeued before it answers again",
        "wait, or tell the administrators that slurmctld does not answer",
    )
    return Finding(check="slurm", where="cluster", **vars(verdict))


def _silent_nodes(answered: int, ask: NodeCheckRequest) -> Finding:
    verdict = costs(
        f"{answered} of {ask.resources.max_nodes} nodes answered",
        "runs on the others fail as well",
        f"see what srun has said, and whether the nodes have {sys.executable}: it has to be on shared storage",
    )
    return Finding(check="nodes", where=ask.resources.partition or "", **vars(verdict))


def look_at_login(runs_dir: Path, site: ClusterConfig | None = None, nodes: Sequence[NodeInfo] = ()) -> LoginNode:
    """What the login node is like."""
    handed_on = site is not None and is_handed_on(site.config)
    return LoginNode(
        runs_dir=str(runs_dir.expanduser().resolve()),
        runs_type=file_system_type(runs_dir),
        torch=node_info.torch_build(),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0] if handed_on else None,
        nodes_see_runs=bool(nodes) and all(node.job is not None and node.job.sees_runs for node in nodes),
    )


def tell(found: Sequence[Finding], *, debug: bool) -> None:
    """Print for people: what costs something, and how much more was looked at."""
    console = Console()
    console.width = console.width if console.is_terminal else max(console.width, _PIPE_WIDTH)
    shown = [finding for finding in found if finding.severity in {Severity.COST, Severity.NOTE}]
    unknown = [finding for finding in found if finding.severity is Severity.UNKNOWN]
    if shown:
        console.print(table([*shown, *(unknown if debug else [])]))
    well = len(found) - len(shown) - len(unknown)
    print(f"{well} of {len(found)} checks are well" + _names(unknown))


def _names(unknown: Sequence[Finding]) -> str:
    names = ", ".join(finding.check for finding in unknown)
    return f"; {len(unknown)} could not be judged ({names})" if unknown else ""


def table(findings: Sequence[Finding]) -> Table:
    """Findings for people, the costly ones first: each with what was seen, what it costs, and what to do."""
    drawn = Table(box=None, pad_edge=False, padding=(0, 1, 1, 0), show_header=False)
    drawn.add_column(no_wrap=True)
    drawn.add_column(max_width=_WHERE_WIDTH, overflow="fold")
    drawn.add_column(overflow="fold")
    order = list(Severity)
    for one in sorted(findings, key=lambda finding: order.index(finding.severity)):
        style = _STYLES[one.severity]
        seen = one.value if one.check in one.value else f"{one.check}: {one.value}"
        lines = (f"[bold]{escape(seen)}[/]", escape(one.cost), one.what_to_do and f"-> {escape(one.what_to_do)}")
        drawn.add_row(f"[{style}]{one.severity}[/]", escape(one.where), "\n".join(filter(None, lines)))
    return drawn


if __name__ == "__main__":
    sys.exit(main())
