"""The --config file: what it says is what the command line would say."""

from pathlib import Path

import pytest

from hpc.cli import parse
from hpc.config import flags_of, with_config
from hpc.errors import UserError
from hpc.spec import Recovery
from hpc.submit import SubmitScript, SubmitTraining, flag_names

KNOWN = flag_names(SubmitTraining)


def test_values_are_taken_as_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("time: 12:00:00\nnodes: 2:4\nconstraint: 0123\nname: on\nlr: 1e-3\nsbatch: [a=1, b=2]\naccount:\n")
    flags = with_config(["--config", str(path), "--lr=2"], KNOWN)
    assert flags[:-3] == [
        "--time=12:00:00", "--nodes=2:4", "--constraint=0123", "--name=on", "--lr=1e-3", "--sbatch=a=1", "--sbatch=b=2",
    ]  # fmt: skip
    assert flags[-3:] == ["--config", str(path), "--lr=2"]


def test_switches_are_true_or_false() -> None:
    assert flags_of({"wait": "true", "dry-run": "false"}, KNOWN) == ["--wait"]
    with pytest.raises(UserError, match="wait is 'yes': write true or false"):
        flags_of({"wait": "yes"}, KNOWN)


def test_recovery_may_be_chosen_in_the_file() -> None:
    settings = {"elastic": "true", "spares": "1", "hang_timeout": "90s", "stop-lead": "2m"}
    flags = flags_of(settings, KNOWN)
    assert flags == ["--elastic", "--spares=1", "--hang-timeout=90s", "--stop-lead=2m"]
    parsed = parse(SubmitScript, flags, "hpc submit")
    assert parsed.recovery == Recovery(elastic=True, spares=1, hang_timeout="90s", stop_lead="2m")


def test_training_flags_are_not_a_scripts() -> None:
    assert "lr" in KNOWN
    assert "lr" not in flag_names(SubmitScript)
    assert "data" in flag_names(SubmitScript)
