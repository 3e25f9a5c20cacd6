"""Submit `torchrun_ddp.py` with submitit, which starts torchrun. Runs on the login node, and once per node.

    rivals/bin/python benchmarks/rivals/submitit_launch.py NODES FOLDER FLAGS...

As submitit's documentation has it: the callable is `Checkpointable`, so that it is submitted again when the job is
preempted or reaches its time limit. Prints the id of the job.
"""

import subprocess
import sys
from pathlib import Path

import submitit


class Torchrun(submitit.helpers.Checkpointable):
    """Runs torchrun on a node; the training resumes from its own checkpoint."""

    def __call__(self, *flags: str) -> None:
        """Wait until torchrun ends. Raises CalledProcessError if it fails."""
        job = submitit.JobEnvironment()
        command = [
            sys.executable, "-m", "torch.distributed.run", f"--nnodes={job.num_nodes}", "--nproc-per-node=1",
            "--rdzv-backend=c10d", f"--rdzv-endpoint={job.hostnames[0]}:29500", f"--rdzv-id={job.job_id}",
            "--max-restarts=100", str(Path(__file__).with_name("torchrun_ddp.py")), *flags,
        ]  # fmt: skip
        subprocess.run(command, check=True)


def main(nodes: str, folder: str, *flags: str) -> None:
    """Submit."""
    executor = submitit.AutoExecutor(folder=folder, cluster="slurm")
    executor.update_parameters(
        name=Path(folder).parent.name, nodes=int(nodes), tasks_per_node=1, gpus_per_node=1, cpus_per_task=1, mem_gb=4,
        timeout_min=240, slurm_partition="gpu", slurm_setup=["export OMP_NUM_THREADS=1"],
    )  # fmt: skip
    print(executor.submit(Torchrun(), *flags).job_id)


if __name__ == "__main__":
    main(*sys.argv[1:])
