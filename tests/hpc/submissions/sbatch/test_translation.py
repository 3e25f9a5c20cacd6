"""Batch scripts of the shapes that computing centres and libraries document, and the lines that stand for them."""

import shlex
from collections.abc import Mapping
from pathlib import Path

import pytest

from hpc.base.errors import UserError
from hpc.submissions.sbatch.translation import Translation, read_batch_file, translate

FILES = Path(__file__).with_name("sbatch_files")
# The command line for each file; {here} is the directory of the submission, which is also $SCRATCH.
LINES = dict(line.split(": ", 1) for line in (FILES / "lines.txt").read_text().splitlines())


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "project").mkdir()
    return tmp_path


def translated(text: str, here: Path, typed: Mapping[str, object] | None = None) -> Translation:
    file = here / "job.sbatch"
    file.write_text(text)
    environment = {"HOME": "/home/me", "USER": "me", "SCRATCH": str(here), "WORK": "/work/me"}
    return translate(read_batch_file(file), here, environment, typed)


def line_of(translation: Translation, here: Path) -> str:
    line = shlex.join(["hpc", "submit", *translation.words, "--", *translation.launch.script])
    return line if translation.directory == here else f"cd {translation.directory} && {line}"


def setup_of(translation: Translation) -> list[str]:
    return [line.text for line in translation.setup]


def job(*lines: str) -> str:
    return "\n".join(["#!/bin/bash", *lines, ""])


def refused(here: Path, *lines: str) -> str:
    with pytest.raises(UserError) as error:
        translated(job(*lines), here)
    assert "\0" not in str(error.value)
    return str(error.value)


def test_each_file_has_its_line() -> None:
    assert sorted(LINES) == sorted(file.stem for file in FILES.glob("*.sbatch"))
    assert len(LINES) >= 30


@pytest.mark.parametrize("name", sorted(LINES))
def test_file_becomes_its_line(name: str, here: Path) -> None:
    text = (FILES / f"{name}.sbatch").read_text()
    assert line_of(translated(text, here), here) == LINES[name].replace("{here}", str(here))


def test_what_is_left_out_is_named_with_its_line_and_the_reason(here: Path) -> None:
    notes = translated((FILES / "torchrun_c10d.sbatch").read_text(), here).notes
    unused = "nothing but the line of the program uses it"
    assert notes == (
        f"left out line 8: `nodes=( $( scontrol show hostnames $SLURM_JOB_NODELIST ) )`: {unused}",
        f"left out line 9: `nodes_array=($nodes)`: {unused}",
        f"left out line 10: `head_node=${{nodes_array[0]}}`: {unused}",
        f'left out line 11: `head_node_ip=$(srun --nodes=1 --ntasks=1 -w "$head_node" ...`: {unused}',
        "left out line 13: `echo Node IP: $head_node_ip`: changes nothing for the ranks",
        "left out line 16: srun torchrun: hpc submit starts the ranks, one per GPU",
    )


