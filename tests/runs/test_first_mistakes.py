"""What one types wrong in the first ten minutes, each answered in one line that says what to type.

An old Python is in tests/hpc/test_main.py, a torch without CUDA in tests/hpc/submissions/test_resolve.py.
"""

import re
import shlex

import pytest
from support.cluster import Site, refused

pytestmark = pytest.mark.slurm

TWO = "submit --nodes 2 --gpus-per-node 4"
MISTAKES = {
    "sumbit --nodes 2": "there is no command 'sumbit': did you mean submit?",
    "help sumbit": "there is no command 'sumbit': did you mean submit?",
    "queue": "there is no command 'queue': hpc help lists the commands",
    "submit --node 2": "there is no flag --node: did you mean --nodes?",
    "submit --nodes two": "--nodes is 'two': use a number such as 2",
    "submit --nodes 2 --gpus 4": "there is no flag --gpus: use --nodes and --gpus-per-node instead",
    "submit --nodes 20": "--nodes is 20, but partition gpu has 4: use --nodes 4 or fewer",
    "submit --nodes 2 --gpus-per-node 8": "but partition gpu has 4 per node: use --gpus-per-node 4 or fewer",
    "submit --nodes 2 --gpus-per-node a100:4": "but partition gpu has 4 without a type per node: use --gpus-per-node 4",
    f"{TWO} --cpus-per-gpu 50": "use --cpus-per-gpu 2 or fewer",
    f"{TWO} --partition gpus": "--partition 'gpus' does not exist: use --partition with one of gpu, urgent",
    f"{TWO} --time 5days": "--time is '5days': use a duration such as 90m, 12h or 2d",
    f"{TWO} --runs-dir /tmp/runs": "--runs-dir /tmp/runs is on this node's own disk: use a directory that all",
    # Of sbatch and torchrun.
    f"{TWO} --gres=gpu:4": "use --gpus-per-node 4 or a100:4 for GPUs",
    "submit --nodes 2 --ntasks-per-node 4": "use --gpus-per-node instead",
    "submit -p gpu --job-name x": "there is no flag --job-name: use --name instead",
    "submit --nnodes 2 --nproc-per-node 4 -- train.py": "there is no flag --nnodes: did you mean --nodes?",
    "submit --nodes 2 --nproc-per-node 4 -- train.py": "did you mean --gpus-per-node?",
    # A script.
    f"{TWO} train.py --lr 0.1": "put -- before train.py: --nodes 2 --gpus-per-node 4 -- train.py --lr 0.1",
    f"{TWO} --setup=true train.py": "put -- before train.py: .* --setup=true -- train.py",
    f"{TWO} --": "nothing follows --: give your script and its arguments",
    f"{TWO} -- trian.py": "script 'trian.py' does not exist: did you mean train.py?",
    f"{TWO} -- srun python train.py": "'srun' is not a Python file, .* starts the ranks: type -- train.py",
    f"{TWO} -- ./train.sh": "'./train.sh' is not a Python file: after --, give the file that it runs on each rank",
    f"{TWO} --epochs 3 -- train.py": "--epochs is a flag of the image classifier: leave it out, or pass it to",
    f"{TWO} --python ENV/bin/python -- train.py": "which does not exist: use the interpreter of your environment",
    # A training.
    f"{TWO} --data /no/such": "--data is /no/such, which does not exist: give a directory, fashion-mnist or digits",
    f"{TWO} --data empty": "there are no images in class directories .*: give class directories of images",
    f"{TWO} --model resnet51": "--model is 'resnet51', which is not known: did you mean .*resnet50",
    f"{TWO} --recipe imagenet": "--recipe is 'imagenet', which is not known: use imagenet-resnet50",
    f"{TWO} --optimizer adan": "--optimizer is 'adan': use one of 'sgd', 'adamw', 'adam'",
    f"{TWO} --epochs 1.5": "--epochs is '1.5': expected a whole number",
    f"{TWO} --lr high": "--lr is 'high': expected a number",
    f"{TWO} --config no.yaml": "--config no.yaml cannot be read: .*No such file",
    # After the first run.
    "status nope": "there is no run 'nope'",
    "logs": "missing argument RUN",
    "cancel": "no run is named: type hpc cancel NAME",
    "resume nope": "there is no run 'nope'",
    "report": "no run is named: type hpc report NAME",
    "fork": "no run is named: type hpc fork NAME --name NEW",
    "drill nope preemt": "kind is 'preemt': use one of 'worker-kill', 'node-kill', 'preempt'",
    "supervise --interval": "--interval has no value",
    "sweep": "the sweep has no name: add --name NAME",
    "scaling": "the scaling study has no name: add --name NAME",
}


@pytest.mark.parametrize("typed", MISTAKES)
def test_mistake_is_answered_with_what_to_type(site: Site, typed: str) -> None:
    (site.path / "empty").mkdir()
    for name in ("train.py", "train.sh"):
        (site.path / name).write_text("")
    answer = refused(site, *shlex.split(typed))
    assert re.search(MISTAKES[typed], answer), answer
    assert answer.startswith("hpc"), "it says which program answers"
    assert not (site.path / "runs").exists(), "nothing is left behind"
