"""What users bring from sbatch: its options, its variables, and batch scripts."""