ONE_GPU = "#SBATCH --gpus-per-node=1"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        # What Slurm would not do, or would do in another way.
        (["#SBATCH --partition=$PART", "python train.py"], "line 2: Slurm expands no variables in #SBATCH lines"),
        (["#SBATCH --array=0-9", "python train.py"], "line 2: --array=0-9: job arrays are not supported"),
        (["#SBATCH --partitoin=gpu", "python train.py"], "did you mean partition?"),
        (["#SBATCH --signal=B:USR1@60", "python train.py"], "line 2: --signal=B:USR1@60 does not signal the ranks"),
        (["#SBATCH --ntasks=8 --gpus=8", "srun python train.py"], "line 2: --ntasks=8 leaves the number of nodes"),
        (["#SBATCH --gres=gpu:4", "#SBATCH --gpus-per-node=8", "python train.py"], "ask for other numbers of GPUs"),
        (["#SBATCH hello", "python train.py"], "line 2: 'hello' is not an option"),
        (["#SBATCH -D nowhere", "python train.py"], "line 2: --chdir=nowhere: there is no such directory"),
        (["#SBATCH -N two", "python train.py"], "line 2: --nodes=two: write a number"),
        (["#SBATCH --time=tomorrow", "python train.py"], "line 2: --time is 'tomorrow'"),
        # Numbers of processes that a run cannot have.
        (["#SBATCH --gres=gpu:4", "python train.py"], "line 3: processes per node: 1, GPUs per node: 4"),
        (["#SBATCH -N2 --gres=gpu:1", "python train.py"], "line 3: without srun, the program starts on one"),
        (["#SBATCH --ntasks-per-node=4", "srun torchrun --nproc-per-node 4 t.py"], "line 3: srun starts 4 launchers"),
        # Lines that are more than a list of commands.
        ([ONE_GPU, "for seed in 1 2; do", "python train.py", "done"], "line 3: `for seed in 1 2; do python"),
        ([ONE_GPU, "cat > a.yaml <<END", "it's: 1", "END", "python train.py"], "line 3: a here-document"),
        ([ONE_GPU, "srun python train.py &", "wait"], "line 3: `srun python train.py` runs in the background"),
        ([ONE_GPU, "cat list | python train.py"], "hpc submit does not understand |"),
        ([ONE_GPU, "python train.py || python train.py --resume"], "does not understand || here"),
        ([ONE_GPU, "python train.py < list"], "reads its input from <"),
        ([ONE_GPU, "python a.py", "python b.py"], "line 4: `python b.py` comes after the program of line 3"),
        ([ONE_GPU, "grep -q a100 a && X=64", "python train.py"], "line 3: `grep -q a100 a && X=64` is a condition"),
        ([ONE_GPU, "trap 'scontrol requeue $SLURM_JOB_ID' USR1", "python train.py"], "does not know what trap "),
        ([ONE_GPU, "cd /nonexistent", "python train.py"], "line 3: cd /nonexistent: there is no such directory here"),
        # Programs that a run does not start.
        ([ONE_GPU, "bash train.sh"], "line 3: bash train.sh is a shell script"),
        ([ONE_GPU, "srun --container-image=nvcr.io/x python train.py"], "line 3: srun --container-image"),
        ([ONE_GPU, "srun -w gpu01 python train.py"], "line 3: srun --nodelist=gpu01: a run has one program"),
        ([ONE_GPU, "srun -D project python train.py"], "line 3: srun --chdir=project: leave it out, and write cd proj"),
        ([ONE_GPU, "accelerate launch --config_file a.yaml train.py"], "line 3: --config-file: torchrun starts"),
        ([ONE_GPU, "python -m torch.distributed.launch train.py"], "line 3: torch.distributed.launch passes"),
        ([ONE_GPU, "srun bash -c 'export X=$SLURM_PROCID; python train.py'"], "differs in each task"),
        # Arguments that are known only in the job.
        ([ONE_GPU, "python train.py --out $SLURM_JOB_ID"], "known only in the job: write {run_dir}"),
        ([ONE_GPU, "X=$(date +%s)", "python train.py --seed $X"], "line 4: $(date +%s) is computed while the job runs"),
        ([ONE_GPU, "python train.py --lr $LR"], "line 3: $LR is set neither in the file nor in this shell"),
        ([ONE_GPU, "python train.py $((SLURM_JOB_ID % 100))"], "is computed while the job runs"),
        (
            [ONE_GPU, "export MASTER_ADDR=$(hostname)", "python train.py --dist-url tcp://$MASTER_ADDR:1"],
            "have the script read what torchrun sets (MASTER_ADDR",
        ),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_refused_with_its_line(here: Path, lines: list[str], expected: str) -> None:
    assert expected in refused(here, *lines)


