"""The demo: train a digit classifier on all ranks, and check the result."""

from .digits import Digits, load_digits
from .result import DemoResult
from .training import train

__all__ = ["DemoResult", "Digits", "load_digits", "train"]
