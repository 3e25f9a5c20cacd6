"""Implements `hpc testbed`: up, down, status, kill-node and revive-node. Runs as root; status runs as any user."""

import json
import os
import shutil
import socket
import stat
from dataclasses import asdict, dataclass

from hpc.base.errors import UserError
from hpc.base.files import write_atomic
from hpc.cluster.testbed import daemons, nodes, render
from hpc.cluster.testbed.layout import LOGIN_NAME, TestbedNode, TestbedPaths, TestbedShape
from hpc.cluster.testbed.system import locked, require_packages, run, succeeds, wait_until
from hpc.slurm.client import TESTBED_DIRECTORY, running_slurm_conf

PATHS = TestbedPaths(TESTBED_DIRECTORY)


@dataclass(frozen=True, kw_only=True)
class TestbedNodeStatus(TestbedNode):
    """A node and its state: a word of `daemons.parse_states`, or `unknown` if slurmctld does not answer."""

    state: str


@dataclass(frozen=True, kw_only=True)
class TestbedStatus:
    """The document of `status --json`."""

    up: bool
    slurm_conf: str | None
    nodes: tuple[TestbedNodeStatus, ...]


def status() -> TestbedStatus:
    """Return the state of the testbed and its nodes."""
    slurm_conf = running_slurm_conf()
    shape = _recorded_shape()
    if shape is None or slurm_conf is None:
        return TestbedStatus(up=False, slurm_conf=None, nodes=())
    states = daemons.node_states(PATHS)
    found = (TestbedNodeStatus(**asdict(node), state=states.get(node.name, "unknown")) for node in shape.all_nodes)
    return TestbedStatus(up=bool(states), slurm_conf=str(slurm_conf), nodes=tuple(found))


def up(shape: TestbedShape) -> None:
    """Start a testbed of this shape, in place of any other, and wait until all nodes are idle.

    A healthy testbed of the same shape is left alone.
    """
    require_packages(accounting=shape.has_accounting)
    if shape.network[1] and not succeeds("unshare", "--net", "tc", "qdisc", "add", "dev", "lo", "root", "netem"):
        raise UserError(
            f"--shape-network {shape.shape_network}: this machine's kernel cannot delay packets (it has no netem): "
            f"give the rate alone: --shape-network {shape.network[0]}"
        )
    with locked(PATHS.lock):
        if not _is_healthy(shape):
            _tear_down()
            _build(shape)


def down() -> bool:
    """End the testbed and remove all its files. Return whether there was a testbed."""
    with locked(PATHS.lock):
        found = PATHS.root.exists()
        _tear_down()
    return found


def kill_node(name: str) -> None:
    """Cut a node's power. Slurm marks the node down by itself, about SlurmdTimeout later."""
    with locked(PATHS.lock):
        nodes.power_off(_running_shape().node(name).name, PATHS)


def revive_node(name: str) -> None:
    """Boot a killed node and wait until Slurm can use it. A node that works is left alone."""
    with locked(PATHS.lock):
        node = _running_shape().node(name)
        if nodes.processes(PATHS.node_net(name)) and _is_usable(name):
            return
        nodes.power_off(name, PATHS)
        # Mark the node down first: if it returned before Slurm noticed, Slurm would keep the jobs that died with it.
        down = ("update", f"NodeName={name}", "State=DOWN", "Reason=testbed")
        run("scontrol", *down, SLURM_CONF=str(PATHS.slurm_conf))
        nodes.power_on(node, PATHS)
        wait_until(lambda: _is_usable(name), seconds=60, what=f"{name} to be idle (log: {PATHS.log(name)})")


def _is_usable(name: str) -> bool:
    return daemons.node_states(PATHS).get(name) in daemons.USABLE_STATES


def _recorded_shape() -> TestbedShape | None:
    """Return the recorded shape of the testbed; None if there is no readable record."""
    try:
        return TestbedShape(**json.loads(PATHS.state.read_text()))
    except (OSError, ValueError, TypeError, UserError):
        return None


def _running_shape() -> TestbedShape:
    """Return the shape of the running testbed. Raises UserError if it is not up."""
    shape = _recorded_shape()
    if shape is None or running_slurm_conf() is None:
        raise UserError("the testbed is not up; type: python -m hpc.testbed up")
    return shape


def _is_healthy(shape: TestbedShape) -> bool:
    """Return whether a testbed of this shape runs, all daemons answer, and all nodes work."""
    # Compare files, not shapes: another version may write other files, and an explicit default gives the same files.
    wanted = render.files(shape, PATHS, socket.gethostname())
    if _recorded_shape() is None or any(not p.is_file() or p.read_text() != text for p, text in wanted.items()):
        return False
    if not (daemons.munge_answers(PATHS) and daemons.controller_answers(PATHS)):
        return False
    if shape.has_accounting and not daemons.accounting_answers(PATHS):
        return False
    states = daemons.node_states(PATHS)
    return all(
        states.get(node.name) in daemons.USABLE_STATES and nodes.processes(PATHS.node_net(node.name))
        for node in shape.all_nodes
    )


def _build(shape: TestbedShape) -> None:
    public = (PATHS.munge, PATHS.devices, PATHS.spool, PATHS.run, PATHS.logs, PATHS.boot_scripts, PATHS.namespaces)
    for directory in (PATHS.root, PATHS.secret, PATHS.controller_state, *public):
        directory.mkdir()
        # mkdir applies the caller's umask; chmod does not.
        directory.chmod(0o700 if directory == PATHS.secret else 0o755)
    texts = {PATHS.state: json.dumps(asdict(shape)), **render.files(shape, PATHS, socket.gethostname())}
    for path, text in texts.items():
        write_atomic(path, text)
        # slurmdbd refuses to start if others can read its configuration.
        path.chmod(0o600 if path == PATHS.slurmdbd_conf else 0o644)
    for index in range(shape.gpus_per_node):
        # The device is a null device: Slurm counts device files and does not open them.
        device = PATHS.devices / f"nvidia{index}"
        os.mknod(device, stat.S_IFCHR, os.makedev(1, 3))
        device.chmod(0o666)
    nodes.create_switch(PATHS)
    # The login host's daemons need the host name in slurm.conf, so they get a host-name namespace.
    nodes.pin(PATHS.controller_uts, "hostname", LOGIN_NAME)
    daemons.start_munged(PATHS)
    if shape.has_accounting:
        daemons.start_accounting(PATHS, shape.kind.account)
    daemons.start_slurmctld(PATHS)
    for node in shape.all_nodes:
        nodes.power_on(node, PATHS)
    names = {node.name for node in shape.all_nodes}
    wait_until(
        lambda: {name for name, state in daemons.node_states(PATHS).items() if state == "idle"} == names,
        seconds=60,
        what=f"all nodes to be idle (logs: {PATHS.logs})",
    )


def _tear_down() -> None:
    """End the processes of a testbed, which may be incomplete, then remove its files and namespaces."""
    for pin in sorted(PATHS.namespaces.glob("*.net")):
        if pin != PATHS.switch_net:
            nodes.power_off(pin.stem, PATHS)
    nodes.kill_all(PATHS.controller_uts)
    nodes.unpin(PATHS.controller_uts)
    nodes.remove_switch(PATHS)
    if PATHS.root.exists():
        shutil.rmtree(PATHS.root)