@pytest.mark.parametrize(
    "line",
    [
        "sed 's/lr: .*/lr: 0.1/' base.yaml > run.yaml", "echo 'lr: 0.1' >> run.yaml", "echo a >& run.yaml",
        "> run.yaml echo a", "cat a | sed s/a/b/ > run.yaml", "srun hostname > hosts", "srun hostname | tee hosts",
        "scontrol show hostnames $SLURM_JOB_NODELIST > hosts", "env > env.txt", "srun bash -c 'echo a > b'",
        "sed -i s/a/b/ run.yaml", "srun sed -E -i.bak s/a/b/ run.yaml", "sort -uo a b", "sort a --output=b",
        "awk '{ print > \"b\" }' a", "uniq a b", "printf -v PORT %d 1", "echo ${PORT:=1}",
    ],
)  # fmt: skip
def test_command_that_prints_into_a_file_or_a_variable_is_refused(here: Path, line: str) -> None:
    text = refused(here, ONE_GPU, line, "python train.py")
    assert text.startswith("line 3: ")
    assert "writes a file or sets a variable: type the line as --setup" in text


@pytest.mark.parametrize(
    "line",
    [
        "python -c 'import prep; prep.main(); print(1)'", "python -c 'import prep; print(prep.main())'",
        "python -c 'import prep; print(1)'", "python -c 'print(open(\"a\", \"w\").write(\"b\"))'",
        "nvcc -o kernel kernel.cu", "scontrol update job=$X timelimit=1", "srun python -c 'import prep'",
    ],
)  # fmt: skip
def test_command_that_may_do_more_than_print_is_refused(here: Path, line: str) -> None:
    assert "another line, or type it as --setup" in refused(here, ONE_GPU, "X=1", line, "python train.py")


@pytest.mark.parametrize(
    "line",
    [
        "echo start", "echo start >&2", "nvidia-smi 2>/dev/null", "nvidia-smi &> /dev/null", "nvidia-smi | head -n 9",
        'scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1', "set -euxo pipefail", "set +x 2>/dev/null",
        'python -c "import torch; print(torch.__version__, torch.cuda.is_available())"', "nvcc --version",
        "srun python3 -c 'import sys, torch; print(sys.version); print(torch.cuda.get_device_name(0))'",
        "sed -n 1,3p run.yaml", "sort -k 2 a", "awk '{ print $1 }' a", "printf '%s\n' -v",
    ],
)  # fmt: skip
def test_command_that_only_prints_is_left_out(here: Path, line: str) -> None:
    found = translated(job(ONE_GPU, line, "python train.py"), here)
    assert setup_of(found) == []
    assert "changes nothing for the ranks" in found.notes[0]


@pytest.mark.parametrize(
    ("lines", "setup"),
    [
        (["set -a; source .env; set +a"], ["set -a", "source .env", "set +a"]),
        (["set -a && . ./.env && set +a"], ["set -a && . ./.env && set +a"]),
        (["set -o allexport", "LR=1", "set +o allexport", "X=1"], ["set -o allexport", "LR=1", "set +o allexport"]),
        (["set -eua", "LR=1"], ["set -eua", "LR=1"]),
        ([": ${LR:=1}", "export LR"], [": ${LR:=1}", "export LR"]),
        (["shopt -s nullglob"], ["shopt -s nullglob"]),
    ],
)  # fmt: skip
def test_lines_that_change_the_shell_become_setup(here: Path, lines: list[str], setup: list[str]) -> None:
    assert setup_of(translated(job(ONE_GPU, *lines, "python train.py"), here)) == setup


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["A=1", "B=${A}2", "python train.py --a $A --b=$B '$A' \"x $B\""], ["--a", "1", "--b=12", "$A", "x 12"]),
        (['ARGS="--a 1 --b \'2 3\'"', "python train.py $ARGS"], ["--a", "1", "--b", "'2", "3'"]),
        (["python train.py \\", "  --a=1 \\", "  --b"], ["--a=1", "--b"]),
        (['python train.py --in $SCRATCH/a --x ${NO:-7} "$@"'], ["--in", "{here}/a", "--x", "7"]),
        (["python train.py a#b # c"], ["a#b"]),
        (["set -- --a 1", 'python train.py "$@"'], ["--a", "1"]),
        ([": ${LR:=1}", "shopt -s nullglob", "python train.py $LR none*"], ["1"]),
        (["N=$((2 * 3 + 1))", "python train.py $N"], ["7"]),
        (["A=(--x '1 2')", "A+=(y)", 'python train.py "${A[@]}" ${A[2]%y}z'], ["--x", "1 2", "y", "z"]),
        (["python train.py pro* {a,b} $'a\\tb'"], ["project", "a", "b", "a\tb"]),
    ],
)  # fmt: skip
def test_arguments_are_those_that_bash_passes(here: Path, lines: list[str], expected: list[str]) -> None:
    script = translated(job(ONE_GPU, *lines), here).launch.script
    assert list(script[1:]) == [word.replace("{here}", str(here)) for word in expected]


