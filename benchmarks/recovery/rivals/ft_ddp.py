"""`torchrun_ddp.py` with the heartbeats of NVIDIA's resiliency extension, for its `ft_launcher`.

As its usage guide has it: each rank connects to its node's monitor, and sends a heartbeat in each step. The monitor
ends a rank from which it has not heard for `--ft-rank-heartbeat-timeout`, and the launcher restarts the ranks.
"""

from common import arguments
from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient
from torchrun_ddp import train


def main() -> None:
    """Train."""
    monitor = RankMonitorClient()
    monitor.init_workload_monitoring()
    train(arguments(), after_step=monitor.send_heartbeat)
    monitor.shutdown_workload_monitoring()


if __name__ == "__main__":
    main()
