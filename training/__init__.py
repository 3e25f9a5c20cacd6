"""An image-classifier trainer, which runs once per rank, under any torchrun. It knows nothing of Slurm."""
