"""Implements `hpc testbed`: up, down, status, kill-node and revive-node. Runs as root; status runs as any user."""

import json
import os
import shutil
import socket
import stat
from dataclasses import asdict, dataclass

from hpc.base.errors import UserError
from hpc.base.files import write_atomic
from hpc.cluster.testbed import daemons, layout, nodes, render
from hpc.cluster.testbed.layout import LOGIN_NAME, TestbedNode, TestbedShape
from hpc.cluster.testbed.system import locked, require_packages, run, wait_until
from hpc.slurm.client import running_slurm_conf


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
    states = daemons.node_states()
    found = (TestbedNodeStatus(**asdict(node), state=states.get(node.name, "unknown")) for node in shape.all_nodes)
    return TestbedStatus(up=bool(states), slurm_conf=str(slurm_conf), nodes=tuple(found))


def up(shape: TestbedShape) -> None:
    """Start a testbed of this shape, in place of any other, and wait until all nodes are idle.

    A healthy testbed of the same shape is left alone.
    """
    require_packages(accounting=shape.has_accounting)
    with locked(layout.ROOT.parent):
        if not _is_healthy(shape):
            _tear_down()
            _build(shape)


def down() -> bool:
    """End the testbed and remove all its files. Return whether there was a testbed."""
    with locked(layout.ROOT.parent):
        found = layout.ROOT.exists()
        _tear_down()
    return found


def kill_node(name: str) -> None:
    """Cut a node's power. Slurm marks the node down by itself, about SlurmdTimeout later."""
    with locked(layout.ROOT.parent):
        nodes.power_off(_running_shape().node(name).name)


def revive_node(name: str) -> None:
    """Boot a killed node and wait until Slurm can use it. A node that works is left alone."""
    with locked(layout.ROOT.parent):
        node = _running_shape().node(name)
        if nodes.processes(layout.node_net(name)) and _is_usable(name):
            return
        nodes.power_off(name)
        # Mark the node down first: if it returned before Slurm noticed, Slurm would keep the jobs that died with it.
        down = ("update", f"NodeName={name}", "State=DOWN", "Reason=testbed")
        run("scontrol", *down)
        nodes.power_on(node)
        wait_until(lambda: _is_usable(name), seconds=60, what=f"{name} to be idle (log: {layout.log_of(name)})")


def _is_usable(name: str) -> bool:
    return daemons.node_states().get(name) in daemons.USABLE_STATES


def _recorded_shape() -> TestbedShape | None:
    try:
        return TestbedShape(**json.loads(layout.STATE.read_text()))
    except (OSError, ValueError, TypeError, UserError):
        return None


def _running_shape() -> TestbedShape:
    shape = _recorded_shape()
    if shape is None or running_slurm_conf() is None:
        raise UserError("the testbed is not up; type: python -m hpc.testbed up")
    return shape


def _is_healthy(shape: TestbedShape) -> bool:
    # Compare files, not shapes: another version may write other files, and an explicit default gives the same files.
    wanted = render.files(shape, socket.gethostname())
    if _recorded_shape() is None or any(not p.is_file() or p.read_text() != text for p, text in wanted.items()):
        return False
    if not (daemons.munge_answers() and daemons.controller_answers()):
        return False
    if shape.has_accounting and not daemons.accounting_answers():
        return False
    states = daemons.node_states()
    return all(
        states.get(node.name) in daemons.USABLE_STATES and nodes.processes(layout.node_net(node.name))
        for node in shape.all_nodes
    )


def _build(shape: TestbedShape) -> None:
    for directory in layout.DIRECTORIES:
        directory.mkdir()
        # mkdir applies the caller's umask; chmod does not.
        directory.chmod(0o700 if directory == layout.SECRET else 0o755)
    texts = {layout.STATE: json.dumps(asdict(shape)), **render.files(shape, socket.gethostname())}
    for path, text in texts.items():
        write_atomic(path, text)
        # slurmdbd refuses to start if others can read its configuration.
        path.chmod(0o600 if path == layout.SLURMDBD_CONF else 0o644)
    for index in range(shape.gpus_per_node):
        # The device is a null device: Slurm counts device files and does not open them.
        device = layout.DEVICES / f"nvidia{index}"
        os.mknod(device, stat.S_IFCHR, os.makedev(1, 3))
        device.chmod(0o666)
    nodes.create_switch()
    # The login host's daemons need the host name in slurm.conf, so they get a host-name namespace.
    nodes.pin(layout.CONTROLLER_UTS, "hostname", LOGIN_NAME)
    daemons.start_munged()
    if shape.has_accounting:
        daemons.start_accounting(shape.kind.account)
    daemons.start_slurmctld()
    for node in shape.all_nodes:
        nodes.power_on(node)
    names = {node.name for node in shape.all_nodes}
    wait_until(
        lambda: {name for name, state in daemons.node_states().items() if state == "idle"} == names,
        seconds=60,
        what=f"all nodes to be idle (logs: {layout.LOGS})",
    )


def _tear_down() -> None:
    """End the processes of a testbed, which may be incomplete, then remove its files and namespaces."""
    for pin in sorted(layout.NAMESPACES.glob("*.net")):
        if pin != layout.SWITCH_NET:
            nodes.power_off(pin.stem)
    nodes.kill_all(layout.CONTROLLER_UTS)
    nodes.unpin(layout.CONTROLLER_UTS)
    nodes.remove_switch()
    if layout.ROOT.exists():
        shutil.rmtree(layout.ROOT)
