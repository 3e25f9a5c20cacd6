"""The private names of torch that training needs still exist: a test fails with what would break."""

import atexit
import inspect

import pytest
import torch
from torch import _C, nn
from torch._dynamo import config as dynamo
from torch._dynamo import exc
from torch._inductor import config as inductor
from torch.amp import GradScaler
from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.api import PContext
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from training.runtime import compat


@pytest.mark.parametrize(
    ("owner", "name", "use"),
    [
        (torch, "_foreach_copy_", "--ema-decay could not copy the counts of batches"),
        (torch, "_foreach_lerp_", "--ema-decay could not average"),
        (GradScaler("cpu"), "_scale", "saving with --amp fp16 would wait for the GPU"),
        (GradScaler("cpu"), "_growth_tracker", "saving with --amp fp16 would wait for the GPU"),
        (DTensor, "__create_chunk_list__", "the shards of FSDP could not be saved"),
        (_C, "_set_deterministic_algorithms", "--deterministic would not work"),
        (dynamo, "recompile_limit", "--compile would stop compiling after a few shapes"),
        (inductor, "compile_threads", "--compile would start a process per core in each rank"),
        (exc, "ShortenTraceback", "a missing compiler would not be told from a defect"),
        (PContext, "close", "ranks that hang would be given 30 s to end"),
        (api, "logger", "the first restart of ranks would wait for the import of the compiler"),
        (atexit, "_run_exitfuncs", "torchrun would leave temporary directories behind"),
    ],
)
def test_torch_still_has_the_name(owner: object, name: str, use: str) -> None:
    assert hasattr(owner, name), f"torch {torch.__version__} lacks {name}: {use} (training/runtime/compat.py)"


def test_ranks_are_still_ended_with_a_timeout() -> None:
    wanted = ["self", "death_sig", "timeout"]
    assert list(inspect.signature(PContext.close).parameters) == wanted, (
        f"torch {torch.__version__} has changed PContext.close: ranks could not be ended (training/runtime/compat.py)"
    )


def test_workers_of_a_loader_can_still_be_ended() -> None:
    batches = iter(DataLoader([1, 2, 3], num_workers=1, multiprocessing_context="fork"))
    for name in ("_shutdown_workers", "_workers"):
        assert hasattr(batches, name), f"torch {torch.__version__}: no {name}, workers would outlive a training"
    assert not any(worker.is_alive() for worker in compat.stop_workers(batches))


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm])
def test_all_batch_norms_still_have_one_base(kind: type[nn.Module]) -> None:
    assert issubclass(kind, compat.BatchNorm), f"{kind.__name__} would be left out (training/runtime/compat.py)"
