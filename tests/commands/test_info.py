"""The facts of ``mpidist info`` as lines."""

from mpidist.commands.info import as_text

FACTS = {
    "versions": {"mpidist": "1", "numpy": "2"},
    "mpi": {"vendor": "MPICH", "version": "5", "standard": "4.1", "library": "l"}
    | {"thread_level": "multiple"},
    "ranks": 3,
    "ranks_per_node": [2, 1],
    "hosts": {"a": 2, "b": 1},
    "slurm": None,
    "network": None,
    "cores": {"node": 1, "rank_0": 1, "oversubscribed": True},
    "gpus": [{"name": "H100", "memory": "80 GB"}, {"name": "strange"}],
    "compiled": {"note": "yes"},
    "deadline_s": None,
    "environment": {},
}


def test_as_text_lines():
    assert as_text(FACTS, "") == {
        "MPI": "MPICH 5, standard 4.1",
        "library": "l",
        "thread level": "multiple",
        "ranks": "3 on 2 nodes: 2 + 1",
        "hosts": "a (2), b (1)",
        "cores": "1 for 2 ranks, 1 for rank 0, oversubscribed",
        "GPU": "H100, 80 GB; strange",
        "compiled": "yes",
        "versions": "mpidist 1, numpy 2",
        "deadline": "none",
        "environment": "nothing set",
    }


def test_as_text_allocation_and_network():
    job = {"job": "7", "partition": "", "node_list": "n[1-2]", "cpus": (4, 4)}
    network = {"to": "b", "interface": None, "addresses": ["eth0 10.0.0.1"], "adapters": ["mlx 1"]}
    lines = as_text({**FACTS, "slurm": job, "network": network}, "a state")
    assert lines["SLURM"] == "job 7, partition unknown, 2 nodes n[1-2], cores 4 + 4"
    assert lines["network"] == "eth0 10.0.0.1; mlx 1" and lines["line"] == "a state"
    network = {**network, "interface": "lo", "adapters": []}
    assert as_text({**FACTS, "network": network}, "")["network"].startswith("lo 127.0.0.1")
