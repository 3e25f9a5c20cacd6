"""How long before its time limit a run stops, and how long its ranks may save. Pure; runs everywhere."""

# Bounds of the default, which is a tenth of the time limit. It suffices for saving, because sbatch may deliver --signal
# up to a minute early, but never late. It costs little training time.
_SHORTEST_DEFAULT_SECONDS, _LONGEST_DEFAULT_SECONDS = 30, 300
# Seconds between the signal and the kill that the requeue itself needs.
REQUEUE_SECONDS = 10.0
# Slurm's default seconds between SIGTERM and SIGKILL.
KILL_WAIT_SECONDS = 30.0


def stop_lead_seconds(limit_minutes: int) -> int:
    """Return the default of --signal-before: seconds before the time limit at which the ranks save and exit."""
    return min(max(limit_minutes * 60 // 10, _SHORTEST_DEFAULT_SECONDS), _LONGEST_DEFAULT_SECONDS)


def save_timeout_seconds(grace_seconds: float) -> float:
    """Return the seconds that ranks may take to save after a SIGTERM, if SIGKILL follows after `grace_seconds`."""
    return max(grace_seconds - REQUEUE_SECONDS, grace_seconds / 2)
