import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.events import of_training, recovery_of, resources_of, script_spec

from hpc.base.errors import UserError
from hpc.base.units import NodeRange
from hpc.programs.program_kinds import program_of_run
from hpc.run.rundir import RunDir, check_run_name
from hpc.run.spec import Recovery, Resources, RunSpec
from training.config.train_config import TrainConfig


def test_spec_is_equal_after_saving_and_loading(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    spec = RunSpec(
        name="a b", cluster="slurm", data="/d", stage_dir="/tmp",
        resources=resources_of(nodes="2:4", gpus_per_node="a100:4", cpus_per_gpu=2, sbatch=("mail-type=END", "hold")),
        **of_training(TrainConfig(data="/d", lr=0.3)), forked_from="/r/step",
        recovery=recovery_of(elastic=True, spares=1, hang_timeout="90s", signal_before="2m"),
    )  # fmt: skip
    spec.save(run)
    assert RunSpec.load(run) == spec
    script = script_spec("a.py", "x")
    script.save(run)
    assert RunSpec.load(run) == script
    fields = json.loads(run.spec.read_text())
    assert fields["resources"]["nodes"] == "1", "a text, as it was typed"
    del fields["recovery"]
    run.spec.write_text(json.dumps(fields))
    assert RunSpec.load(run) == script, "what is not there has its defaults"


def test_changed_flags_change_what_ranks_import() -> None:
    train = TrainConfig(data="x")
    spec = script_spec(data="x", **of_training(train))
    flags = program_of_run(spec)
    changed = replace(flags, train=replace(train, checkpoint_activations=True)).as_program()
    assert "torch._dynamo" not in spec.program.preload
    assert "torch._dynamo" in changed.preload
    assert flags.as_program() == spec.program


@pytest.mark.parametrize(("lacks", "has"), [(("program",), {"script": ["a.py"], "train": None}), ((), {"later": 1})])
def test_spec_of_another_version_is_refused_in_one_line(
    lacks: tuple[str, ...], has: dict[str, Any], tmp_path: Path
) -> None:
    run = RunDir(tmp_path)
    script_spec("a.py").save(run)
    fields = {name: value for name, value in json.loads(run.spec.read_text()).items() if name not in lacks}
    run.spec.write_text(json.dumps(fields | has))
    with pytest.raises(UserError, match=r"another version of torchrelay \(.*\): use the version that .*again$"):
        RunSpec.load(run)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("requeue", "--sbatch requeue: runs are always requeued"),
        ("output=x", "use --runs-dir"),
        ("time-min=30", "--sbatch time-min: use --time-min instead"),
        ("comment=a\nb", "KEY=VALUE"),
        ("gpus=4", "--sbatch gpus: use --nodes and --gpus-per-node instead"),
        ("exclusive=", "--sbatch 'exclusive=': use KEY=VALUE, .* or KEY, such as exclusive"),
        ("gres=nvme:1,gpu:a100:2", "--sbatch gres=nvme:1,gpu:a100:2: use --gpus-per-node instead"),
    ],
)
def test_sbatch_options_that_we_set_are_refused(option: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Resources(sbatch=(option,))


def test_gres_that_we_do_not_set_is_taken() -> None:
    assert resources_of(gpus_per_node="2", sbatch=("gres=nvme:1",)).sbatch == ("gres=nvme:1",)
    assert resources_of(gpus_per_node="0", sbatch=("gres=gpu:1",)).sbatch == ("gres=gpu:1",)


@pytest.mark.parametrize(
    "name", ["a/b", "..", ".", "a..b", "a\nb", "", "-x", ".x", "a%j", "a\\b", " a", "x" * 101, "a\0b"]
)
def test_bad_run_name(name: str) -> None:
    with pytest.raises(UserError, match="--name") as caught:
        check_run_name(name)
    assert "\n" not in str(caught.value)
    suggested = str(caught.value).rpartition("--name ")[2]
    check_run_name(suggested)


def test_good_run_name() -> None:
    for name in ("run", "a b", "it's", '"x"', "$HOME", "a;b", "ünï", "a.b", "x" * 100):
        check_run_name(name)


@pytest.mark.parametrize(
    ("recovery", "message"),
    [
        ({"spares": -1}, "--spares is -1: use 0 or more"),
        ({"hang_timeout": "0s"}, "--hang-timeout is 0s: use 1s or more, or auto"),
        ({"signal_before": "9s"}, "--signal-before is 9s: use 15s to 18h"),
        ({"grace_period": "0s"}, "--grace-period is 0s: use 1s to 18h"),
        (
            {"grace_period": "60s", "signal_before": "60s"},
            "--grace-period is 1m, and the requeue takes 10 s more, but --signal-before is 1m",
        ),
        ({"stop_signal": "KILL"}, "--stop-signal is 'KILL': use one of USR1, USR2, TERM, INT, HUP, or auto"),
    ],
)
def test_bad_recovery(recovery: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        recovery_of(**recovery)


def spec(recovery: Recovery, time: str | None = None, nodes: str = "2") -> RunSpec:
    return script_spec(resources=resources_of(nodes=nodes, time=time), recovery=recovery)


def test_nodes_of_a_run_and_of_its_job() -> None:
    assert spec(Recovery(), nodes="2:4").fewest_to_continue == 2
    assert spec(Recovery(spares=2), nodes="2:4").job_nodes == NodeRange(4, 6), "spares are additional nodes"
    elastic = spec(Recovery(elastic=True), nodes="4")
    assert (elastic.fewest_to_continue, elastic.job_nodes) == (1, NodeRange(4)), "it starts on all, continues on one"


def test_stop_lead_is_a_tenth_of_the_limit_unless_it_is_given() -> None:
    assert spec(Recovery(), time="20m").stop_lead_seconds == 120
    assert spec(Recovery(), time="1m").stop_lead_seconds == 30
    assert spec(Recovery()).stop_lead_seconds == 300
    assert spec(recovery_of(signal_before="10m"), time="20m").stop_lead_seconds == 600
    assert spec(recovery_of(grace_period="10m"), time="20m").stop_lead_seconds == 610, "the ranks get all of it"
    assert spec(recovery_of(grace_period="10s"), time="20m").stop_lead_seconds == 120


@pytest.mark.parametrize(
    ("time", "time_min", "minutes", "lead"),
    [("1d", None, None, 300), ("1d", "auto", 15, 300), ("1d", "20m", 20, 120), ("5m", "auto", 5, 30)],
)
def test_shortest_limit_leaves_time_to_save(time: str, time_min: str | None, minutes: int | None, lead: int) -> None:
    shortened = script_spec(resources=resources_of(time=time, time_min=time_min))
    assert (shortened.shortest_minutes, shortened.stop_lead_seconds) == (minutes, lead)
