"""What torchrun imports for the ranks that are forks of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.cluster import ROOT, tiny_data

# In a process of its own: this one has touched what the test is about.
IMPORTS = """
import json, os, sys
import torch
looked = []
for name in ("_cuda_init", "_cuda_getDeviceCount"):
    setattr(torch._C, name, lambda *_: looked.append(1) or 0)
from training.data import in_memory
from training.config.train_config import TrainConfig
from training.config.classifier_program import ClassifierFlags
from training.runtime.__main__ import preload
names = ClassifierFlags(train=TrainConfig(synthetic=True, **json.loads(sys.argv[1]))).as_program().preload
preload(names)
record = {"missing": [name for name in names if name.partition(":")[0] not in sys.modules], "looked": len(looked)}
record["read"] = sorted(path.name for path in in_memory._kept)
record["threads"] = len(os.listdir("/proc/self/task"))
torch.cuda.is_available()
print(json.dumps([record, len(looked)]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("flags", [{}, {"model": "resnet18", "compile": True}, {"model": "timm:resnet10t"}])
def test_torchrun_prepares_all_without_threads_and_without_a_look_at_the_gpus(
    flags: dict[str, object], tmp_path: Path
) -> None:
    """CUDA cannot be used in a fork of a process that has; and threads do not survive a fork."""
    # numpy starts threads when it is imported; torch would at the first operation on many elements.
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "4"}
    environment.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)
    command = [sys.executable, "-c", IMPORTS, json.dumps(flags), f"--data={tiny_data(tmp_path / 'data')}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True)
    record, looks = json.loads(done.stdout)
    read = sorted(path.name for path in (tmp_path / "data").iterdir())
    assert record == {"missing": [], "looked": 0, "threads": 1, "read": read}
    assert looks > 0 or not torch.backends.cuda.is_built(), "a look at the GPUs would have been seen"
