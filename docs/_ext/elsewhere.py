"""A Sphinx extension: inventories of the names of other projects that the pages link to.

Intersphinx normally loads inventories from the projects' sites, so that a build would need the
network, and fail or wait without it.  The pages use a few names only.  They are listed here, and
the build writes their inventories.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

SITES = {
    "python": "https://docs.python.org/3/",
    "numpy": "https://numpy.org/doc/stable/",
    "torch": "https://docs.pytorch.org/docs/stable/",
    "mpi4py": "https://mpi4py.readthedocs.io/en/stable/",
}
# Page, role, what all names of the line begin with, and the names; ``$`` is the whole name.
NAMES = {
    "python": """
        library/exceptions.html exception - RuntimeError TimeoutError TypeError ValueError
        library/stdtypes.html class - bytearray bytes dict list memoryview str tuple
        library/functions.html class - bool float int
        library/functions.html function - callable
        library/constants.html data - None True False
        library/pickle.html module - pickle
        library/stdtypes.html label - bltin-boolean-values
        glossary.html term - iterable iterator sequence mapping generator
        """,
    "numpy": """
        reference/generated/$.html class numpy. ndarray dtype
        reference/generated/$.html function numpy. empty zeros copyto split
        glossary.html term - array_like
        reference/arrays.scalars.html label - arrays.scalars
        """,
    "torch": """
        generated/$.html class torch.nn. Module ModuleList parallel.DistributedDataParallel
        generated/$.html function torch.nn.utils. clip_grad_norm_
        tensors.html class torch. Tensor
        data.html class torch.utils.data. DataLoader distributed.DistributedSampler
        distributed.html module torch. distributed
        distributed.html function torch.distributed. init_process_group get_rank get_world_size
        distributed.html function torch.distributed. all_reduce reduce broadcast gather scatter
        distributed.html function torch.distributed. all_gather_into_tensor all_to_all_single
        distributed.html function torch.distributed. reduce_scatter_tensor barrier new_group
        distributed.html function torch.distributed. monitored_barrier send recv isend irecv
        distributed.html function torch.distributed. broadcast_object_list all_gather_object
        """,
    "mpi4py": """
        reference/$.html class mpi4py.MPI. Comm Request Win Op
        reference/mpi4py.MPI.Comm.html method mpi4py.MPI.Comm. Get_rank Get_size Split Dup Free
        reference/mpi4py.MPI.Comm.html method mpi4py.MPI.Comm. Allreduce Reduce Bcast bcast
        reference/mpi4py.MPI.Comm.html method mpi4py.MPI.Comm. Allgather Allgatherv allgather
        reference/mpi4py.MPI.Comm.html method mpi4py.MPI.Comm. Gather Gatherv Scatter Scatterv
        reference/mpi4py.MPI.Comm.html method mpi4py.MPI.Comm. Reduce_scatter Alltoall Alltoallv
        reference/mpi4py.MPI.Comm.html method mpi4py.MPI.Comm. Reduce_scatter_block Barrier
        reference/mpi4py.MPI.Comm.html method mpi4py.MPI.Comm. Iallreduce Send Recv Isend Irecv
        reference/mpi4py.MPI.Comm.html method mpi4py.MPI.Comm. send recv Sendrecv Abort
        """,
}


def inventory(project: str) -> bytes:
    """Return the inventory of a project in Sphinx's format, version 2."""
    lines = []
    for line in NAMES[project].strip().splitlines():
        page, role, prefix, *names = line.split()
        for name in (prefix.strip("-") + name for name in names):
            anchor = f"{role}-{name}" if role in ("module", "term") else name
            domain = "std" if role in ("label", "term") else "py"
            place = f"{page.replace('$', name)}#{anchor}"
            lines.append(f"{name} {domain}:{role} 1 {place} -\n")
    head = (
        f"# Sphinx inventory version 2\n# Project: {project}\n# Version: \n"
        "# The remainder of this file is compressed using zlib.\n"
    )
    return head.encode() + zlib.compress("".join(sorted(lines)).encode())


def write_inventories(app: Any, config: Any) -> None:
    """Write the inventories, and tell intersphinx where they are."""
    folder = Path(app.outdir).parent / "inventories"
    folder.mkdir(parents=True, exist_ok=True)
    for project, site in SITES.items():
        path = folder / f"{project}.inv"
        path.write_bytes(inventory(project))
        config.intersphinx_mapping[project] = (site, str(path))


def setup(app: Any) -> dict[str, Any]:
    """Write the inventories before intersphinx reads its configuration."""
    app.connect("config-inited", write_inventories, priority=100)
    return {"parallel_read_safe": True}
