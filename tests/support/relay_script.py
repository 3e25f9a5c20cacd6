"""A small script that uses torchrelay, and the environment that a run gives its ranks."""

from pathlib import Path

from torchrelay import this_rank
from torchrelay.saving.owner import Owner

from hpc.base.environment import ATTEMPT, NEXT_CLAIM, PROTOCOL, RUN_DIR
from hpc.run.events.ledger import claim_file
from hpc.run.rundir import RunDir


class StrictOwner(Owner):
    """A script whose states must all be usable and saved."""

    def warn(self, text: str) -> None:
        """Fail: nothing may go wrong."""
        raise AssertionError(text)


# A model of one rank's own noise: whether random numbers, weights and own objects go on is seen in the last line.
SCRIPT = """
import json, os, sys, time
from torchrelay import report, should_stop, state
import torch
from torch import distributed, nn

steps, rank = int(sys.argv[1]), int(os.environ["RANK"])
distributed.init_process_group("gloo")
torch.manual_seed(7)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
torch.manual_seed(100 + rank)


class Count:
    seen = 0
    def state_dict(self): return {"seen": self.seen}
    def load_state_dict(self, state): self.seen = state["seen"]


count = Count()
with state(snapshot_seconds=0.001, model=model, optimizer=optimizer, schedule=schedule, count=count) as saved:
    stopped = False
    while saved.step < steps:
        optimizer.zero_grad()
        loss = model(torch.randn(16, 4)).square().mean()
        loss.backward()
        optimizer.step()
        schedule.step()
        count.seen += rank + 1
        saved.step += 1
        report(step=saved.step, loss=loss, epoch=0)
        if should_stop():
            stopped = True
            break
        if not os.environ.get("FAST"):
            time.sleep(0.01)
weights = [float(p.double().sum()) for p in model.parameters()]
line = {"step": saved.step, "stopped": stopped, "weights": weights, "seen": count.seen}
with open(os.environ["RESULTS"] + f"/{rank}.jsonl", "a") as file:
    file.write(json.dumps(line) + "\\n")
distributed.destroy_process_group()
"""


def agent_variables(run_dir: Path) -> dict[str, str]:
    """The variables by which an agent tells a rank of the first attempt where to write, and until when."""
    run = RunDir(run_dir)
    run.events.mkdir(parents=True, exist_ok=True)
    own = {ATTEMPT: "1", PROTOCOL: this_rank.PROTOCOL, NEXT_CLAIM: str(claim_file(run, 2))}
    return {RUN_DIR: str(run_dir), **own}
