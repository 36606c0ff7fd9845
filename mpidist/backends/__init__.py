"""Backends, which move bytes between ranks: MPI, simulated ranks (threads), and none."""
