"""The call sites that MPIDIST_DEBUG=1 names."""

from pathlib import Path

import mpidist
from mpidist.engine import agreement


def test_call_site_beside_the_package():
    """Its name may begin like the package's: mpidist_tools/x.py is named."""
    package = Path(mpidist.__file__).parent
    beside, inside = f"{package}_tools/x.py", str(package / "engine" / "x.py")
    found = {"site": agreement.call_site}
    exec(compile("def call():\n    return site()\n", inside, "exec"), found)
    exec(compile("def use():\n    return call()\n", beside, "exec"), found)
    assert found["use"]() == f"{beside}:2"
