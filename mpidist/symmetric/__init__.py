"""Memory that the ranks of a node share, and the collectives that take place in it."""

from .heap import Heap, Place
from .kernels import BY_PARTS, NEEDS, place_of

SYMMETRIC = "symmetric"
STAGED = "staged"

__all__ = ["BY_PARTS", "NEEDS", "STAGED", "SYMMETRIC", "Heap", "Place", "place_of"]
