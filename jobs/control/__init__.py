"""The agents of one attempt: their reports to each other, and the first node's decisions. Runs on compute nodes."""
