"""MSCCL's XML files: read as algorithms, and written from algorithms."""
