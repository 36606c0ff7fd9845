"""Asks another program something, with a deadline."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from ..errors import LaunchError


def ask(command: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Run a program that answers at once, and give what it said.

    Parameters
    ----------
    command : sequence of str
        The program and its arguments.
    seconds : float
        In which it must have answered.

    Raises
    ------
    LaunchError
        If it cannot be started, or does not answer in time.
    """
    try:
        return subprocess.run(
            list(command), capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"{' '.join(command[:2])} has not answered within {seconds:g} s"
        ) from None
    except OSError as error:
        raise LaunchError(f"{command[0]} cannot be started: {error}") from error
