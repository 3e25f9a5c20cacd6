"""`python -m training.verify_resume`: proof that an interrupted training ends bit-identical to an uninterrupted one."""
