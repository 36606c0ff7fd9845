"""The communicator, and the start of a job."""
