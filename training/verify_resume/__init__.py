"""`python -m training.verify_resume`: proof that an interrupted training ends with the same bits."""
