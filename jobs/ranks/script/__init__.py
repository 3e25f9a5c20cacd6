"""What Torchrelay does in the process of a user's script. Runs on compute nodes."""
