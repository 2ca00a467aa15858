"""The worker process: runs the steps that the scheduler orders."""
