"""How an attempt ends, and how the run goes on: requeue, or a new job. Runs on compute nodes."""
