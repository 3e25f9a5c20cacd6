"""`python -m training.verify_resume`: proves that interrupted and uninterrupted trainings end bit-identical."""
