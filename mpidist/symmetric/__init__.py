"""Memory that the ranks of a node share, and the collectives that take place in it."""

from .heap import Heap, Place
from .kernels import NEEDS, place_of, where
from .shape import check_shape

SYMMETRIC = "symmetric"
STAGED = "staged"
SINGLE_COPY = "single_copy"

__all__ = [
    "NEEDS",
    "SINGLE_COPY",
    "STAGED",
    "SYMMETRIC",
    "Heap",
    "Place",
    "check_shape",
    "place_of",
    "where",
]
