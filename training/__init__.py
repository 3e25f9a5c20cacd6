"""What runs once per rank: a DDP image-classifier trainer. Knows nothing of Slurm; runs under any torchrun."""
