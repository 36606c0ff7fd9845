"""Control variables of the MPI library: real ones of Open MPI and MPICH."""

import pytest
from mpi4py import MPI

from mpidist.backends.control_variables import ControlVariable, library_path
from mpidist.errors import Unsupported

VENDOR, VERSION = MPI.get_vendor()
KNOWN = {
    "Open MPI": ("coll_tuned_allreduce_algorithm", "ignore"),
    "MPICH": ("MPIR_CVAR_ALLREDUCE_INTRA_ALGORITHM", "auto"),
}
needs_known = pytest.mark.skipif(VENDOR not in KNOWN, reason="needs Open MPI or MPICH")


@needs_known
def test_variable_has_the_librarys_names_and_keeps_a_value(comm):
    name, usual = KNOWN[VENDOR]
    variable = ControlVariable(name)
    assert variable.values[usual] == variable.get() == 0
    assert {"recursive_doubling", "ring"} < set(variable.values)
    assert sorted(variable.values.values()) == list(range(len(variable.values)))
    variable.set(variable.values["ring"])
    assert ControlVariable(name).get() == variable.values["ring"]
    variable.set(0)
    assert variable.get() == 0


@needs_known
def test_the_thread_level_stays(comm):
    before = MPI.Query_thread()
    ControlVariable(KNOWN[VENDOR][0]).get()
    assert MPI.Query_thread() == before == MPI.THREAD_MULTIPLE


def test_unknown_variable_is_unsupported(comm):
    with pytest.raises(Unsupported, match="no control variable no_such_thing"):
        ControlVariable("no_such_thing")


def test_library_path_is_a_file_of_the_library(comm):
    with open(library_path(), "rb") as file:
        assert file.read(4) == b"\x7fELF"
