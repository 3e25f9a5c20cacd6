"""`python -m training.pack`: decodes an image folder once. Imports neither torch nor torchvision."""
