"""What ``mpidist run`` does: find the MPI, start the ranks, monitor them, report how they ended."""
