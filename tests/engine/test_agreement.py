"""The call sites that MPIDIST_DEBUG=1 names."""

import contextlib
import functools
import sys
import types
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


def test_call_site_beside_pytorch(monkeypatch):
    """PyTorch's frames, and those of its wrappers, are not the user's: here without PyTorch."""
    torch = types.SimpleNamespace(__file__="/p/torch/__init__.py")
    monkeypatch.setitem(sys.modules, "torch", torch)
    found = {"site": agreement.call_site, "wrapped": functools.singledispatch}
    source = "@wrapped\ndef call(_):\n    return site()\n"  # in a frame of functools
    exec(compile(source, "/p/torch/distributed/x.py", "exec"), found)
    exec(compile("def use():\n    return call(0)\n", "/p/torch_user/y.py", "exec"), found)
    assert found["use"]() == "/p/torch_user/y.py:2"
    sites = []
    within = {"site": agreement.call_site, "sites": sites}
    source = "def leave():\n    sites.append(site())\n"
    exec(compile(source, "/p/torch/distributed/z.py", "exec"), within)
    with contextlib.ExitStack() as stack:
        stack.callback(within["leave"])
    assert sites[0].startswith(f"{__file__}:")
