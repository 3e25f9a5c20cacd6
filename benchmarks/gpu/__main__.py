"""`make gpu`: checks and measures on one NVIDIA GPU what cannot be known without one, in about 20 minutes.

    make gpu
    make gpu GPU_BUNDLE=DIRECTORY        # without a network: what `make gpu-bundle` has put there
    make gpu PARTS="exactness stalls"    # some of the parts

Needs torch, torchvision, timm and what the trainer imports, and Fashion-MNIST. Each part is a process of its own, which
is killed when its time is over. Prints each part's table and at last that of all goals; writes these parts' results to
`benchmarks/results/gpu.json` (`--output`), and keeps those of others. `--small` runs on a CPU within a few minutes. It
says nothing of a GPU: it shows that the scripts work, on a busy machine too: only --minutes ends it. Exit code: 0 if
every part has measured, whatever it found.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
RESULTS = REPOSITORY / "benchmarks" / "results" / "gpu.json"
# What the product and these scripts import beside torch, and what the bundle has of it.
NEEDED = ("numpy", "PIL", "torchvision", "safetensors", "rich", "yaml", "tensorboard")
BUNDLED = (
    "platformdirs", "submitit", "cloudpickle", "msgspec", "xxhash", "simplejpeg",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Part:
    """A module, its arguments, and the seconds that it may take on a GPU."""

    name: str
    module: str
    seconds: float
    arguments: tuple[str, ...] = ()


PARTS = (
    Part(name="launcher", module="launcher", seconds=100),
    Part(name="script", module="script", seconds=120),
    Part(name="two-ranks", module="two_ranks", seconds=120),
    Part(name="exactness", module="exactness", seconds=200),
    Part(name="resnet50", module="throughput", seconds=130, arguments=("resnet50",)),
    Part(name="files", module="throughput", seconds=150, arguments=("resnet50-files",)),
    Part(name="resnet18", module="throughput", seconds=100, arguments=("resnet18-32px",)),
    Part(name="vit", module="throughput", seconds=120, arguments=("vit-b-16",)),
    Part(name="determinism", module="determinism", seconds=240),
    Part(name="stalls", module="stalls", seconds=150),
    Part(name="accuracy", module="accuracy", seconds=240),
)


def main() -> int:
    """Run the parts, and print what they found."""
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(part.name for part in PARTS))
    parser.add_argument("--small", action="store_true", help="the form for a CPU")
    parser.add_argument("--minutes", type=float, default=25.0, help="for all parts together")
    parser.add_argument("--output", type=Path, default=RESULTS, help="the JSON file")
    options = parser.parse_args()
    known = {part.name: part for part in PARTS}
    if unknown := sorted(set(options.parts) - known.keys()):
        parser.error(f"there is no part {', '.join(unknown)}: use some of {', '.join(known)}")
    _find_packages()
    if options.small:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    end, found = time.monotonic() + 60 * options.minutes, []
    with tempfile.TemporaryDirectory() as directory:
        for part in [known[name] for name in options.parts] or PARTS:
            file = Path(directory) / f"{part.name}.json"
            print(f"--- {part.name} ---", flush=True)
            left = end - time.monotonic()
            found.append(_run(part, file, left if options.small else min(part.seconds, left), small=options.small))
    show(found)
    from hpc.base.files import write_json  # noqa: PLC0415  # once the packages are found

    options.output.parent.mkdir(exist_ok=True, parents=True)
    earlier = json.loads(options.output.read_bytes())["parts"] if options.output.exists() else []
    where = {"machine": _machine(), "small": options.small}
    write_json(options.output, {"parts": merge(earlier, [part | where for part in found])})
    return 0 if all(part["problem"] is None for part in found) else 1


def merge(earlier: list[dict[str, Any]], found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the new results and, of the parts that were not run now, the earlier ones."""
    names = {part["part"] for part in found}
    return [*(part for part in earlier if part["part"] not in names), *found]


def _find_packages() -> None:
    """Take from the bundle what this Python lacks; the parts inherit the path."""
    bundle = os.environ.get("GPU_BUNDLE")
    paths = [str(REPOSITORY), *([str(Path(bundle).absolute() / "packages")] if bundle else [])]
    sys.path += paths
    # After Python's own: a newer version that is installed goes before.
    os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), *paths])
    missing = [name for name in (*NEEDED, *BUNDLED) if importlib.util.find_spec(name) is None]
    if missing:
        raise SystemExit(
            f"error: {sys.executable} lacks {', '.join(missing)}: type make gpu-bundle where torchrelay is installed, "
            "bring the directory that it makes, and type make gpu GPU_BUNDLE=DIRECTORY"
        )


def _run(part: Part, file: Path, seconds: float, *, small: bool) -> dict[str, Any]:
    """Run a part, and return what it has written, or why it has not."""
    found: dict[str, Any] = {"part": part.name, "problem": None, "seconds": 0.0, "rows": [], "goals": []}
    if seconds <= 0:
        return found | {"problem": "not run: the time was over"}
    command = [sys.executable, "-m", "benchmarks.gpu.part", part.module, *part.arguments, f"--output={file}"]
    began = time.monotonic()
    # Its own session, so that its workers and ranks end with it.
    process = subprocess.Popen([*command, *(["--small"] if small else [])], start_new_session=True)
    problem = None
    try:
        if code := process.wait(seconds):
            problem = f"failed with exit code {code}"
    except subprocess.TimeoutExpired:
        problem = f"killed after {seconds:.0f} s"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    written = json.loads(file.read_bytes()) if file.exists() else {}
    return found | {"problem": problem, "seconds": round(time.monotonic() - began, 1)} | written


def show(found: list[dict[str, Any]]) -> None:
    """Print the goals of all parts."""
    from benchmarks.harness import table  # noqa: PLC0415  # as above

    rows = []
    for part in found:
        first = {"part": part["part"], "seconds": part["seconds"]}
        if part["problem"]:
            rows.append(first | {"what": part["problem"]})
        for each in part["goals"]:
            met = {True: "yes", False: "NO", None: "not on a GPU"}[each["met"]]
            rows.append(first | {"what": each["name"], "measured": each["value"], "goal": each["goal"], "met": met})
            first = {}
    print(table(rows))


def _machine() -> dict[str, Any]:
    """Return what it ran on."""
    import torch  # noqa: PLC0415  # takes seconds

    from benchmarks.harness import machine  # noqa: PLC0415  # once the packages are found

    on_gpu = torch.cuda.is_available()
    return {
        **machine(("torch", "torchvision", "timm")),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "cuda": torch.version.cuda if on_gpu else None,
        "cudnn": torch.backends.cudnn.version() if on_gpu else None,  # type: ignore[no-untyped-call]  # torch's own
    }


if __name__ == "__main__":
    sys.exit(main())
