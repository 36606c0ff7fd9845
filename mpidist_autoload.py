"""What ``import torch`` runs of mpidist (entry point ``torch.backends``): the backend's name only.

``mpidist.torch`` is imported once a program asks for the backend "mpidist".  Not in the package,
which would be imported with every ``import torch``, and would end it where it cannot be imported.
"""

import logging
from typing import Any


class _Name:
    """``torch.distributed.Backend.MPIDIST``, where PyTorch looks the name up, until it does."""

    def __get__(self, _: Any, backend: Any) -> str:
        del backend.MPIDIST  # the import sets it anew
        try:
            import mpidist.torch  # noqa: F401
        except BaseException:  # the next one to ask gets the error too
            backend.MPIDIST = self
            raise
        return backend.MPIDIST  # it is not there yet if that import is what asks


def register() -> None:
    """Have PyTorch import ``mpidist.torch`` when the backend "mpidist" is asked for.

    An exception would end ``import torch``.
    """
    try:
        from torch.distributed import Backend

        if "MPIDIST" not in vars(Backend):
            Backend.MPIDIST = _Name()
            Backend.backend_list.append("mpidist")
    except Exception:
        logging.getLogger("mpidist").debug('the backend "mpidist" has no name', exc_info=True)
