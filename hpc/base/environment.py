"""Names of the environment variables that the processes of a run set for each other and for the user's programs.

The docstrings say who sets and who reads each variable. The package
`torchrelay`, which runs in the ranks alone, repeats the names.
Runs everywhere, also in a user's Python, so it uses only the standard library.
"""

# The node agent sets these for the ranks of a user's script, which reads them itself or through torchrelay.
RUN_DIR = "TORCHRELAY_RUN_DIR"
"""Path of the run directory."""
ATTEMPT = "TORCHRELAY_ATTEMPT"
"""Number of the attempt, from 1."""
DATA = "TORCHRELAY_DATA"
"""Path of the run's data on this node; not set if the run has no --data."""
NEXT_CLAIM = "TORCHRELAY_NEXT_CLAIM"
"""Path of the file that exists once the next attempt has begun. A rank for which it exists writes nothing more."""
SNAPSHOTS = "TORCHRELAY_SNAPSHOTS"
"""Path of the directory for snapshots in this node's memory."""
STOP_SIGNAL = "TORCHRELAY_STOP_SIGNAL"
"""Signal that --stop-signal names, such as SIGTERM; not set if the flag is `auto`."""
PROTOCOL = "TORCHRELAY_PROTOCOL"
"""Number of the contract between the agents and torchrelay in the ranks (torchrelay.this_rank). It is never renamed."""
HEARTBEAT = "TORCHRELAY_HEARTBEAT"
"""Path of the file into which a rank writes its heartbeat. The process wrapper of each rank sets this variable."""
CALLBACKS = "TORCHRELAY_CALLBACKS"
"""`off` if the user wants no callback in the Trainer of an unchanged script (jobs.ranks.script.attached_callback)."""

# Our own processes on a node set these for each other.
DEVICE = "TORCHRELAY_DEVICE"
"""Device that the agent tells the ranks of the classifier to use: `cuda` or `cpu` (jobs.ranks.rank_environment)."""
PRELOAD = "TORCHRELAY_PRELOAD"
"""Modules to import before torchrun forks a user's script, joined by commas. The agent sets it, torchrun removes it."""
SECRET = "TORCHRELAY_SECRET"  # noqa: S105 - a name
"""Secret of the attempt, for the rendezvous. The agent sets it, torchrun removes it."""
PARENT = "TORCHRELAY_PARENT"
"""Id of the process that starts a process wrapper: the agent, or torchrun. It sets it, and the wrapper removes it."""
RESTARTS = "TORCHRELAY_RESTARTS"
"""Number of times that the ranks of all nodes have restarted together in this round. torchrun sets it for the ranks."""
PYTHONPATH = "TORCHRELAY_PYTHONPATH"
"""PYTHONPATH after the commands of --setup. The sbatch script saves it; the agent restores it for a user's script."""

# Variables for the commands, and for tests.
CALLED = "TORCHRELAY_CALLED"
"""Command that the user typed, such as `hpc submit`. `hpc` sets it, so that the command's messages can name it."""
FAULT = "TORCHRELAY_FAULT"
"""Fault that the classifier injects (training.runtime.fault_injection). The tests set it."""
