"""`hpc submit job.sbatch`: what is printed, what is submitted, and files that are no batch scripts."""

import json
import shlex
import sys
from pathlib import Path

import pytest
from support.cluster import hpc

# Without a Slurm, a dry run prints the command that starts the agents on this machine.
LOCAL = ("--cluster", "local", "--dry-run")
# The command as typed here, where no PATH finds it.
HPC = str(Path(sys.executable).with_name("hpc"))
JOB = """#!/bin/bash
#SBATCH --ntasks-per-node=2 --cpus-per-task=1
#SBATCH --job-name=flowers
echo start
srun python train.py --lr 0.1
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print(1)\n")
    (tmp_path / "job.sbatch").write_text(JOB)
    return tmp_path


def refused(here: Path, *arguments: str) -> str:
    done = hpc("submit", *arguments, cwd=here)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stdout + done.stderr
    return done.stderr


def test_line_is_printed_first_and_what_is_left_out_with_the_reason(here: Path) -> None:
    done = hpc("submit", "job.sbatch", *LOCAL, "--gpus-per-node", "1", cwd=here)
    assert done.returncode == 0, done.stderr
    line, *rest = done.stdout.splitlines()
    assert line == (
        f"{HPC} submit --nodes 1 --cpus-per-gpu 2 --name flowers --cluster local --gpus-per-node 1 -- train.py --lr 0.1"
    )
    assert "jobs.agent" in "".join(rest), "the command that would start the run"
    assert "hpc submit: left out line 4: `echo start`: changes nothing for the ranks\n" in done.stderr
    assert "hpc submit: left out line 5: srun: hpc submit starts the ranks, one per GPU\n" in done.stderr


def test_printed_line_does_the_same(here: Path) -> None:
    line = hpc("submit", "job.sbatch", *LOCAL, cwd=here).stdout.splitlines()[0]
    _, verb, *words = shlex.split(line)
    by_file, by_line = (
        hpc(verb, *typed, cwd=here).stdout
        for typed in (["job.sbatch", *LOCAL], [*words[:-4], "--dry-run", *words[-4:]])
    )
    assert by_file == f"{line}\n{by_line}"


def test_run_starts_in_the_directory_of_the_batch_script_and_its_directory_stays_here(here: Path) -> None:
    (here / "project").mkdir()
    (here / "train.py").rename(here / "project" / "train.py")
    (here / "job.sbatch").write_text(JOB.replace("echo start", "cd project"))
    done = hpc("submit", "--json", "job.sbatch", *LOCAL, cwd=here)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["run_dir"] == str(here / "runs" / "flowers")
    assert done.stderr.startswith(f"cd {here}/project && {HPC} submit ")
    assert f"starts in {here}/runs/flowers/code" in done.stderr


FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b" \n\n", "empty does not begin with #!/bin/bash"),
    "binary": (b"\x7fELF\0\0", "binary does not begin with #!/bin/bash"),
    "latin": (b"#!/bin/bash\n# \xe9\npython train.py\n", "latin is not a text file: give a batch script"),
    "dos": (b"#!/bin/bash\r\npython train.py\r\n", "dos has DOS line breaks (CRLF), which sbatch refuses: type sed"),
    "python": (b"#!/usr/bin/env python3\nprint(1)\n", "python is a Python script: put -- before it: hpc submit --"),
    "tcsh": (b"#!/bin/tcsh\npython train.py\n", "tcsh is a script for tcsh: hpc submit reads Bash alone"),
    "bare": (b"python train.py\n", "bare does not begin with #!/bin/bash, so sbatch would refuse it"),
    "broken": (b"#!/bin/bash\nif true; then\n", "broken is not valid Bash (line 3: syntax error"),
    "idle": (b"#!/bin/bash\n#SBATCH -N1\n", "idle: no line starts a training: write srun python train.py"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_file_that_is_no_batch_script_of_a_training_is_refused_in_one_line(here: Path, name: str) -> None:
    data, expected = FILES[name]
    (here / name).write_bytes(data)
    assert refused(here, name).startswith(f"hpc submit: {expected}")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("jop.sbatch", "there is no batch script jop.sbatch: did you mean job.sbatch?"),
        (".", ". is not a text file: give a batch script"),
        ("train.py", "put -- before train.py: -- train.py"),
        ("train.py --foo 1", "put -- before train.py: -- train.py --foo 1"),
        ("--nodes 2 train.py", "put -- before train.py: --nodes 2 -- train.py"),
        ("job.sbatch -- train.py", "job.sbatch and -- train.py are both given: leave out -- and what follows"),
        ("job.sbatch --nodse 2", "there is no flag --nodse: did you mean --nodes?"),
        ("job.sbatch other.sbatch", "unexpected argument: other.sbatch"),
    ],
)
def test_wrong_command_line_is_refused_in_one_line(here: Path, arguments: str, expected: str) -> None:
    assert refused(here, *arguments.split()).startswith(f"hpc submit: {expected}")


def test_flag_of_the_classifier_is_refused(here: Path) -> None:
    done = hpc("submit", "job.sbatch", "--lr", "0.1", cwd=here)
    assert done.returncode == 2
    assert "--lr is a flag of the image classifier" in done.stderr.splitlines()[-1]


def test_python_is_that_of_the_environment_which_the_file_activates(here: Path) -> None:
    own = here / "env" / "bin"
    own.mkdir(parents=True)
    (own / "python").symlink_to(sys.executable)
    (own / "activate").write_text(f"export PATH={own}:$PATH\n")
    (here / "job.sbatch").write_text(JOB.replace("echo start", "source env/bin/activate\nmodule load gcc"))
    done = hpc("submit", "job.sbatch", *LOCAL, cwd=here)
    assert f" --python {own}/python " in done.stdout.splitlines()[0]
    assert "hpc submit: warning: line 5: 'module load gcc' fails on this machine" in done.stderr
