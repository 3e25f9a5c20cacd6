import json
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.waiting import wait_for

from hpc.cluster.testbed import daemons, layout
from hpc.slurm import client

ROOT = Path(__file__).parents[4]
# A user with an entry in /etc/passwd and with no rights.
AS_NOBODY = ("setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups")
JOB_NAME = "torchrelay-test"
SMALL = ("--nodes", "1", "--gpus-per-node", "1")
pytestmark = pytest.mark.slurm


def call(*command: str, slurm_conf: str = "", cwd: Path = ROOT) -> str:
    environment = {**os.environ, "SLURM_CONF": slurm_conf}
    done = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout.strip()


@dataclass(frozen=True)
class Slurm:
    """Types Slurm's commands, as root or as nobody."""

    slurm_conf: str
    directory: Path
    prefix: tuple[str, ...] = ()

    def __call__(self, *command: str) -> str:
        return call(*self.prefix, *command, slurm_conf=self.slurm_conf, cwd=self.directory)

    def submit(self, script: str, *flags: str) -> str:
        """Submit a job, which starts before this returns."""
        always = (f"--job-name={JOB_NAME}", "--output=/dev/null")
        job = self("sbatch", "--parsable", *always, *flags, f"--wrap={script}")
        wait_for(lambda: self.field(job, "%T") == "RUNNING")
        return job

    def field(self, job: str, code: str) -> str:
        return self("squeue", "--noheader", f"--job={job}", f"--format={code}")

    def state_of(self, node: str) -> str:
        return daemons.parse_states(self("sinfo", "--noheader", "--Node", "--format=%N %T"))[node]


def connect(address: str, port: int) -> socket.socket:
    """Connect to a server that is about to start."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection((address, port))
        except ConnectionError:
            assert time.monotonic() < deadline, f"nobody listens at {address}:{port}"
            time.sleep(0.1)


def type_testbed(*arguments: str, prefix: tuple[str, ...] = ()) -> Any:
    return json.loads(call(*prefix, sys.executable, "-m", "hpc.testbed", *arguments, "--json"))


@pytest.fixture
def slurm(testbed: dict[str, Any], shared: Path) -> Iterator[Slurm]:
    shared.chmod(0o777)
    yield Slurm(testbed["slurm_conf"], shared)
    call("scancel", "--signal=KILL", "--full", f"--name={JOB_NAME}", slurm_conf=testbed["slurm_conf"])
    call("scancel", f"--name={JOB_NAME}", slurm_conf=testbed["slurm_conf"])


@pytest.fixture
def nobody(slurm: Slurm) -> Slurm:
    return Slurm(slurm.slurm_conf, slurm.directory, AS_NOBODY)


# The shared testbed: what these do to it, they undo.


def test_up_again_changes_nothing(testbed: dict[str, Any]) -> None:
    before = (layout.RUN / "slurmctld.pid").read_text()
    answer = type_testbed("up")
    assert (layout.RUN / "slurmctld.pid").read_text() == before
    assert answer["slurm_conf"] == testbed["slurm_conf"] == str(client.running_slurm_conf())
    assert [node["name"] for node in answer["nodes"]] == ["gpu01", "gpu02", "gpu03", "gpu04"]


def test_each_task_sees_a_machine_of_its_own(slurm: Slurm) -> None:
    Path("/tmp/torchrelay-test-marker").touch()
    look = "echo $(hostname) $CUDA_VISIBLE_DEVICES $(ls -A /tmp /dev/shm | grep -c marker) $(stat -c %a /tmp /dev/shm)"
    try:
        lines = slurm("srun", "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=2", "sh", "-c", look).splitlines()
    finally:
        Path("/tmp/torchrelay-test-marker").unlink()
    assert len({line.split()[0] for line in lines}) == 2
    assert {line.split(maxsplit=1)[1] for line in lines} == {"0,1 0 1777 1777"}


def test_secrets_are_roots_alone(nobody: Slurm) -> None:
    assert nobody("cat", nobody.slurm_conf)
    with pytest.raises(AssertionError, match="Permission denied"):
        nobody("cat", str(layout.MUNGE_KEY))


def test_killed_node_falls_silent_then_down_and_comes_back(slurm: Slurm) -> None:
    server = "import socket; s = socket.create_server(('', 9124)); p, _ = s.accept(); p.recv(1)"
    script = f"srun --nodes=1 --ntasks=1 --nodelist=gpu03 /usr/bin/python3 -c {shlex.quote(server)}"
    job = slurm.submit(script, "--nodelist=gpu02,gpu03", "--gpus-per-node=4")
    with connect("10.77.0.3", 9124) as connection:
        type_testbed("kill-node", "gpu03")
        connection.settimeout(1)
        with pytest.raises(TimeoutError):
            connection.recv(1)
    wait_for(lambda: slurm.state_of("gpu03") == "down")
    wait_for(lambda: slurm.field(job, "%T %r") == "PENDING BeginTime")
    answer = type_testbed("revive-node", "gpu03")
    assert answer["nodes"][2] == {"name": "gpu03", "address": "10.77.0.3", "state": "idle"}
    assert slurm("srun", "--nodelist=gpu03", "--gpus-per-node=4", "hostname") == "gpu03"


# A second testbed, in a machine within the machine: what these do to it harms nobody.

Box = tuple[str, ...]


@pytest.fixture(scope="module")
def box(testbed: dict[str, Any]) -> Iterator[Box]:
    """The words before a command that run it where /run, network and processes are its own."""
    assert testbed["up"]  # Where the shared one cannot run, its fixture has skipped the test.
    script = "mount --make-rshared / && mount -t tmpfs tmpfs /run && ip link set lo up && echo && exec sleep infinity"
    unshare = ("unshare", "--mount", "--net", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")
    with subprocess.Popen([*unshare, "sh", "-c", script], stdout=subprocess.PIPE) as outside:
        assert outside.stdout is not None
        outside.stdout.readline()
        pid = Path(f"/proc/{outside.pid}/task/{outside.pid}/children").read_text().strip()
        yield ("nsenter", f"--target={pid}", "--mount", "--net", "--uts", "--pid", f"--wd={ROOT}", "--")
        outside.kill()


def fails(*command: str) -> str:
    """Run a command that is refused as the user's mistake: one line on stderr."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    return done.stderr


