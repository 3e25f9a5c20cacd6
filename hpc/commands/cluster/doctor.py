"""`hpc doctor`: find settings and nodes of a cluster that cost runs work or time. Runs on the login node."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from hpc.base import node_info, program
from hpc.base.errors import TorchrelayError, UserError
from hpc.base.files import DEV_SHM, expanded
from hpc.base.kernel import file_system_type
from hpc.base.node_info import NodeInfo
from hpc.base.text import visible
from hpc.cluster.doctor.findings import OF_LOGIN, Finding, LoginNode, Severity, costs, judge, merge, note, text_of
from hpc.cluster.doctor.node_findings import OF_MACHINE, OF_NODE, compare
from hpc.cluster.doctor.node_job import NodeOptions, probe_nodes
from hpc.cluster.doctor.slurm_findings import OF_SLURM, query_cluster
from hpc.commands import cli
from hpc.run.events.ledger import attempt_prefix
from hpc.slurm import bad_nodes
from hpc.slurm import client as slurm
from hpc.status.printing import console_for
from hpc.submissions.options import with_defaults
from hpc.submissions.sbatch.sbatch_advice import explain

_STYLES = {Severity.COST: "red", Severity.NOTE: "yellow"}
_PIPE_WIDTH, _WHERE_WIDTH = 120, 24
# The columns of the table of nodes: the checks whose numbers they show, and their headings.
_COLUMNS = {
    "computing": "TFLOP/s", "network": "network\nGB/s",
    "writes to the runs directory": "runs dir\nGB/s", "writes to the stage directory": "stage dir\nGB/s",
    "stage directory": "stage dir\nGB free", str(DEV_SHM): f"{DEV_SHM}\nGB free",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(NodeOptions):
    """Find settings of this cluster that cost runs work or time, and print how to change them.

    With --nodes N, measure N nodes in a short job, too, and name the slow ones. Exit code 1: something costs runs.
    """


def doctor(options: DoctorOptions) -> int:
    """Gather facts, judge them, and print the findings. Returns 1 if a finding has the severity `cost`."""
    found = examine(options)
    if options.json:
        cli.print_json([asdict(written) for finding in found for written in merge([finding])])
    else:
        if options.node is not None:
            print_nodes(found)
        print_findings(merge(found))
    return int(any(finding.severity is Severity.COST for finding in found))


def examine(options: DoctorOptions) -> list[Finding]:
    """Return all findings. Raises UserError if the partition does not exist, or for `--nodes` without Slurm."""
    if (reason := slurm.why_unavailable()) is not None:
        if options.node is not None:
            raise UserError(f"--nodes measures nodes of a cluster, but there is no Slurm here ({reason}): leave it out")
        verdict = note(
            f"there is no Slurm here ({reason})",
            "runs use this machine only (--cluster local), and end when it fails",
            "run hpc doctor on a login node",
        )
        here = node_info.inspect_node(Path(os.path.expandvars(options.stage_dir)))
        return [verdict.at("slurm", "login"), *judge(OF_MACHINE, here, here.name)]
    try:
        cluster = query_cluster(options.resources.partition)
    except UserError:
        raise
    except TorchrelayError as error:
        verdict = costs(
            str(error),
            "runs can be neither submitted nor requeued until it answers; those that train continue",
            "wait, or tell the administrators that slurmctld does not answer",
        )
        return [verdict.at("slurm", "cluster"), *judge(OF_LOGIN, inspect_login(options), "login")]
    found = judge(OF_SLURM, cluster, "cluster")
    if options.node is None:
        return [*found, *judge(OF_LOGIN, inspect_login(options), "login")]
    return [*found, *examine_nodes(options, cluster.partition["PartitionName"])]


def examine_nodes(options: DoctorOptions, partition: str) -> list[Finding]:
    """Probe nodes in a job, and return the findings about the login node and about these nodes."""
    resources, nodes = probe_nodes(options, partition)
    found = judge(OF_LOGIN, inspect_login(options, nodes), "login")
    found += (finding for node in nodes for finding in judge(OF_NODE, node, node.name))
    found += compare(nodes)
    if len(nodes) < resources.nodes.most:
        verdict = costs(
            f"{len(nodes)} of {resources.nodes.most} nodes answered",
            "runs on the other nodes fail too",
            f"see the messages of srun, and check that the nodes have {sys.executable}: it must be on shared storage",
        )
        found.append(verdict.at("nodes", partition))
    return found


def inspect_login(options: DoctorOptions, nodes: Sequence[NodeInfo] = ()) -> LoginNode:
    """Describe the login node. `nodes` are the compute nodes that were inspected."""
    real = expanded(options.runs_dir).resolve()
    has_started = any(real.glob(f"*/events/{attempt_prefix(1)}*"))
    return LoginNode(
        runs_dir=str(real),
        runs_type=file_system_type(options.runs_dir),
        nodes_see_runs=has_started or (bool(nodes) and all(node.sees_runs for node in nodes)),
        bad_nodes=tuple(map(str, bad_nodes.known(real))),
    )


def print_nodes(found: Sequence[Finding]) -> None:
    """Print which devices the ranks used, and the numbers of each node, with the lowest one of its devices."""
    numbers = dict[str, dict[str, float]]()
    for finding in found:
        if finding.number is not None:
            of_node = numbers.setdefault(finding.where.partition(" ")[0], {})
            of_node[finding.check] = min(finding.number, of_node.get(finding.check, finding.number))
    console = console_for(_PIPE_WIDTH)
    passed = [finding for finding in found if finding.check == "preflight" and finding.severity is Severity.OK]
    for finding in merge(passed):
        console.print(escape(visible(f"{finding.where}: {finding.value}")), "")
    table = Table("node", box=None, pad_edge=False, header_style="bold")
    for heading in _COLUMNS.values():
        table.add_column(heading, justify="right", vertical="bottom")
    for name, of_node in numbers.items():
        cells = (text_of(of_node[check]) if check in of_node else "-" for check in _COLUMNS)
        table.add_row(escape(visible(name)), *cells)
    if numbers:
        console.print(table, "")


def print_findings(found: Sequence[Finding]) -> None:
    """Print the problems and the notes, and how many there are."""
    console = console_for(_PIPE_WIDTH)
    of = {severity: [finding for finding in found if finding.severity is severity] for severity in Severity}
    table = Table(box=None, pad_edge=False, padding=(0, 1, 1, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(max_width=_WHERE_WIDTH, overflow="fold")
    table.add_column(overflow="fold")
    for one in [*of[Severity.COST], *of[Severity.NOTE]]:
        style = _STYLES[one.severity]
        seen = one.value if one.check in one.value else f"{one.check}: {one.value}"
        seen, cost, advice, where = (escape(visible(text)) for text in (seen, one.cost, one.what_to_do, one.where))
        lines = (f"[bold]{seen}[/]", cost, advice and f"-> {advice}")
        table.add_row(f"[{style}]{one.severity}[/]", where, "\n".join(filter(None, lines)))
    if of[Severity.COST] or of[Severity.NOTE]:
        console.print(table)
    counts = ((len(of[Severity.COST]), "problem"), (len(of[Severity.NOTE]), "note"))
    print(", ".join(f"{count or 'no'} {noun}{'s' * (count != 1)}" for count, noun in counts))


def main(argv: Sequence[str] | None = None) -> int:
    """Run `hpc doctor`. Only a typed --nodes measures nodes, not one of the user's default flags."""

    def complete(typed: Mapping[str, Any]) -> Any:
        asked = {"node": [], **typed} if "nodes" in typed else typed
        return program.build(DoctorOptions, with_defaults(asked, DoctorOptions))

    return cli.run(doctor, DoctorOptions, "doctor", argv, complete=complete, explain=explain)
