"""`hpc config`: the user's defaults, and where they come from."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support import cluster

from hpc.base import flag_files as files
from hpc.submissions.options import user_defaults


def hpc(tmp_path: Path, *arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    return cluster.hpc(*arguments, cwd=tmp_path, XDG_CONFIG_HOME=str(tmp_path), COLUMNS="200", **variables)


def shown(tmp_path: Path, **variables: str) -> dict[str, Any]:
    done = hpc(tmp_path, "config", "--json", **variables)
    assert done.returncode == 0, done.stderr
    return {one.pop("flag"): one for one in json.loads(done.stdout)["flags"]}


def test_places_of_values_and_which_of_them_counts(tmp_path: Path) -> None:
    own = tmp_path / "torchrelay.yaml"
    own.write_text("partition: gpu\nelastic: true\ntime: 12h\nsbatch: mail-type=END\n")
    variables = {"SBATCH_PARTITION": "big", "SBATCH_MEM_PER_NODE": "64000", "SBATCH_EXPORT": "NONE"}
    found = shown(tmp_path, **variables, SBATCH_RESERVATION="course", SBATCH_EXCLUSIVE="exclusive")
    several = found.pop("sbatch")
    assert sorted(several["value"]) == ["exclusive", "mail-type=END", "reservation=course"]
    assert set(several["source"].split(", ")) == {str(own), "SBATCH_RESERVATION", "SBATCH_EXCLUSIVE"}
    assert found == {
        "partition": {"value": "big", "source": "SBATCH_PARTITION"},
        "mem": {"value": "64000M", "source": "SBATCH_MEM_PER_NODE"},
        "time": {"value": "12h", "source": str(own)},
        "elastic": {"value": "true", "source": str(own)},
    }
    assert shown(tmp_path, SBATCH_TIMELIMIT="2880")["time"] == {"value": "2880m", "source": "SBATCH_TIMELIMIT"}
    in_a_job = shown(tmp_path, SBATCH_PARTITION="big", SLURM_JOB_ID="7")
    assert in_a_job["partition"]["value"] == "gpu", "its variables are not the user's"


def test_table_names_each_flag_its_value_and_its_place(tmp_path: Path) -> None:
    own = tmp_path / "torchrelay.yaml"
    own.write_text("batch_size: 256\n")
    assert hpc(tmp_path, "config").stdout.splitlines()[-1].split() == ["--batch-size", "256", str(own)]


def test_all_verbs_look_into_the_default_directory_of_runs(tmp_path: Path) -> None:
    (tmp_path / "torchrelay.yaml").write_text("runs-dir: elsewhere\npartition: gpu\n")
    assert "no runs in elsewhere" in hpc(tmp_path, "status").stdout
    assert "no runs in here" in hpc(tmp_path, "status", "--runs-dir=here").stdout


def test_site_file_gives_way_to_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site, own = tmp_path / "site.yaml", tmp_path / "torchrelay.yaml"
    site.write_text("partition: gpu\naccount: group\n")
    own.write_text("account: me\n")
    monkeypatch.setattr(files, "default_files", lambda: (site, own))
    assert files.merge_defaults(user_defaults({})) == {"partition": "gpu", "account": "me"}
