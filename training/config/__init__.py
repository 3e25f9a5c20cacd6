"""The training flags and what can be checked without a GPU. Imports neither torch nor torchvision."""