def traces(box: Box) -> dict[str, list[str]]:
    """What a testbed could leave behind: files, mounts, interfaces, living processes."""
    links = call(*box, "ip", "-oneline", "link").splitlines()
    processes = call(*box, "ps", "-e", "-o", "stat=,comm=").splitlines()
    return {
        "files": sorted(call(*box, "find", "/run").splitlines()),
        "mounts": call(*box, "findmnt", "--raw", "--noheadings", "--output=TARGET,FSTYPE").splitlines(),
        "interfaces": [link.split()[1] for link in links],
        "processes": sorted(line.split()[1] for line in processes if not line.startswith("Z")),
    }


def hostname_in_a_job(box: Box) -> str:
    return call(*box, "srun", "--gpus-per-node=1", "hostname", slurm_conf=str(layout.SLURM_CONF))


def test_down_leaves_nothing_behind(box: Box) -> None:
    type_testbed("down", prefix=box)
    before = traces(box)
    type_testbed("up", prefix=box)
    stray = "setsid --fork sleep infinity; sleep infinity"
    call(*box, "sbatch", "--output=/dev/null", f"--wrap={stray}", slurm_conf=str(layout.SLURM_CONF))
    wait_for(lambda: traces(box)["processes"].count("sleep") >= before["processes"].count("sleep") + 2)
    type_testbed("kill-node", "gpu03", prefix=box)
    assert type_testbed("down", prefix=box) == {"schema": 1, "up": False, "slurm_conf": None, "nodes": []}
    assert traces(box) == before


@pytest.mark.parametrize("victim", ["slurmctld", "gpu01"])
def test_up_mends_what_was_killed(box: Box, victim: str) -> None:
    type_testbed("up", *SMALL, prefix=box)
    call(*box, "sh", "-c", f"kill -KILL $(cat {layout.RUN}/{victim}.pid)")
    assert [node["state"] for node in type_testbed("up", *SMALL, prefix=box)["nodes"]] == ["idle"]
    assert hostname_in_a_job(box) == "gpu01"


@pytest.mark.parametrize("seconds", [0.3, 0.7])
def test_up_goes_on_after_an_interrupted_up(box: Box, seconds: float) -> None:
    type_testbed("down", prefix=box)
    killed = ("timeout", "--signal=KILL", str(seconds), sys.executable, "-m", "hpc.testbed", "up", *SMALL)
    subprocess.run([*box, *killed], cwd=ROOT, capture_output=True, check=False, timeout=60)
    assert [node["state"] for node in type_testbed("up", *SMALL, prefix=box)["nodes"]] == ["idle"]


def test_node_that_is_back_before_slurm_missed_it_has_lost_its_job(box: Box) -> None:
    type_testbed("up", *SMALL, prefix=box)
    script = '--wrap=test -n "$SLURM_RESTART_COUNT" || sleep infinity'
    slurm = Slurm(str(layout.SLURM_CONF), ROOT, box)
    job = slurm("sbatch", "--parsable", "--output=/dev/null", script)
    wait_for(lambda: slurm.field(job, "%T") == "RUNNING")
    type_testbed("kill-node", "gpu01", prefix=box)
    type_testbed("revive-node", "gpu01", prefix=box)
    assert hostname_in_a_job(box) == "gpu01"
    wait_for(lambda: slurm.field(job, "%T") == "PENDING")


def test_mistakes_are_answered_in_a_line_that_helps(box: Box) -> None:
    type_testbed("up", *SMALL, prefix=box)
    testbed_verb = (sys.executable, "-m", "hpc.testbed")
    assert "its nodes are: gpu01" in fails(*box, *testbed_verb, "kill-node", "gpu7")
    without_munged = ("unshare", "--mount", "sh", "-c", 'mount -n --bind /dev/null /usr/sbin/munged; exec "$@"', "sh")
    assert "that are missing: munged; type: apt-get install -y slurm-wlm munge" in fails(
        *box, *without_munged, *testbed_verb, "up"
    )
    as_nobody = (
        "import os, sys; from hpc.commands.cluster.testbed import main; os.seteuid(65534); sys.exit(main(['down']))"
    )
    assert "needs root" in fails(*box, sys.executable, "-c", as_nobody)
    assert call(*box, *testbed_verb, "down") == f"ended the testbed of {layout.ROOT}"
    assert call(*box, *testbed_verb, "down") == f"there is no testbed in {layout.ROOT}"
    assert "hpc.testbed up" in fails(*box, *testbed_verb, "revive-node", "gpu01")
