"""The main job: handwritten digits, learnt by all ranks together, and checked."""

from .digits import Digits, load_digits
from .result import DemoResult
from .training import train

__all__ = ["DemoResult", "Digits", "load_digits", "train"]
