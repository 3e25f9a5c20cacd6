"""The agents of one attempt: what they report to each other, and what the head node decides. Runs on compute nodes."""
