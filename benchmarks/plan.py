"""The launches of the published comparison, in their order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

COLLECTIVES = ("allreduce", "reduce", "reduce_scatter", "allgather", "broadcast", "alltoall")
MAIN = "as launched"  # by `mpidist run`, nothing set
VARIANT_LAUNCHES = 2
_MALLOC = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "8589934592",
    "MALLOC_TOP_PAD_": "268435456",
}
_UCX = {
    "OMPI_MCA_pml": "ucx",
    "OMPI_MCA_pml_ucx_tls": "any",
    "OMPI_MCA_pml_ucx_devices": "any",
}


@dataclass(frozen=True)
class Variant:
    """Settings under which the bare call may be faster; with ``openmpi``, of Open MPI only."""

    name: str
    settings: Mapping[str, str] = field(default_factory=dict)
    openmpi: bool = False


VARIANTS = (
    Variant("UCX", _UCX, openmpi=True),
    Variant("tuned malloc", _MALLOC),
    Variant("UCX, tuned malloc", {**_UCX, **_MALLOC}, openmpi=True),
    # Where ranks share cores `mpidist run` has Open MPI yield; this is the library's own default.
    Variant("no yield", {"OMPI_MCA_mpi_yield_when_idle": "0"}, openmpi=True),
)


@dataclass(frozen=True)
class Scale:
    """The amount of work: sizes as bench reads them, seconds for each size, and launches."""

    sizes: str
    large: str
    budget: float
    variant_budget: float
    launches: int


FULL = Scale("8,128,2K,16K,64K-64M", "64K-64M", 0.25, 0.08, 5)
QUICK = Scale("8,64K,1M", "64K,1M", 0.05, 0.05, 1)
# Beside other libraries: many short launches, so that each state of the machine has some of them.
PEERS = Scale("8,1K,16K,64K,256K,1M,4M", "", 0.15, 0.0, 8)
QUICK_PEERS = Scale("8,64K,1M", "", 0.05, 0.0, 1)
ONLY_IN_PLACE = ("DeepSpeed",)
PEER_COLLECTIVES = ("allreduce", "reduce_scatter", "allgather", "broadcast", "alltoall")


@dataclass(frozen=True)
class Launch:
    """One launch of ``mpidist bench``.

    Attributes
    ----------
    python : str
        Path of the Python whose MPI is measured.
    place : str
        ``"apart"`` or ``"in place"``.
    number : int
        Number of the launch of this configuration, from 1 on.
    """

    python: str
    ranks: int
    place: str
    variant: Variant
    number: int
    scale: Scale

    @property
    def mpi(self) -> str:
        """Name of the virtual environment: its folder."""
        return Path(self.python).absolute().parent.parent.name.strip(".")

    @property
    def name(self) -> str:
        """Name of the launch, for its files."""
        words = (self.mpi, f"{self.ranks}", self.place, self.variant.name, f"{self.number}")
        return "-".join(word.replace(", ", "+").replace(" ", "_") for word in words)

    def words(self) -> list[str]:
        """Return the program that each rank runs, and its arguments."""
        return ["mpidist", *self.bench()]

    def bench(self) -> list[str]:
        """Return the arguments of ``mpidist``."""
        main = self.variant.name == MAIN
        collectives = COLLECTIVES if self.place == "apart" else ("allreduce",)
        sizes = self.scale.sizes if main else self.scale.large
        budget = self.scale.budget if main else self.scale.variant_budget
        candidates = ["--memory", "both", "--algorithms", "auto,symmetric"] if main else []
        return [
            *("bench", *collectives, "--bytes", sizes, "--budget", f"{budget:g}"),
            *(candidates or ["--algorithms", "mpi4py"]),
            *(["--in-place"] if self.place == "in place" else []),
        ]

    def expected_seconds(self) -> float:
        """Return a rough estimate of the time, from a machine with 2 cores."""
        share = 1.0 if self.place == "apart" else 0.2
        work = (18.0 if self.variant.name == MAIN else 5.5) * share * self.ranks / 2
        return 2.5 + work * (1.0 if self.scale.sizes == FULL.sizes else 0.08)


@dataclass(frozen=True)
class PeerLaunch(Launch):
    """One launch of the comparison with other libraries.

    Attributes
    ----------
    library : str
        Library that is measured beside the bare call; if empty, ``mpidist bench`` measures mpidist.
    built : Path, optional
        Folder of the compiled libraries.
    """

    library: str = ""
    built: Path | None = None

    @property
    def name(self) -> str:
        """Name of the launch, for its files."""
        place = self.place.replace(" ", "_")
        return f"{self.mpi}-{self.ranks}-{place}-{self.library or 'peers'}-{self.number}"

    def words(self) -> list[str]:
        """Return the program that each rank runs, and its arguments."""
        apart = self.place == "apart"
        common = [
            *(PEER_COLLECTIVES if apart else ("allreduce",)),
            *("--bytes", self.scale.sizes, "--budget", f"{self.scale.budget:g}"),
            *([] if apart else ["--in-place"]),
        ]
        if self.library:
            program = ["benchmarks/peers.py", "--built", str(self.built)]
            return [*program, "--libraries", self.library, *common]
        own = ["--memory", "both", "--algorithms", "auto", "--no-stream"]
        return ["mpidist", "bench", *common, *own]

    def expected_seconds(self) -> float:
        """Return a rough estimate of the time, from a machine with 2 cores."""
        sizes = self.scale.sizes.count(",") + 1
        return 3.0 + self.scale.budget * sizes * (7.0 if self.place == "apart" else 1.4)


def applies(variant: Variant, vendor: str, ranks: int, cores: int) -> bool:
    """Return whether a variant differs from the settings of ``mpidist run``."""
    if variant.openmpi and vendor != "Open MPI":
        return False
    return variant.name != "no yield" or ranks > cores


def plan_peers(
    pythons: Sequence[str],
    libraries: Mapping[str, str],
    ranks: int,
    scale: Scale,
    built: Path,
) -> list[Launch]:
    """Return the launches of the comparison with other libraries, each a job of its own.

    Parameters
    ----------
    pythons : sequence of str
        Paths of the Pythons, one for each MPI.
    libraries : mapping
        Path of the Python that has a library, by its name.
    ranks : int
        Number of ranks.
    scale : Scale
        Amount of work.
    built : Path
        Folder of the compiled libraries.
    """
    every = [*((python, "") for python in pythons), *((p, name) for name, p in libraries.items())]
    main = Variant(MAIN)
    return [
        PeerLaunch(python, ranks, place, main, number, scale, library, built)
        for number in range(1, scale.launches + 1)
        for python, library in every
        for place in (("in place",) if library in ONLY_IN_PLACE else ("apart", "in place"))
    ]


def plan(
    vendors: Mapping[str, str], ranks: Sequence[int], cores: int, scale: Scale
) -> list[Launch]:
    """Return the launches: the first of every configuration, then the second of every one.

    Parameters
    ----------
    vendors : mapping
        Vendor of the MPI library, by the path of a Python.
    ranks : sequence of int
        Numbers of ranks.
    cores : int
        Number of cores.
    scale : Scale
        Amount of work.
    """
    launches = []
    for number in range(1, scale.launches + 1):
        for python, vendor in vendors.items():
            for n in ranks:
                variants = [Variant(MAIN)]
                if number <= VARIANT_LAUNCHES:
                    variants += [v for v in VARIANTS if applies(v, vendor, n, cores)]
                launches += [
                    Launch(python, n, place, variant, number, scale)
                    for variant in variants
                    for place in ("apart", "in place")
                ]
    return launches
