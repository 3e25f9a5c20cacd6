"""A study goes on as it began: after refusals that are not a trial's fault, after hpc cancel, and in any directory."""

import dataclasses
import json
import shutil
import sys
from pathlib import Path

import pytest
from support.cluster import Site, mounted_volume, tiny_data
from support.fake_slurm import SBATCH, SINFO, SINFO_TEXT, queued, queueing_site, replace

from hpc.commands import cli
from hpc.run.spec import RunSpec

pytestmark = pytest.mark.timeout(400)
COMMON = ("--name=pets", "--data=data", "--cpus-per-gpu=1", "--once")
SWEEP = ("sweep", "--param=lr=0.1,0.2,0.3", "--sampler=grid", "--gpus-per-node=1", *COMMON)
SCALING = ("scaling", "--nodes", "1", "2", "4", "--gpus-per-node", "1", "--parallel=4", *COMMON)
NEXT = ("--name=pets", "--once")
FULL = "sbatch: error: QOSMaxSubmitJobPerUserLimit"
# Slurm takes one job only.
TAKES_ONE = f"if [ -e {{0}}/queued ]; then echo {FULL} >&2; exit 1; fi; {SBATCH}"


@pytest.fixture
def here(shared: Path) -> tuple[Site, dict[str, str]]:
    site, environment = queueing_site(shared)
    tiny_data(site.path / "data", train=320, test=100)
    return site, environment


def states(site: Site, environment: dict[str, str]) -> list[str]:
    """Return the states of all trials."""
    done = site.hpc("sweep", *NEXT, "--json", **environment)
    assert done.returncode == 0, done.stderr
    return [one["state"] for one in json.loads(done.stdout)["trials"]]


def test_trials_wait_while_slurm_takes_no_job(here: tuple[Site, dict[str, str]]) -> None:
    site, environment = here
    replace(site, "sbatch", TAKES_ONE)
    for words in (SWEEP, ("sweep", *NEXT)):
        done = site.hpc(*words, **environment)
        assert (done.returncode, "QOSMaxSubmitJobPerUserLimit" in done.stderr) == (1, True), done.stderr
        assert "pets-001 waits" in done.stderr
    replace(site, "sbatch", SBATCH)
    assert states(site, environment) == ["running"] * 3
    assert queued(site) == ["pets-000", "pets-001", "pets-002"]


@pytest.mark.parametrize("start", [SWEEP, SCALING], ids=["sweep", "scaling"])
@pytest.mark.parametrize(
    ("program", "text", "says"),
    [
        ("sinfo", SINFO.replace(SINFO_TEXT, SINFO_TEXT.replace("|up|", "|down|")), "partition gpu is down"),
        ("../data/train-labels-idx1-ubyte", None, "lacks train-labels-idx1-ubyte"),
    ],
    ids=["partition", "data"],
)
def test_runs_wait_for_what_they_have_in_common(
    here: tuple[Site, dict[str, str]], start: tuple[str, ...], program: str, text: str | None, says: str
) -> None:
    site, environment = here
    done = site.hpc(*start, "--parallel=1", **environment)
    assert (done.returncode, len(queued(site))) == (0, 1), done.stderr
    before = (site.path / "bin" / program).read_bytes()
    replace(site, program, text)
    done = site.hpc(start[0], *NEXT, "--parallel=3", **environment)
    assert (done.returncode, says in done.stderr, "waits" in done.stderr) == (1, True, True), done.stderr
    (site.path / "bin" / program).write_bytes(before)
    (site.path / "bin" / program).chmod(0o755)
    done = site.hpc(start[0], *NEXT, **environment)
    assert (done.returncode, len(queued(site))) == (0, 3), done.stderr


def test_trials_wait_for_storage(here: tuple[Site, dict[str, str]]) -> None:
    site, environment = here
    with mounted_volume(site.path / "runs", "size=200m,mode=755"):
        done = site.hpc(*SWEEP, "--parallel=1", **environment)
        assert (done.returncode, len(queued(site))) == (0, 1), done.stderr
        filler = site.path / "runs/filler"
        filler.write_bytes(bytes(160 * 2**20))
        done = site.hpc("sweep", *NEXT, "--parallel=3", **environment)
        assert (done.returncode, "its file system is full" in done.stderr) == (1, True), done.stderr
        filler.unlink()
        assert states(site, environment) == ["running"] * 3


