"""Dtypes by their names, those of ml_dtypes too."""

from __future__ import annotations

import numpy as np

from ..errors import Unsupported
from ..operations import is_numpys


def dtype_name(dtype: np.dtype) -> str:
    """Name a dtype so that :func:`find_dtype` finds it."""
    return dtype.str if is_numpys(dtype) else dtype.name


def find_dtype(name: str) -> np.dtype:
    """Give the dtype of a name.

    Raises
    ------
    Unsupported
        If it needs a package that is not there.
    """
    try:
        return np.dtype(name)
    except TypeError:
        pass
    try:
        import ml_dtypes
    except ImportError:
        raise Unsupported(f"dtype {name} needs the package ml_dtypes") from None
    return np.dtype(getattr(ml_dtypes, name))
