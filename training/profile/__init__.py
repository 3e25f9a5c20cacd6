"""`python -m training.profile`: finds the bottleneck of a training."""
