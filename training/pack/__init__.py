"""`python -m training.pack`: decode an image folder once. Imports neither torch nor torchvision."""
