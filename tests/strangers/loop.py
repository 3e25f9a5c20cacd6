import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def fit(inputs, directory, epochs=50):
    """Save after each epoch, and go on from what is saved."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(inputs.shape[1], 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    os.makedirs(directory, exist_ok=True)
    last, start = os.path.join(directory, "last.pt"), 0
    if os.path.exists(last):
        saved = torch.load(last)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["epoch"] + 1
    data = TensorDataset(inputs)
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data), num_workers=1)
    for epoch in range(start, epochs):
        loader.sampler.set_epoch(epoch)
        for (batch,) in loader:
            optimizer.zero_grad()
            loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
        time.sleep(0.2)
        if dist.get_rank() == 0:
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            torch.save(saved, last + ".tmp")
            os.replace(last + ".tmp", last)
        dist.barrier()
        print(f"epoch {epoch} done", flush=True)
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), os.path.join(directory, "final.pt"))
    dist.destroy_process_group()