@pytest.mark.parametrize(
    "word",
    [
        "$(touch ran)", "`touch ran`", "<(touch ran)", "${NO:-$(touch ran)}", "$((1 + $(touch ran)))",
        "$'\\''$(touch ran)", '"a `touch ran`"', "a${PWD#$(touch ran)}b", "${A[$(touch ran)]}",
    ],
)  # fmt: skip
def test_no_command_of_the_script_runs_here(here: Path, word: str) -> None:
    assert "touch ran" in refused(here, ONE_GPU, f"python train.py {word}")
    assert "touch ran" in refused(here, ONE_GPU, f"A={word}", "python train.py $A")
    assert not (here / "ran").exists()


def test_variables_stay_in_setup_only_if_a_later_line_uses_them(here: Path) -> None:
    lines = ("ENV=/envs/a", "LR=0.1", "source $ENV/bin/activate", "python train.py --lr $LR")
    found = translated(job(ONE_GPU, *lines), here)
    assert setup_of(found) == ["ENV=/envs/a", "source $ENV/bin/activate"]


def test_setup_has_the_numbers_of_the_batch_script_and_not_those_of_our_job(here: Path) -> None:
    options = "#SBATCH -N2 --ntasks-per-node=4 --gpus-per-node=4 --cpus-per-task=8"
    lines = ("export A=$SLURM_CPUS_PER_TASK B=${SLURM_NTASKS:-1} C='$SLURM_NTASKS' D=$SLURM_JOB_ID", "srun python t.py")
    found = translated(job(options, *lines), here)
    assert setup_of(found) == ["export A=8 B=8 C='$SLURM_NTASKS' D=$SLURM_JOB_ID"]


@pytest.mark.parametrize(
    ("options", "value", "expected"),
    [
        ("-N2 --gpus=a100:16", "${SLURM_GPUS##*:}", "16"),
        ("-N1 --gpus-per-node=8", "a${SLURM_GPUS:-}b", "ab"),
        ("-N1 --gpus-per-node=a100:8", "$SLURM_GPUS_PER_NODE", "a100:8"),
        ("-N1 --gpus-per-task=1", "$SLURM_GPUS_PER_TASK", "1"),
        ("-N1 --gpus-per-node=8 --cpus-per-gpu=4", "${SLURM_CPUS_PER_GPU-1}", "4"),
        ("-N1 --gpus-per-node=8 --ntasks-per-gpu=1", "$SLURM_NTASKS_PER_GPU", "1"),
        ("-N1 --gres=gpu:8", "$((SLURM_NTASKS * ${SLURM_GPUS_ON_NODE} + (SLURM_GPUS)))", "$((8 * 8 + (0)))"),
        ("-N1 --gres=gpu:8", "${SLURM_GPUS:-${SLURM_CPUS_PER_TASK:-4}}", "4"),
        ("-N2 --gres=gpu:8", "$SLURM_TASKS_PER_NODE", "'8(x2)'"),
        ("-N2 --gres=gpu:8", '"it\'s ${SLURM_TASKS_PER_NODE%(*} $SLURM_TASKS_PER_NODE"', '"it\'s 8 8(x2)"'),
        ("-N1 --gres=gpu:8 -J 'my job'", "$SLURM_JOB_NAME", "'my job'"),
        ("-N1 --gres=gpu:8 -J 'my job'", '"${N:-a$SLURM_JOB_NAME}"', '"${N:-amy job}"'),
        ("-N1 --gres=gpu:8", "${OUT#/${SLURM_NTASKS}}", "${OUT#/8}"),
        ("-N1 --gres=gpu:8", "$SLURM_JOB_NAME", "$SLURM_JOB_NAME"),  # that of our job
    ],
)  # fmt: skip
def test_setup_has_the_variables_that_an_option_sets(here: Path, options: str, value: str, expected: str) -> None:
    found = translated(job(f"#SBATCH {options} --ntasks-per-node=8", f"export A={value}", "srun python t.py"), here)
    assert setup_of(found) == [f"export A={expected}"]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["apptainer exec -B /a -B /b,/c i.sif python t.py"], ["export APPTAINER_BIND=/a,/b,/c"]),
        (
            ["srun singularity exec --bind=/a --nv --bind /b i.sif python t.py"],
            ["export APPTAINER_BIND=/a,/b", "export SINGULARITY_BIND=/a,/b"],
        ),
        (
            ["export APPTAINER_BIND=/a", "apptainer exec -B /b i.sif python t.py"],
            ["export APPTAINER_BIND=/a", 'export APPTAINER_BIND=/b"${APPTAINER_BIND:+,$APPTAINER_BIND}"'],
        ),
        (["apptainer exec --nv i.sif python t.py"], []),
    ],
)
def test_container_has_all_directories_that_the_command_binds(
    here: Path, lines: list[str], expected: list[str]
) -> None:
    assert setup_of(translated(job(ONE_GPU, *lines), here)) == expected


