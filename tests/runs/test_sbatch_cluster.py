"""A batch script that works with sbatch starts the same ranks with `hpc submit`: compared on a real Slurm."""

import json
import sys

import pytest
from support.cluster import Site, add_script

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]

# Each rank says who it is, what it was told, and what it finds in its directory.
SAYS = """
import json, os, sys
from pathlib import Path

of_slurm, of_torchrun = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"), ("RANK", "WORLD_SIZE", "LOCAL_RANK")
place = [os.environ[name] for name in (of_slurm if sys.argv[1] == "srun" else of_torchrun)]
exported = {name: os.environ.get(name) for name in ("FLAVOUR", "PLAIN", "THREADS", "PREFIXED", "ACTIVE")}
said = {"place": place, "arguments": sys.argv[1:], "text": Path("text").read_text(), "exported": exported}
Path(sys.argv[2], place[0]).write_text(json.dumps(said))
"""
SRUN = """#!/bin/bash
#SBATCH --job-name=said --output={out}.log
#SBATCH --nodes=2 --ntasks-per-node=2 --gres=gpu:2 # of 4
#SBATCH --cpus-per-task=1 --time=10 --mem-per-cpu=50

source {env}/activate
export FLAVOUR="very good" THREADS=$SLURM_CPUS_PER_TASK
PLAIN=1
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=29501
cd project
echo "starting on $MASTER_ADDR"
PREFIXED=yes srun --label python -u say.py srun {out} "two words" $PLAIN
echo done
"""
TORCHRUN = """#!/bin/bash
#SBATCH -J said -o {out}.log -N1 --gpus-per-node=2 -c 2
#SBATCH -t 0-00:10
cd project
export PATH={env}:$PATH FLAVOUR='$plain'
LAUNCH="torchrun --standalone --nproc-per-node $SLURM_GPUS_ON_NODE"
$LAUNCH say.py torchrun {out} --lr=0.1 2>&1 | tee {out}.txt
"""


@pytest.mark.parametrize("text", [SRUN, TORCHRUN], ids=["srun", "torchrun"])
def test_batch_script_starts_the_same_ranks_as_with_sbatch(ordinary_user: Site, text: str) -> None:
    site = ordinary_user
    add_script(site, "project/say.py", SAYS)
    (site.path / "project" / "text").write_text("of the project")
    env = site.path / "env"
    env.mkdir()
    (env / "activate").write_text(f"export PATH={env}:$PATH ACTIVE=yes\n")
    (env / "python").symlink_to(sys.executable)
    (env / "torchrun").write_text(f"#!{sys.executable}\nfrom torch.distributed.run import main\nmain()\n")
    (env / "torchrun").chmod(0o755)
    said = dict[str, dict[str, str]]()
    for how in ("sbatch", "hpc"):
        out = site.path / how
        out.mkdir()
        out.chmod(0o777)
        (site.path / "job.sbatch").write_text(text.format(out=out, env=env))
        if how == "sbatch":
            site.slurm("sbatch", "--wait", "job.sbatch")
        else:
            site.submit("job.sbatch", "--python", sys.executable).wait_for_state("completed")
        said[how] = {file.name: json.loads(file.read_text().replace(str(out), "OUT")) for file in out.iterdir()}
    assert len(said["sbatch"]) == (4 if text == SRUN else 2)
    assert said["hpc"] == said["sbatch"]
