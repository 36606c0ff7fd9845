"""Memory that the ranks of a node share, and the collectives that take place in it."""

from .heap import Heap, Place
from .kernels import NEEDS, place_of

__all__ = ["NEEDS", "Heap", "Place", "place_of"]
