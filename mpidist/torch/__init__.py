"""Adapters for PyTorch, the optional extra ``mpidist[torch]``."""
