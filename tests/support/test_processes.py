"""A launch of a test is apart from what other launches have left."""

import tempfile
from pathlib import Path

from tests.support import processes

LEFT = """
left={folder}/ompi.$$; mkdir $left && touch $left/pmix.$(uname -n).tool.$$ || exit 99
exec {command}
"""


def test_launch_with_the_number_of_a_killed_mpiexec_starts(tmp_path):
    """Where Open MPI would look by itself, there are files of an mpiexec with this number."""
    command = " ".join(processes.mpiexec(1, "-c", "'print(7)'"))
    script = LEFT.format(folder=tmp_path, command=command)
    apart = processes.environment(TMPDIR=str(tmp_path))
    done = processes.run(["sh", "-c", script], 60, apart)
    assert done.status == 0 and "7" in done.output, done.output


def test_two_environments_have_folders_of_their_own():
    name = "PRTE_MCA_prte_tmpdir_base"
    one, two = (Path(processes.environment()[name]) for _ in range(2))
    assert one != two and one.parent == two.parent and one.is_dir()
    assert one.is_relative_to(tempfile.gettempdir())
