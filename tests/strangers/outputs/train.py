import os
from pathlib import Path

import torch
from loop import fit

with open(f"logs/rank{os.environ['RANK']}.log", "a") as log:
    log.write("begins\n")
weights = Path("results/first/weights")
weights.mkdir(parents=True, exist_ok=True)
fit(torch.randn(64, 4, generator=torch.Generator().manual_seed(0)), weights)
Path(__file__).with_name("done.txt").write_text("done\n")
