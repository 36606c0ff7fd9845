"""Memory that the ranks of a node share, and the collectives that take place in it."""

from .heap import Heap, Place
from .kernels import NEEDS, place_of, where
from .shape import check_shape

SYMMETRIC = "symmetric"
STAGED = "staged"

__all__ = [
    "NEEDS",
    "STAGED",
    "SYMMETRIC",
    "Heap",
    "Place",
    "check_shape",
    "place_of",
    "where",
]
