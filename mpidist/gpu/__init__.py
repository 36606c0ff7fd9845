"""Collectives and messages of arrays on a GPU: the ways there are, and which is taken."""
