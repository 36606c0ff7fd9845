"""Just enough layers with an explicit backward to train, and to test, without a framework."""

from .layers import Linear, ReLU
from .loss import CrossEntropy
from .module import Identity, Module, Parameter, Sequential
from .optim import SGD, Adam

__all__ = [
    "SGD",
    "Adam",
    "CrossEntropy",
    "Identity",
    "Linear",
    "Module",
    "Parameter",
    "ReLU",
    "Sequential",
]
