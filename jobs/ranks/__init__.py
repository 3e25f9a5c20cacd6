"""This node's torchrun and its ranks: start, watch, stop. Runs on compute nodes."""
