import os
import sys

import torch
import yaml

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from lib.loop import fit

with open("configs/base.yaml") as file:
    config = yaml.safe_load(file)
fit(torch.load("data/numbers.pt"), config["directory"])
