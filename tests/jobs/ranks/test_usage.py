"""What nvidia-smi prints, as `hpc top` reads it."""

from jobs.ranks.usage import GpuUsage, parse_gpus, parse_processes

GPUS = """\
0, GPU-6ea1, NVIDIA H100 80GB HBM3, 97, 40536, 81559
1, GPU-77b2, NVIDIA A100-SXM4-40GB MIG 1g.5gb, [N/A], 1.5, [Not Supported]
"""
PROCESSES = "GPU-6ea1, 4711\nGPU-6ea1, 4712\nGPU-77b2, 4713\n"


def test_gpus_are_parsed() -> None:
    first, second = parse_gpus(GPUS)
    assert first == GpuUsage(
        index=0, uuid="GPU-6ea1", name="NVIDIA H100 80GB HBM3",
        utilization_percent=97.0, memory_used_mib=40536.0, memory_total_mib=81559.0,
    )  # fmt: skip
    assert (second.utilization_percent, second.memory_used_mib, second.memory_total_mib) == (None, 1.5, None)
    assert parse_gpus("") == []


def test_processes_are_parsed() -> None:
    assert parse_processes(PROCESSES) == {"GPU-6ea1": {4711, 4712}, "GPU-77b2": {4713}}
    assert parse_processes("") == {}
