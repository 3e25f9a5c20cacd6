import os
import threading
import time
from pathlib import Path

import pytest

from hpc.base.errors import UserError
from hpc.cluster.testbed import daemons, layout, render
from hpc.cluster.testbed.profiles import ProfileName
from hpc.cluster.testbed.system import locked
from hpc.slurm import client

PATHS = layout.TestbedPaths(Path("/run/torchrelay-testbed"))


def test_slurm_conf_names_every_node_with_its_address_and_gpus() -> None:
    text = render.slurm_conf(layout.TestbedShape(nodes=2, gpus_per_node=3), PATHS)
    nodes = [line for line in text.splitlines() if line.startswith("NodeName=")]
    assert [line.split()[:2] for line in nodes] == [
        ["NodeName=gpu01", "NodeAddr=10.77.0.1"],
        ["NodeName=gpu02", "NodeAddr=10.77.0.2"],
    ]
    assert all("Gres=gpu:3" in line for line in nodes)


def test_every_gpu_has_a_device_file() -> None:
    assert render.gres_conf(layout.TestbedShape(gpus_per_node=4), PATHS).endswith("/dev/nvidia[0-3]\n")
    assert render.gres_conf(layout.TestbedShape(gpus_per_node=1), PATHS).endswith("/dev/nvidia0\n")


def test_typed_profile_has_gpus_of_two_types_and_a_node_without() -> None:
    shape = layout.TestbedShape(profile="typed", nodes=5, gpus_per_node=2)
    text = render.slurm_conf(shape, PATHS)
    nodes = [line.split() for line in text.splitlines() if line.startswith("NodeName=")]
    gres = [[word for word in words if word.startswith("Gres=")] for words in nodes]
    assert gres == [["Gres=gpu:a100:2"], ["Gres=gpu:a100:2"], ["Gres=gpu:h100:2"], [], ["Gres=gpu:a100:2"]]
    typed = [line.split()[:3] for line in render.gres_conf(shape, PATHS).splitlines()]
    assert typed[2:] == [["NodeName=gpu03", "Name=gpu", "Type=h100"], ["NodeName=gpu05", "Name=gpu", "Type=a100"]]
    assert text.count("SelectTypeParameters=") == text.count("SelectTypeParameters=CR_CPU\n") == 1


def test_bare_profile_is_hard_on_runs() -> None:
    lines = render.slurm_conf(layout.TestbedShape(profile="bare"), PATHS).splitlines()
    assert {"JobRequeue=0", "SlurmdTimeout=300"} <= set(lines)
    [gpu] = [line.split() for line in lines if line.startswith("PartitionName=gpu")]
    assert {"GraceTime=0", "MaxTime=00:05:00", "DefaultTime=00:05:00"} <= set(gpu)
    quick = render.slurm_conf(layout.TestbedShape(profile="bare", slurmd_timeout=10), PATHS)
    assert "SlurmdTimeout=10\n" in quick


def test_ranges_profile_has_many_nodes_with_leading_zeros() -> None:
    names = [node.name for node in layout.TestbedShape(profile="ranges").all_nodes]
    assert (len(names), names[0], names[9], names[31]) == (32, "gpu001", "gpu010", "gpu032")
    few = layout.TestbedShape(profile="ranges", nodes=2)
    assert [node.name for node in few.all_nodes] == ["gpu001", "gpu002"]
    assert "NodeName=gpu002 NodeAddr=10.77.0.2 " in render.slurm_conf(few, PATHS)


@pytest.mark.parametrize(("profile", "mode"), [("cancel", "CANCEL"), ("suspend", "SUSPEND"), ("usual", "REQUEUE")])
def test_profiles_differ_in_what_preemption_does(profile: ProfileName, mode: str) -> None:
    lines = render.slurm_conf(layout.TestbedShape(profile=profile), PATHS).splitlines()
    [gpu] = [line.split() for line in lines if line.startswith("PartitionName=gpu")]
    assert [word for word in gpu if word.startswith("PreemptMode=")] == [f"PreemptMode={mode}"]
    [general] = [line for line in lines if line.startswith("PreemptMode=")]
    assert general.startswith(f"PreemptMode={mode}")


def test_strict_profile_enforces_limits_and_has_a_plugin() -> None:
    shape = layout.TestbedShape(profile="strict")
    files = render.files(shape, PATHS, "here")
    assert {PATHS.slurmdbd_conf, PATHS.job_submit} <= set(files)
    conf = set(files[PATHS.slurm_conf].splitlines())
    enforced = "AccountingStorageEnforce=associations,limits,qos"
    assert {"AccountingStorageType=accounting_storage/slurmdbd", enforced, "JobSubmitPlugins=lua"} <= conf


def test_nodes_without_gpus_mention_none() -> None:
    shape = layout.TestbedShape(gpus_per_node=0)
    assert "gpu:" not in render.slurm_conf(shape, PATHS) + render.gres_conf(shape, PATHS)


@pytest.mark.parametrize("accounting", [True, False])
def test_accounting_is_configured_when_asked_for(accounting: bool) -> None:
    shape = layout.TestbedShape(accounting=accounting)
    assert ("accounting_storage/slurmdbd" in render.slurm_conf(shape, PATHS)) is accounting
    assert (PATHS.slurmdbd_conf in render.files(shape, PATHS, "here")) is accounting


def test_hosts_name_the_nodes_and_the_machine() -> None:
    text = render.hosts(layout.TestbedShape(nodes=2), "workstation")
    assert "10.77.0.2 gpu02\n" in text
    assert "10.77.0.254 login workstation\n" in text


@pytest.mark.parametrize("wrong", [{"nodes": 0}, {"nodes": 100}, {"gpus_per_node": -1}, {"cpus_per_node": 0}])
def test_impossible_shape_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(UserError, match="type for example"):
        layout.TestbedShape(**wrong)  # type: ignore[arg-type]  # whole numbers all


def test_unknown_node_lists_the_known() -> None:
    with pytest.raises(UserError, match=r"'gpu9'.*gpu01 gpu02$"):
        layout.TestbedShape(nodes=2).node("gpu9")


def test_silent_node_is_unresponsive_until_slurm_calls_it_down() -> None:
    states = daemons.parse_states("gpu01 idle\ngpu01 idle\ngpu02 mixed*\ngpu03 down*\ngpu04 idle#\n")
    assert states == {"gpu01": "idle", "gpu02": "unresponsive", "gpu03": "down", "gpu04": "idle"}


def test_no_slurm_conf_where_nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "TESTBED_DIRECTORY", tmp_path)
    assert client.running_slurm_conf() is None
    # What a reboot leaves: a file that names somebody else's process.
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "slurmctld.pid").write_text(f"{os.getpid()}\n")
    (tmp_path / "slurm.conf").touch()
    assert client.running_slurm_conf() is None


def test_lock_admits_one_at_a_time_and_leaves_no_file(tmp_path: Path) -> None:
    inside, most = [], []

    def visit() -> None:
        with locked(tmp_path / "lock"):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.005)
            inside.pop()

    threads = [threading.Thread(target=visit) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 8
    assert list(tmp_path.iterdir()) == []
