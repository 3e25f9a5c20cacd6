"""`hpc doctor`: settings of a cluster that cost runs work or time, and what to change. Runs on the login node."""

import os
import resource
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hpc import cli
from hpc.core import ledger, node_info
from hpc.core.errors import TorchrelayError, UserError
from hpc.core.kernel import automounted_at, file_system_type
from hpc.core.node_info import NodeInfo
from hpc.core.rundir import RunDir
from hpc.core.text import visible
from hpc.doctor.findings import (
    OF_LOGIN,
    OF_MACHINE,
    OF_NODE,
    OF_RUN,
    Finding,
    LoginNode,
    RunMeasurements,
    Severity,
    costs,
    inherits_open_files,
    judge,
    merge,
    note,
)
from hpc.doctor.node_check import inspect_nodes, plan
from hpc.doctor.slurm_findings import OF_SLURM, ClusterFacts
from hpc.slurm import client as slurm
from hpc.slurm.client import ClusterConfig
from hpc.spec import Network, Resources, RunSpec
from hpc.status.warnings import save_seconds
from hpc.submit.options import reading_of
from hpc.submit.runs_storage import Feature, has_been_seen_by_nodes, missing_features

_STYLES = {Severity.COST: "red", Severity.NOTE: "yellow", Severity.UNKNOWN: "dim"}
_PIPE_WIDTH, _WHERE_WIDTH = 120, 24


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(cli.RunsOptions):
    """Find settings of this cluster that cost runs work or time, and print how to change them."""

    run: tyro.conf.Positional[str | None] = None
    """Run whose measured save times are used. Default: the newest run that has saved a checkpoint."""
    node: tuple[str, ...] | None = None
    """Also inspect compute nodes in a short job: the named nodes, or without names any nodes (--nodes of them)."""
    resources: tyro.conf.OmitArgPrefixes[Resources] = field(default_factory=Resources)
    network: tyro.conf.OmitArgPrefixes[Network] = field(default_factory=Network)


def doctor(options: DoctorOptions) -> int:
    """Gather facts, judge them, print the findings. Returns 1 if there is a `cost`."""
    found = merge(examine(options, find_run(options)))
    if options.json:
        cli.print_json([asdict(finding) for finding in found])
    else:
        print_findings(found, debug=options.debug)
    return int(any(finding.severity is Severity.COST for finding in found))


def find_run(options: DoctorOptions) -> RunDir | None:
    """The named run, or the newest that has saved."""
    if options.run is not None:
        return cli.find_run(options.run, options.runs_dir)
    runs = reversed(cli.all_runs(options.runs_dir))
    return next((run for run in runs if save_seconds(ledger.read(run.events)) is not None), None)


def measurements_of(run: RunDir) -> RunMeasurements:
    """What a run has measured, from its events."""
    events = ledger.read(run.events)
    attempt = max((event.get("attempt", 0) for event in events), default=0)
    last = [event for event in events if event.get("attempt") == attempt]
    staged = [event.get("in_place") for event in last if event["event"] == "staged"]
    without = [event.get("reason") for event in last if event["event"] == "snapshot_off"]
    unforked = [event.get("detail") for event in last if event["event"] == "not_forked"]
    return RunMeasurements(
        name=run.name,
        save_seconds=save_seconds(events),
        is_script=RunSpec.load(run).train is None,
        in_place=next(filter(None, staged), None),
        no_snapshots=next(filter(None, without), None),
        not_forked=next(filter(None, unforked), None),
    )


