"""Implementation of ``mpidist run``: find the MPI, start the ranks, monitor and report them."""
