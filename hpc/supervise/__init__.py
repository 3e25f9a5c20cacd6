"""`hpc supervise`: watch squeue and keep runs going. Runs on the login node."""
