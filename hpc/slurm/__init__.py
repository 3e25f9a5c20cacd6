"""Everything that talks to Slurm: its commands, its configuration, submitit, new jobs for a run."""
