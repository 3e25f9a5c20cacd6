"""`python -m training.profile`: which part of a training is the bottleneck."""
