"""Brings rank 0's tuning table to all ranks: other nodes may not have the file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from .errors import ConfigError
from .tuning import TuningTable

VARIABLE = "MPIDIST_TUNING"


def share_tuning(
    backend: Any, given: Any, environ: Mapping[str, str] = os.environ
) -> TuningTable | None:
    """Give rank 0's table on every rank; collective.

    Parameters
    ----------
    backend : MpiBackend
        Closed, on every rank, if there is no table to be had.
    given : path, TuningTable or None
        The argument; that of rank 0 counts.
    environ : mapping
        Where ``MPIDIST_TUNING`` is looked up; it goes before the argument, and ``none`` means no
        table.

    Raises
    ------
    ConfigError
        On every rank alike, if rank 0 cannot read it.
    """
    told: tuple[str, str, str] = ("", "", "")
    if backend.rank == 0:
        told = _read(given, environ)
    error, text, source = backend.comm.bcast(told, 0)
    if error:
        backend.close()
        raise ConfigError(f"rank 0: {error}")
    return TuningTable.from_json(text, source) if text else None


def _read(given: Any, environ: Mapping[str, str]) -> tuple[str, str, str]:
    """Give what is wrong, the document and its name."""
    variable = environ.get(VARIABLE, "").strip()
    argument = f"{VARIABLE}={variable}" if variable else f"tuning={given!r}"
    if variable:
        given = None if variable.lower() == "none" else variable
    try:
        if given is None:
            return "", "", ""
        if isinstance(given, (str, os.PathLike)):
            given = TuningTable.load(given)
        if not isinstance(given, TuningTable):
            return f"{argument}: must be a path or a TuningTable", "", ""
        return "", given.to_json(), given.source
    except ConfigError as error:
        return f"{argument}: {error}", "", ""
