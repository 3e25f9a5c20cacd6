"""A rank imports no more than its training needs: each import would cost seconds at every restart.

A training that compiles nothing imports no compiler, and a stand-in never hides the compiler.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.cluster import ROOT, tiny_data

TRAIN = """
import json, sys
from training.__main__ import main
code = main()
names = "torch.nn.parallel.distributed", "torch._dynamo.utils", "torch._inductor", "torchvision", "bokeh", "pandas"
print(json.dumps([code, [name for name in names if getattr(sys.modules.get(name), "__file__", None)]]))
"""
FALL_BACK = """
import sys, torch
from training.runtime.without_compiler import leave_out_compiler
leave_out_compiler()
weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([weight], lr=0.5)
optimizer.zero_grad()
weight.sum().backward()
optimizer.step()
assert torch.compiler.disable(len)("ab") == torch.compiler.disable()(len)("ab") == 2
assert "torch._inductor" not in sys.modules
%s
assert torch.compile(lambda x: 2 * x + 1, backend="eager")(weight).tolist() == [2.0, 2.0]
assert sys.modules["torch._dynamo"].__file__ and sys.modules["torch._dynamo.utils"].__file__
assert torch._dynamo.config is sys.modules["torch._dynamo.convert_frame"].config
assert torch._dynamo.config.__spec__.loader.path == torch._dynamo.config.__file__
optimizer.step()
assert weight.tolist() == [0.0, 0.0]
"""

FAILED_RANK = """
import sys
from torch.distributed.elastic.multiprocessing import api
from training.runtime.compat import log_failures_without_compiler
log_failures_without_compiler()
try:
    raise ValueError("process 1 terminated with signal SIGKILL")
except ValueError:
    api.logger.exception("failed (exitcode: %s)", -9)
assert "torch._inductor" not in sys.modules
"""


def python(code: str, *arguments: str) -> str:
    """Run this code in a new process, and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "flags",
    [
        ["--model=small-cnn", "--optimizer=adamw", "--ema-decay=0.9", "--clip-grad-norm=1", "--amp=bf16"],
        pytest.param(["--model=timm:resnet10t", "--image-size=32", "--mixup=0.2"], marks=pytest.mark.slow),
    ],
)
def test_training_imports_neither_a_compiler_nor_what_its_model_does_not_need(flags: list[str], tmp_path: Path) -> None:
    data = tiny_data(tmp_path / "data", train=200, test=20)
    printed = python(TRAIN, f"--data={data}", f"--run-dir={tmp_path / 'run'}", "--epochs=1", "--batch-size=8", *flags)
    needed = ["torch.nn.parallel.distributed", *(["torchvision"] if "timm" in flags[0] else [])]
    assert json.loads(printed.splitlines()[-1]) == [0, needed]


@pytest.mark.parametrize("use", ["", "import torch._dynamo.config", "from torch._dynamo.utils import counters"])
def test_compiler_replaces_its_stand_in(use: str) -> None:
    python(FALL_BACK % use)


def test_failed_rank_does_not_make_torchrun_import_the_compiler() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAILED_RANK], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert "failed (exitcode: -9)" in done.stderr
    assert "ValueError: process 1 terminated with signal SIGKILL" in done.stderr
