"""`hpc doctor`: find settings of a cluster that cost runs work or time. Runs on the login node."""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from rich.markup import escape
from rich.table import Table

from hpc.base import node_info
from hpc.base.errors import TorchrelayError, UserError
from hpc.base.flags import POSITIONAL, Flag
from hpc.base.kernel import automounted_at, file_system_type
from hpc.base.node_info import NodeInfo
from hpc.base.text import visible
from hpc.cluster.doctor.findings import (
    OF_LOGIN,
    OF_MACHINE,
    OF_NODE,
    OF_RUN,
    Finding,
    LoginNode,
    RunMeasurements,
    Severity,
    costs,
    judge,
    merge,
    note,
)
from hpc.cluster.doctor.node_job import NodeOptions, node_verb, plan, run_on_nodes
from hpc.cluster.doctor.slurm_findings import OF_SLURM, ClusterFacts
from hpc.commands import cli
from hpc.run.events.history import History
from hpc.run.events.kinds import DataStaged, NotForked, SnapshotOff
from hpc.run.rundir import RunDir
from hpc.run.spec import RunSpec
from hpc.slurm import bad_nodes, cluster_config
from hpc.slurm import client as slurm
from hpc.status.printing import console_for
from hpc.submissions.runs_storage import Feature, has_been_seen_by_nodes, missing_features
from hpc.submissions.user_python import user_environment

_STYLES = {Severity.COST: "red", Severity.NOTE: "yellow", Severity.UNKNOWN: "dim"}
_PIPE_WIDTH, _WHERE_WIDTH = 120, 24


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(NodeOptions):
    """Find settings of this cluster that cost runs work or time, and print how to change them."""

    run: Annotated[str | None, POSITIONAL] = None
    """Run whose measured save times are used. Default: the newest run that has saved a checkpoint."""
    node: Annotated[tuple[str, ...] | None, Flag(metavar="[NAME ...]")] = None
    """Also inspect compute nodes in a short job: the named nodes, or without names any nodes (--nodes of them)."""


def doctor(options: DoctorOptions) -> int:
    """Gather facts, judge them, and print the findings. Returns 1 if a finding has the severity `cost`."""
    found = merge(examine(options, find_run(options)))
    if options.json:
        cli.print_json([asdict(finding) for finding in found])
    else:
        print_findings(found, debug=options.debug)
    return int(any(finding.severity is Severity.COST for finding in found))


def find_run(options: DoctorOptions) -> RunDir | None:
    """Return the named run, or else the newest run that has saved a checkpoint. None: no run has saved one."""
    if options.run is not None:
        return cli.find_run(options.run, options.runs_dir)
    runs = reversed(cli.all_runs(options.runs_dir))
    return next((run for run in runs if History.load(run).save_seconds is not None), None)


def measurements_of(run: RunDir) -> RunMeasurements:
    """Read the measurements of a run from its events."""
    history = History.load(run)
    last = history.during(max((event.attempt or 0 for event in history.events), default=0))
    without, unforked = last.of(SnapshotOff), last.of(NotForked)
    return RunMeasurements(
        name=run.name,
        save_seconds=history.save_seconds,
        is_script=RunSpec.load(run).train is None,
        in_place=next((one.in_place for one in last.of(DataStaged) if one.in_place), None),
        no_snapshots=without[0].reason if without else None,
        not_forked=unforked[0].detail if unforked else None,
    )


def examine(options: DoctorOptions, run: RunDir | None) -> list[Finding]:
    """Return all findings. Raises UserError if the partition does not exist, or for `--node` without Slurm."""
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
        site = cluster_config.query_cluster(options.resources.partition or (spec.resources.partition if spec else None))
    except UserError:
        raise
    except TorchrelayError as error:
        verdict = costs(
            str(error),
            "runs can be neither submitted nor requeued until it answers; those that train continue",
            "wait, or tell the administrators that slurmctld does not answer",
        )
        login = inspect_login(options)
        return [verdict.at("slurm", "cluster"), *found, *judge(OF_LOGIN, login, "login")]
    found = [*judge(OF_SLURM, ClusterFacts(cluster=site, run=measured), "cluster"), *found]
    if options.node is None:
        return [*found, *judge(OF_LOGIN, inspect_login(options), "login")]
    job = plan("doctor", options, site, stage_dir)
    nodes = run_on_nodes(job, options.runs_dir)
    found += judge(OF_LOGIN, inspect_login(options, nodes), "login")
    found += (finding for node in nodes for finding in judge(OF_NODE, node, node.name))
    if len(nodes) < (asked := job.resources.nodes.most):
        verdict = costs(
            f"{len(nodes)} of {asked} nodes answered",
            "runs on the other nodes fail too",
            f"see the messages of srun, and check that the nodes have {sys.executable}: it must be on shared storage",
        )
        found.append(verdict.at("nodes", job.resources.partition or ""))
    return found


def inspect_login(options: DoctorOptions, nodes: Sequence[NodeInfo] = ()) -> LoginNode:
    """Describe the login node. `nodes` are the compute nodes that were inspected."""
    real = options.runs_dir.expanduser().resolve()
    found = user_environment.find_python()
    python = options.python or (found.path if found else None)
    lacks = list[Feature]()
    with suppress(OSError):  # the storage is full, or the user may not write to it
        lacks = missing_features(real)
    point = automounted_at(real)
    return LoginNode(
        runs_dir=str(real),
        runs_type=file_system_type(options.runs_dir),
        torch=user_environment.torch_build(python),
        python=str(python or sys.executable),
        runs_lack=tuple(lacks),
        automounted=str(point) if point else None,
        nodes_see_runs=has_been_seen_by_nodes(real) or (bool(nodes) and all(node.sees_runs for node in nodes)),
        bad_nodes=tuple(map(str, bad_nodes.known(real))),
    )


def print_findings(found: Sequence[Finding], *, debug: bool) -> None:
    """Print the problems and the notes, and their numbers. With `debug`, also print the unknown findings."""
    console = console_for(_PIPE_WIDTH)
    of = {severity: [finding for finding in found if finding.severity is severity] for severity in Severity}
    unknown = of[Severity.UNKNOWN]
    table = Table(box=None, pad_edge=False, padding=(0, 1, 1, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(max_width=_WHERE_WIDTH, overflow="fold")
    table.add_column(overflow="fold")
    for one in [*of[Severity.COST], *of[Severity.NOTE], *(unknown if debug else [])]:
        style = _STYLES[one.severity]
        seen = one.value if one.check in one.value else f"{one.check}: {one.value}"
        seen, cost, advice, where = (escape(visible(text)) for text in (seen, one.cost, one.what_to_do, one.where))
        lines = (f"[bold]{seen}[/]", cost, advice and f"-> {advice}")
        table.add_row(f"[{style}]{one.severity}[/]", where, "\n".join(filter(None, lines)))
    if of[Severity.COST] or of[Severity.NOTE]:
        console.print(table)
    names = ", ".join(finding.check for finding in unknown)
    rest = f"; {len(unknown)} could not be judged ({names})" if unknown else ""
    counts = ((len(of[Severity.COST]), "problem"), (len(of[Severity.NOTE]), "note"))
    print(", ".join(f"{count or 'no'} {noun}{'s' * (count != 1)}" for count, noun in counts) + rest)


main = node_verb(doctor, DoctorOptions, "doctor")
