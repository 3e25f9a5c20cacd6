import os

import torch
from loop import fit

data_dir = os.path.join("data", "tiny")
fit(torch.load(os.path.join(data_dir, "train.pt")), "out")
