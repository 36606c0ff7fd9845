"""Executors and messages for arrays on a GPU: NCCL, IPC memory, CUDA-aware MPI, staged."""