def examine(options: DoctorOptions, run: RunDir | None) -> list[Finding]:
    """All findings; a UserError if there is no such partition, or for `--node` without Slurm."""
    spec = RunSpec.load(run) if run else None
    stage_dir = Path(spec.stage_dir if spec else "/tmp")  # noqa: S108 - submit's default
    measured = measurements_of(run) if run else None
    found = judge(OF_RUN, measured, f"run {measured.name}") if measured else []
    if not slurm.is_available():
        if options.node is not None:
            raise UserError(
                "--node needs Slurm, but there is no Slurm here (no sbatch, or no slurm.conf): leave it out"
            )
        verdict = note(
            "there is no Slurm here (no sbatch, or no slurm.conf)",
            "runs use this machine only (--cluster local), and end when it fails",
            "run hpc doctor on a login node",
        )
        here = node_info.inspect_node(Path(os.path.expandvars(stage_dir)))
        return [verdict.at("slurm", "login"), *found, *judge(OF_MACHINE, here, here.name)]
    try:
        site = slurm.query_cluster(options.resources.partition or (spec.resources.partition if spec else None))
    except UserError:
        raise
    except TorchrelayError as error:
        verdict = costs(
            str(error),
            "runs can be neither submitted nor requeued until it answers; those that train continue",
            "wait, or tell the administrators that slurmctld does not answer",
        )
        login = inspect_login(options.runs_dir)
        return [verdict.at("slurm", "cluster"), *found, *judge(OF_LOGIN, login, "login")]
    found = [*judge(OF_SLURM, ClusterFacts(cluster=site, run=measured), "cluster"), *found]
    if options.node is None:
        return [*found, *judge(OF_LOGIN, inspect_login(options.runs_dir, site), "login")]
    resources = plan(options.resources, site, options.node)
    nodes = inspect_nodes(resources, options.network, options.node, options.runs_dir, stage_dir)
    found += judge(OF_LOGIN, inspect_login(options.runs_dir, site, nodes), "login")
    found += (finding for node in nodes for finding in judge(OF_NODE, node, node.name))
    if len(nodes) < resources.max_nodes:
        verdict = costs(
            f"{len(nodes)} of {resources.max_nodes} nodes answered",
            "runs on the other nodes fail too",
            f"see the messages of srun, and check that the nodes have {sys.executable}: it must be on shared storage",
        )
        found.append(verdict.at("nodes", resources.partition or ""))
    return found


def inspect_login(runs_dir: Path, site: ClusterConfig | None = None, nodes: Sequence[NodeInfo] = ()) -> LoginNode:
    """Describe the login node."""
    inherited = site is not None and inherits_open_files(site.config)
    real = runs_dir.expanduser().resolve()
    lacks = list[Feature]()
    with suppress(OSError):  # it is full, or not the user's
        lacks = missing_features(real)
    point = automounted_at(real)
    return LoginNode(
        runs_dir=str(real),
        runs_type=file_system_type(runs_dir),
        torch=node_info.torch_build(),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0] if inherited else None,
        runs_lack=tuple(lacks),
        automounted=str(point) if point else None,
        nodes_see_runs=has_been_seen_by_nodes(real)
        or (bool(nodes) and all(node.job is not None and node.job.sees_runs for node in nodes)),
    )


def print_findings(found: Sequence[Finding], *, debug: bool) -> None:
    """Print costs, then notes, and how many checks passed; with debug also what is unknown."""
    console = Console()
    console.width = console.width if console.is_terminal else max(console.width, _PIPE_WIDTH)
    shown = [finding for finding in found if finding.severity in {Severity.COST, Severity.NOTE}]
    unknown = [finding for finding in found if finding.severity is Severity.UNKNOWN]
    table = Table(box=None, pad_edge=False, padding=(0, 1, 1, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(max_width=_WHERE_WIDTH, overflow="fold")
    table.add_column(overflow="fold")
    order = list(Severity)
    for one in sorted([*shown, *(unknown if debug else [])], key=lambda finding: order.index(finding.severity)):
        style = _STYLES[one.severity]
        seen = one.value if one.check in one.value else f"{one.check}: {one.value}"
        seen, cost, advice, where = (escape(visible(text)) for text in (seen, one.cost, one.what_to_do, one.where))
        lines = (f"[bold]{seen}[/]", cost, advice and f"-> {advice}")
        table.add_row(f"[{style}]{one.severity}[/]", where, "\n".join(filter(None, lines)))
    if shown:
        console.print(table)
    passed = len(found) - len(shown) - len(unknown)
    names = ", ".join(finding.check for finding in unknown)
    rest = f"; {len(unknown)} could not be judged ({names})" if unknown else ""
    print(f"{passed} of {len(found)} checks passed{rest}")


main = partial(cli.run, doctor, DoctorOptions, "doctor", reading=reading_of(DoctorOptions, all_flags=True))

if __name__ == "__main__":
    sys.exit(main())
