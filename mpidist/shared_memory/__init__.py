"""Memory that the ranks of a node share, and the collectives that take place in it."""

from ..calls.arrays import check_shape
from .heap import Heap, Place
from .in_place import NEEDS, place_of, where

__all__ = [
    "NEEDS",
    "Heap",
    "Place",
    "check_shape",
    "place_of",
    "where",
]
