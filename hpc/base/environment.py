"""The environment variables through which processes of a run inform each other and the user's programs.

This is the contract: it says who sets and who reads each variable. `training.relay`, which users may copy, repeats the
names. Runs everywhere, also in a user's Python: uses the standard library alone.
"""

# The node agent sets these for the ranks of a user's script, which reads them itself or through training.relay.
RUN_DIR = "TORCHRELAY_RUN_DIR"
"""The run directory. `hpc supervise` also sets it for the command of --on-end."""
ATTEMPT = "TORCHRELAY_ATTEMPT"
"""The number of the attempt, from 1."""
DATA = "TORCHRELAY_DATA"
"""The path of the data of --data on this node; not set if there is no --data."""
SNAPSHOTS = "TORCHRELAY_SNAPSHOTS"
"""The directory for snapshots in this node's memory."""
STOP_SIGNAL = "TORCHRELAY_STOP_SIGNAL"
"""The name of the signal of --stop-signal; not set if it is `auto`."""
HEARTBEAT = "TORCHRELAY_HEARTBEAT"
"""The file into which a rank writes its heartbeat. The process wrapper of each rank sets it."""

# Variables between our own processes on a node.
DEVICE = "TORCHRELAY_DEVICE"
"""The agent tells our ranks that they must use a GPU (`cuda`), or none (`cpu`); see training.config.device_choice."""
PRELOAD = "TORCHRELAY_PRELOAD"
"""The agent tells torchrun which modules of a user's script to import before it forks; torchrun removes it."""
SECRET = "TORCHRELAY_SECRET"  # noqa: S105 - a name
"""The agent gives torchrun the attempt's secret, for the rendezvous; torchrun removes it."""
RESTARTS = "TORCHRELAY_RESTARTS"
"""torchrun tells the ranks how often the ranks of all nodes have been restarted together in this round."""
PYTHONPATH = "TORCHRELAY_PYTHONPATH"
"""The PYTHONPATH after --setup. The sbatch script keeps it for the agent, which restores it for a user's script."""

# Variables for the commands, and for tests.
STATE = "TORCHRELAY_STATE"
"""`hpc supervise` tells the command of --on-end how the run ended: `completed` or `failed`."""
REASON = "TORCHRELAY_REASON"
"""`hpc supervise` tells the command of --on-end why the run ended so."""
CALLED = "TORCHRELAY_CALLED"
"""`hpc` tells the module of a verb what the user typed, such as `hpc submit`, for its messages."""
FAULT = "TORCHRELAY_FAULT"
"""The tests tell our trainer which fault to inject (training.runtime.fault_injection)."""