def test_lines_after_a_change_of_the_directory_run_there(here: Path) -> None:
    found = translated(job(ONE_GPU, "source env/bin/activate", "cd project", "python train.py"), here)
    assert found.directory == here / "project"
    assert setup_of(found) == [f"cd {here}", "source env/bin/activate", f"cd {here / 'project'}"]


def test_options_after_the_first_command_are_ignored_as_slurm_does(here: Path) -> None:
    found = translated(job(ONE_GPU, "date", "#SBATCH --mem=4G", "python train.py"), here)
    assert "--mem" not in found.words
    assert any("line 4: Slurm ignores #SBATCH --mem=4G after the first command" in note for note in found.notes)


@pytest.mark.parametrize(
    ("options", "command", "cpus"),
    [
        (
            "--ntasks-per-node=16 --gres=gpu:4",
            "torchrun --nproc-per-node 4 t.py",
            "4",
        ),  # tasks that only ask for CPUs
        ("--ntasks-per-node=4 --gres=gpu:4", "srun python t.py", None),
        ("--ntasks-per-node=4 --gres=gpu:4 -c 3", "srun python t.py", "3"),
        ("-N2 --ntasks-per-node=8 --gres=gpu:4 -c 2", "srun -n 2 -c 16 torchrun --nproc-per-node 4 t.py", "4"),
    ],
)
def test_ranks_share_the_cpus_that_the_batch_script_asks_for(
    here: Path, options: str, command: str, cpus: str | None
) -> None:
    words = translated(job(f"#SBATCH {options}", command), here).words
    assert dict(zip(words[::2], words[1::2], strict=True)).get("--cpus-per-gpu") == cpus


def test_typed_flags_win_over_those_of_the_file(here: Path) -> None:
    text = job(
        "#SBATCH -N2 --gres=gpu:4 --mem-per-cpu=2G --ntasks-per-node=4 -p slow --mail-type=END", "srun python train.py"
    )
    typed = {"nodes": "4", "partition": "fast", "mem": "64G", "sbatch": ["mail-type=NONE"]}
    assert translated(text, here, typed).words == ["--gpus-per-node", "4"]


def test_script_learns_that_no_line_asks_for_gpus_and_which_cpus_no_rank_gets(here: Path) -> None:
    assert translated(job("python train.py"), here).notes == (
        "no line asks for GPUs: one rank per node uses its CPUs (else type --gpus-per-node N)",
    )
    notes = translated(job("#SBATCH -c 6 --gpus=4", "torchrun --nproc-per-node=4 train.py"), here).notes
    assert notes[0] == "4 ranks cannot share 6 CPUs per node equally: 2 are not asked for"


def test_typed_number_of_gpus_settles_how_many_ranks_a_node_has(here: Path) -> None:
    found = translated(job("#SBATCH --gres=gpu:4", "python train.py"), here, {"gpus-per-node": "1"})
    assert found.words == ["--nodes", "1"]
