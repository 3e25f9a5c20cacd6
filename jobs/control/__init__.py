"""The agents of one attempt: their reports to each other, and the head node's decisions. Runs on compute nodes."""
