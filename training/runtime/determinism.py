"""Makes trainings repeatable bit by bit through settings of torch, cuDNN, cuBLAS and NCCL. Runs on every rank.

| setting | `off` | `warn` | `error` |
|---|---|---|---|
| cuDNN: only algorithms that add in a fixed order, no autotuning | no | yes | yes |
| cuBLAS: a fixed workspace | no | yes | yes |
| torch: a kernel that adds in a fixed order, if the operation has one | no | yes | yes |
| an operation without such a kernel | is used | is used, and named | ends the training before its first step |
| NCCL: only rings, no sums in the switches (NVLS) | no | yes | yes |
| the compiler: no autotuning (`training.models.parallel`) | no | yes | yes |

Environment variables that are already set are kept. `--tf32` is a separate choice: TF32 rounds the factors of a float32
matrix product to 10 bits of fraction, but always in the same way. torch always uses TF32 for convolutions on GPUs.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from training.config.train_config import TrainConfig
from training.runtime.compat import use_deterministic_algorithms
from training.runtime.process_group import ProcessGroup
from training.runtime.rank_device import device_name, processor_name

# cuBLAS and NCCL read these when they start. NVLS may add in another order at each call (NVIDIA/nccl#1497); a ring adds
# in the order of the ranks.
_ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_NVLS_ENABLE": "0", "NCCL_ALGO": "Ring"}
_NCCL_NAMES = ("NCCL_ALGO", "NCCL_PROTO", "NCCL_NVLS_ENABLE")
_NO_KERNEL = "does not have a deterministic implementation"


def configure(config: TrainConfig) -> None:
    """Set up torch and its libraries for --deterministic and --tf32. Call this before NCCL reads its settings."""
    repeatable = config.deterministic != "off"
    for name, value in _ENVIRONMENT.items() if repeatable else ():
        os.environ.setdefault(name, value)
    torch.backends.cudnn.benchmark = not repeatable
    torch.backends.cudnn.deterministic = repeatable
    torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
    use_deterministic_algorithms(repeatable, warn_only=config.deterministic == "warn")
    # Nothing here reads uninitialized memory, so filling it would waste time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # made when asked for


def configure_attention(model: nn.Module) -> None:
    """Make torch refuse operations without a deterministic kernel, even with `warn`, if the model has fused attention.

    If torch only warned, it would use a backward pass of fused attention that adds in any order
    (torch.nn.attention.SDPBackend).
    """
    # Modules of timm that use fused attention say so.
    fused = (isinstance(part, nn.MultiheadAttention) or getattr(part, "fused_attn", False) for part in model.modules())
    if torch.are_deterministic_algorithms_enabled() and any(fused):
        use_deterministic_algorithms(True)


@contextmanager
def watch_operations() -> Iterator[list[str]]:
    """Yield a list. After the `with` block, it names the block's operations that have no deterministic kernel here.

    torch's warnings of such operations are not printed, neither here nor later. Other warnings are printed.
    """
    operations: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield operations
    for warning in caught:
        if name := operation_without_kernel(str(warning.message)):
            operations.append(name)
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    operations[:] = sorted(set(operations))
    warnings.filterwarnings("ignore", f".*{_NO_KERNEL}")


def operation_without_kernel(text: str) -> str:
    """Return the operation that has no deterministic kernel according to torch's message `text`, or an empty text."""
    before, separator, _ = text.partition(f" {_NO_KERNEL}")
    return before.split()[-1] if separator else ""


class Numerics:
    """Records the settings, software and devices on which a training's bits depend, and compares them at a restore.

    The order of NCCL's rings is not recorded: it depends on which rank has which GPU, and on the network.
    """

    def __init__(self, config: TrainConfig, group: ProcessGroup) -> None:
        self.values: dict[str, Any] = {
            "deterministic": config.deterministic,
            "tf32": config.tf32,
            "ranks": group.world_size,
            "ranks per node": _distinct(group.all_gather_json(group.rank_info.local_world_size)),
            "device": _distinct(group.all_gather_json(device_name(group.device))),
            "torch": torch.__version__,
        }
        if group.device.type == "cuda":
            self.values |= {
                "CUDA": torch.version.cuda,
                "cuDNN": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]  # torch's own
                "NCCL": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]  # torch's own
                **{name: os.environ.get(name) for name in _NCCL_NAMES},
            }
        else:
            # torch chooses kernels by instruction set; oneDNN and the matrix library choose them by the CPU's model.
            self.values |= {
                "processor": _distinct(group.all_gather_json(processor_name())),
                "instructions": torch.backends.cpu.get_cpu_capability(),
                "ONEDNN_MAX_CPU_ISA": os.environ.get("ONEDNN_MAX_CPU_ISA"),
                "threads": torch.get_num_threads(),
            }
        self.changes: list[str] = []
        """Differences from the restored state, such as `torch 2.11.0 instead of 2.15.0`."""

    def state_dict(self) -> dict[str, Any]:
        """Return the recorded values."""
        return dict(self.values)

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore nothing; list in `changes` how this process's values differ from a saved state's."""
        names = [*self.values, *(name for name in state_dict if name not in self.values)]
        self.changes = [
            f"{name} {self.values.get(name)} instead of {state_dict.get(name)}"
            for name in names
            if self.values.get(name) != state_dict.get(name)
        ]


def _distinct(values: list[Any]) -> Any:
    """Return the value if all ranks have the same one, or else the list of values by rank."""
    return values[0] if all(value == values[0] for value in values) else values
