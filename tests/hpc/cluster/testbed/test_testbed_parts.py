import os
import threading
import time
from pathlib import Path

import pytest

from hpc.base.errors import UserError
from hpc.cluster.testbed import daemons, layout
from hpc.cluster.testbed.system import locked
from hpc.commands.cluster.testbed import main
from hpc.slurm import client


@pytest.mark.parametrize("wrong", [{"nodes": 0}, {"nodes": 100}, {"gpus_per_node": -1}])
def test_impossible_shape_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(UserError, match="type for example"):
        layout.TestbedShape(**wrong)  # type: ignore[arg-type]  # whole numbers all


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "missing argument ACTION: use one of up, down, status, kill-node, revive-node"),
        ("stop", "action is 'stop': use one of 'up', 'down'"),
        ("kill-node", "missing argument NODE: type hpc testbed kill-node gpu02"),
        ("down gpu02", "unexpected argument: gpu02"),
        ("kill-node gpu02 --nodes 3", "hpc testbed kill-node has no flags but --json and --debug"),
    ],
)
def test_what_an_action_does_not_take_is_refused(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    assert capsys.readouterr().err.startswith(f"hpc testbed: {message}")


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
        with locked(tmp_path):
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
