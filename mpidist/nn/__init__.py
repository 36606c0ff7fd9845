"""Small layers, losses and optimizers for numpy and cupy, with an explicit backward."""

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
