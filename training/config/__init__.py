"""Owns the training flags, and the checks that need no GPU. Imports neither torch nor torchvision."""
