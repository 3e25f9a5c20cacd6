"""`hpc smoke`: measures the devices, disks and network of nodes before the first run."""
