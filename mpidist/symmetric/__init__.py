"""Memory that the ranks of a node share, and the collectives that take place in it."""

from .heap import Heap, Place
from .kernels import NEEDS, place_of

SYMMETRIC = "symmetric"
STAGED = "staged"

__all__ = ["NEEDS", "STAGED", "SYMMETRIC", "Heap", "Place", "place_of"]
