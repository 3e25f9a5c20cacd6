"""What the agents of one attempt tell each other, and what the head node decides. Runs on compute nodes."""
