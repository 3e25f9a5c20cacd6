"""What restoring a checkpoint costs each rank: seconds, and memory of the host.

    torchrun --nproc-per-node 4 -m benchmarks.restore DIRECTORY
    MODEL=vit_l_16 torchrun --nproc-per-node 2 -m benchmarks.restore DIRECTORY

Saves the state of a model with AdamW in a new directory; restores it when started again, in processes whose memory
nothing else has used before, on whatever device there is. Prints a Markdown table of the ranks. Own memory is the peak
of what cannot be reclaimed: without pages of the mapped file, but on CPUs with the optimizer's state, two thirds of it.
"""

import os
import sys
import threading
import time
from pathlib import Path

import torch

from hpc.core.rundir import STATE_TENSORS, RunDir
from training.checkpoint.restore import Restorer
from training.config.train_config import TrainConfig
from training.engine.launch import make_trainer
from training.engine.trainer import Trainer
from training.runtime.determinism import configure
from training.runtime.process_group import connect, disconnect
from training.runtime.run_context import RunContext, rank_info_from

MODEL = os.environ.get("MODEL", "vit_b_16")


def own_megabytes() -> float:
    """This process's anonymous memory."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("RssAnon"))


def save(trainer: Trainer) -> None:
    """Save the state after a step without gradients, which makes the optimizer's tensors."""
    for parameter in trainer.state.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    trainer.state.optimizer.step()
    trainer.state.progress.step = 1
    trainer.checkpoint_writer.save()
    trainer.finish_writing()


def restore(trainer: Trainer) -> tuple[float, float, float]:
    """Seconds, CPU seconds, and the peak of own memory above that before, in megabytes."""
    before, done, seen = own_megabytes(), threading.Event(), [0.0]

    def watch() -> None:
        while not done.wait(0.003):
            seen.append(own_megabytes() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    began, began_cpu = time.monotonic(), time.process_time()
    Restorer(trainer.context, trainer.state, trainer.group, trainer.logger).restore()
    trainer.group.wait_for_device()
    seconds, cpu_seconds = time.monotonic() - began, time.process_time() - began_cpu
    done.set()
    watcher.join()
    return seconds, cpu_seconds, max(seen)


def main() -> None:
    """Save, or measure and print the table on rank 0."""
    config = TrainConfig(data="", synthetic=True, model=MODEL, optimizer="adamw", batch_size=64)
    configure(config)
    group = connect(rank_info_from(os.environ))
    run = RunDir(Path(sys.argv[1]))
    context = RunContext(config=config, run_dir=run, attempt=1, started=time.monotonic())
    trainer = make_trainer(context, group)
    states = group.all_gather_json([path.stat().st_size for path in run.checkpoints.glob(f"*/{STATE_TENSORS}")])[0]
    if not states:
        save(trainer)
    results = group.all_gather_json(restore(trainer)) if states else []
    if group.is_rank_zero and states:
        print(f"{MODEL}, {states[0] / 1e6:,.0f} MB, {group.description}\n")
        print("| rank | seconds | CPU seconds | own memory, MB |\n|---|---|---|---|")
        for rank, (seconds, cpu_seconds, own) in enumerate(results):
            print(f"| {rank} | {seconds:.2f} | {cpu_seconds:.2f} | {own:,.0f} |", flush=True)
    elif group.is_rank_zero:
        print("saved: start it again")
    disconnect()


if __name__ == "__main__":
    main()
