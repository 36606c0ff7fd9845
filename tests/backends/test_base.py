"""What every backend has: members of its own, and the defaults of the others."""

import pytest

from mpidist import SimulatedBackend
from mpidist.backends.base import DEFAULTS, Backend, complete
from mpidist.backends.waiting import poll
from mpidist.errors import Unsupported
from mpidist.testing import check_backend


class Bare:
    """A backend that inherits nothing and defines only the members without a default."""

    def __init__(self, inner):
        self.inner, self.name, self.library = inner, "bare", "bare"
        self.rank, self.size, self.tag_limit = inner.rank, inner.size, inner.tag_limit
        self.board, self.hosts = inner.board, inner.hosts
        self.isend, self.irecv = inner.isend, inner.irecv
        self.isend_short, self.irecv_short = inner.isend_short, inner.irecv_short
        self.abort = inner.abort

    def wait(self, test, deadline, progress=None):
        return poll(test, deadline, progress)

    def split(self, color, key):
        sub = self.inner.split(color, key)
        return None if sub is None else Bare(sub)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_backends_need_not_inherit(size):
    """The members that a class does not define have the defaults of the base class."""
    group = SimulatedBackend.create_group
    assert len(check_backend(lambda: [Bare(b) for b in group(size)])) == 11
    bare = complete(Bare(group(size)[0]))
    defaults = {name: getattr(Backend, name) for name in DEFAULTS}
    for name, value in defaults.items():
        if not callable(value):
            assert getattr(bare, name) == value
    assert bare.bind([]) is None and bare.missing(1) == tuple(range(size))
    error = ValueError("as it is")
    assert bare.translate(error) is error and bare.close() is None
    with pytest.raises(Unsupported, match="rank 0: the bare backend"):
        bare.begin_arrival(1)


def test_own_members_are_kept():
    """A member that a class defines itself is not replaced by a default."""
    bare = Bare(SimulatedBackend.create_group(1)[0])
    bare.crowded, bare.threads = True, True
    assert (complete(bare).crowded, bare.threads, bare.native) == (True, True, None)


@pytest.mark.parametrize("cls", [Bare, SimulatedBackend])
def test_conformance_names_missing_members(cls):
    """A backend without a required member is refused by its name."""
    backend = SimulatedBackend.create_group(1)[0]
    backend = Bare(backend) if cls is Bare else backend
    del backend.hosts
    with pytest.raises(AssertionError, match="attributes, rank 0.*hosts"):
        check_backend(lambda: [backend])
