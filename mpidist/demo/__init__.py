"""The main job: handwritten digits, learnt by all ranks together, and checked."""

from .digits import Digits, load_digits
from .job import train
from .result import DemoResult

__all__ = ["DemoResult", "Digits", "load_digits", "train"]
