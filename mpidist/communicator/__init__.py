"""What users hold: the communicator, and how a job gets one."""