def test_refused_size_does_not_stop_a_scaling_study(here: tuple[Site, dict[str, str]]) -> None:
    site, environment = here
    refuses = f"if grep -q nodes=2 $file; then echo {FULL} >&2; exit 1; fi"
    replace(site, "sbatch", f"for file; do :; done; {refuses}; {SBATCH}")
    done = site.hpc(*SCALING, "--json", **environment)
    assert done.returncode == 0, done.stderr
    sizes = [(one["size"], one["state"]) for one in json.loads(done.stdout)["sizes"]]
    assert sizes == [("1x1", "pending"), ("2x1", "refused"), ("4x1", "pending")], done.stderr


def test_trial_is_given_up_for_its_own_values(here: tuple[Site, dict[str, str]]) -> None:
    site, environment = here
    words = ("sweep", "--param=model=small-cnn,none,resnet20", "--sampler=grid", *COMMON)
    done = site.hpc(*words, "--json", **environment)
    assert [one["state"] for one in json.loads(done.stdout)["trials"]] == ["running", "failed", "running"], done.stderr
    assert queued(site) == ["pets-000", "pets-002"]


def test_cancelled_sweep_stays_cancelled_for_cron(here: tuple[Site, dict[str, str]]) -> None:
    site, environment = here
    assert site.hpc(*SWEEP, "--parallel=1", **environment).returncode == 0
    replace(site, "scancel", "exit 0")
    assert site.hpc("cancel", "pets", **environment).returncode == 0
    for _ in range(2):
        done = site.hpc("sweep", *NEXT, "--parallel=3", **environment)
        assert "pets is cancelled and starts no runs: hpc sweep --name pets without --once" in done.stdout
        assert queued(site) == ["pets-000"]


def test_sweep_that_is_cancelled_while_it_starts_trials_has_none_left(here: tuple[Site, dict[str, str]]) -> None:
    site, environment = here
    in_draft = f"if ls -d {site.path}/runs/pets/.pets-001*.tmp >&2 && [ ! -e {site.path}/runs/pets/cancelled ]; then "
    cancel = f"cd {site.path}; {sys.executable} -m hpc cancel pets >&2; cd -; fi; "
    replace(site, "git", f'{in_draft}{cancel}exec {shutil.which("git")} "$@"')
    replace(site, "scancel", "exit 0")
    done = site.hpc(*SWEEP, **environment)
    assert queued(site) == ["pets-000", "pets-001"], done.stderr
    assert "pets-001 is cancelled" in done.stdout
    rows = json.loads(site.hpc("status", "pets", "--json", **environment).stdout)
    assert [row["state"] for row in rows] == ["cancelled"] * 2


@pytest.mark.parametrize("start", [SWEEP, SCALING], ids=["sweep", "scaling"])
def test_study_finds_its_paths_from_any_directory(here: tuple[Site, dict[str, str]], start: tuple[str, ...]) -> None:
    site, environment = here
    assert site.hpc(*start, "--parallel=1", **environment).returncode == 0
    elsewhere = site.path / "elsewhere"
    elsewhere.mkdir()
    tiny_data(elsewhere / "data", train=320, test=100)
    done = dataclasses.replace(site, path=elsewhere).hpc(
        start[0], *NEXT, "--parallel=3", f"--runs-dir={site.path}/runs", **environment
    )
    assert (done.returncode, len(queued(site))) == (0, 3), done.stderr
    runs = cli.all_runs(site.path / "runs")
    assert {RunSpec.load(run).data for run in runs} == {str(site.path / "data")}


def test_study_waits_for_the_directory_in_which_it_was_started(here: tuple[Site, dict[str, str]]) -> None:
    site, environment = here
    (site.path / "first").mkdir()
    first = dataclasses.replace(site, path=site.path / "first")
    done = first.hpc(*SWEEP, "--data=../data", "--runs-dir=../runs", "--parallel=1", **environment)
    assert done.returncode == 0, done.stderr
    (site.path / "first").rename(site.path / "second")
    done = site.hpc("sweep", *NEXT, "--parallel=2", **environment)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert f"pets-001 waits: the sweep was started in {first.path}, which is missing" in done.stderr
    spec = site.path / "runs/pets/sweep.json"
    older = {name: value for name, value in json.loads(spec.read_text()).items() if name != "started_in"}
    spec.write_text(json.dumps(older))
    second = dataclasses.replace(site, path=site.path / "second")
    done = second.hpc("sweep", *NEXT, "--runs-dir=../runs", **environment)
    assert (done.returncode, len(queued(site))) == (0, 2), done.stderr
