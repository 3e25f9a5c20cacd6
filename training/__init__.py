"""Trains image classifiers. Runs once per rank, under any torchrun, and does not depend on Slurm."""
