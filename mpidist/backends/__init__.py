"""The transports that move bytes: MPI, simulated ranks, none."""
