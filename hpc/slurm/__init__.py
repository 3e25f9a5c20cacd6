"""All communication with Slurm: its commands, its configuration, submitit, new jobs for a run."""
