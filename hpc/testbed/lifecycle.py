"""The testbed as a whole: up, down, status, a node's power. Runs as root on the testbed's machine; status as anybody.

One rule repairs everything: a healthy testbed of the same shape is left alone, anything else is taken down, as far
as it exists, and built anew.
"""

import json
import os
import shutil
import socket
import stat
from dataclasses import asdict, dataclass
from pathlib import Path

from hpc.core.errors import UserError
from hpc.core.files import write_atomic
from hpc.slurm.client import TESTBED_DIRECTORY, running_slurm_conf
from hpc.testbed import daemons, namespaces, network, nodes, render, slurmdbd
from hpc.testbed.layout import TestbedPaths, TestbedShape
from hpc.testbed.system import locked, require_packages, require_root, wait_until

PLACES = TestbedPaths(TESTBED_DIRECTORY)


@dataclass(frozen=True, kw_only=True)
class TestbedNodeStatus:
    """One node: its state is Slurm's long word, `unresponsive` or, when nobody can be asked, `unknown`."""

    name: str
    address: str
    state: str


@dataclass(frozen=True, kw_only=True)
class TestbedStatus:
    """What `status --json` answers."""

    up: bool
    slurm_conf: str | None
    nodes: tuple[TestbedNodeStatus, ...]


def status() -> TestbedStatus:
    """What there is. Needs no root."""
    slurm_conf = running_slurm_conf()
    shape = _recorded_shape()
    if shape is None or slurm_conf is None:
        return TestbedStatus(up=False, slurm_conf=None, nodes=())
    states = daemons.node_states(PLACES)
    found = tuple(
        TestbedNodeStatus(name=node.name, address=node.address, state=states.get(node.name, "unknown"))
        for node in shape.all_nodes
    )
    return TestbedStatus(up=bool(states), slurm_conf=str(slurm_conf), nodes=found)


def up(shape: TestbedShape) -> None:
    """Have a testbed of this shape with all nodes ready: at once if it is there, else after some seconds."""
    require_root()
    require_packages(accounting=shape.accounting)
    with locked(PLACES.lock):
        if not _is_healthy(shape):
            _tear_down()
            _build(shape)


def down() -> None:
    """Leave nothing behind, whatever there is."""
    require_root()
    with locked(PLACES.lock):
        _tear_down()


def kill_node(name: str) -> None:
    """Cut a node's power. Slurm finds out by itself, 13 to 30 s later."""
    require_root()
    with locked(PLACES.lock):
        node = _running_shape().node(name)
        nodes.power_off(node.name, PLACES)


def revive_node(name: str) -> None:
    """Bring a node back, empty, and wait until Slurm uses it again. A node that works is left alone."""
    require_root()
    with locked(PLACES.lock):
        node = _running_shape().node(name)
        if namespaces.processes(PLACES.node_net(name)) and _is_usable(name):
            return
        nodes.power_off(name, PLACES)
        # A node that is back before Slurm missed it would keep its dead jobs: say that it was gone.
        daemons.update_node(name, "DOWN", PLACES)
        nodes.power_on(node, PLACES)
        wait_until(lambda: _is_usable(name), seconds=60, what=f"for {name} to be idle (log: {PLACES.log(name)})")


def _is_usable(name: str) -> bool:
    return daemons.node_states(PLACES).get(name) in daemons.USABLE_STATES


def _recorded_shape() -> TestbedShape | None:
    """The shape of the testbed that is, or was last, here; None if its record is missing or another version's."""
    try:
        return TestbedShape(**json.loads(PLACES.state.read_text()))
    except (OSError, ValueError, TypeError, UserError):
        return None


def _running_shape() -> TestbedShape:
    """The shape of the testbed, which must be up."""
    shape = _recorded_shape()
    if shape is None or running_slurm_conf() is None:
        raise UserError("the testbed is not up; type: python -m hpc.testbed up")
    return shape


def _is_healthy(shape: TestbedShape) -> bool:
    """Whether there is a testbed of exactly this shape with all daemons answering and all nodes working."""
    if _recorded_shape() != shape or not _files_are_current(shape):
        return False
    if not (daemons.munge_answers(PLACES) and daemons.controller_answers(PLACES)):
        return False
    if shape.accounting and not slurmdbd.accounting_answers(PLACES):
        return False
    states = daemons.node_states(PLACES)
    return all(
        states.get(node.name) in daemons.USABLE_STATES and namespaces.processes(PLACES.node_net(node.name))
        for node in shape.all_nodes
    )


def _files_are_current(shape: TestbedShape) -> bool:
    """Whether the configuration on the disk is what this version would write."""
    wanted = render.files(shape, PLACES, socket.gethostname())
    return all(path.is_file() and path.read_text() == text for path, text in wanted.items())


def _build(shape: TestbedShape) -> None:
    """Write and start everything. The record comes first: whatever happens then, others see what was meant."""
    _write_files(shape)
    network.create_switch(PLACES)
    daemons.create_controller_host(PLACES)
    daemons.start_munged(PLACES)
    if shape.accounting:
        slurmdbd.start_accounting(PLACES)
    daemons.start_slurmctld(PLACES)
    for node in shape.all_nodes:
        nodes.power_on(node, PLACES)
    names = {node.name for node in shape.all_nodes}
    wait_until(
        lambda: {name for name, state in daemons.node_states(PLACES).items() if state == "idle"} == names,
        seconds=60,
        what=f"for all nodes to be idle (logs: {PLACES.logs})",
    )


def _write_files(shape: TestbedShape) -> None:
    """Write the directories, the configuration and the pretended GPUs."""
    for directory in PLACES.directories:
        directory.mkdir()
        # chmod, because what mkdir is told is subject to the caller's umask.
        directory.chmod(0o700 if directory == PLACES.secret else 0o755)
    _write(PLACES.state, json.dumps(asdict(shape)))
    for path, text in render.files(shape, PLACES, socket.gethostname()).items():
        _write(path, text)
    for index in range(shape.gpus_per_node):
        _make_device(PLACES.devices / f"nvidia{index}")


def _write(path: Path, text: str) -> None:
    """Write one file for everybody to read, but slurmdbd insists on being the only reader of its own."""
    write_atomic(path, text)
    path.chmod(0o600 if path == PLACES.slurmdbd_conf else 0o644)


def _make_device(path: Path) -> None:
    """Make a character device, Linux's null: Slurm counts device files and opens none."""
    os.mknod(path, stat.S_IFCHR, os.makedev(1, 3))
    path.chmod(0o666)


def _tear_down() -> None:
    """End the processes, then remove what they used. Goes by what is there, so any half of a testbed will do."""
    for pin in sorted(PLACES.namespaces.glob("*.net")):
        if pin != PLACES.switch_net:
            nodes.power_off(pin.stem, PLACES)
    daemons.remove_controller_host(PLACES)
    network.remove_switch(PLACES)
    if PLACES.root.exists():
        shutil.rmtree(PLACES.root)
