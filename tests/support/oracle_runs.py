"""The logs of a check without a script: a training of random arrays, with a planted fault."""

import copy

import numpy as np

from mpidist.oracle.compare import Runs
from mpidist.oracle.log import Imprint, Log, Part, Step
from mpidist.oracle.sketch import fingerprint, row_ids, sketch, sketch_rows

SIZE = 3
COUNT = 4  # samples of a rank in a step
PARAMETERS = {"body.weight": (8, 12), "body.bias": (8,), "head.weight": (5, 8)}


def whole(name, array, rank, how="whole", start=0, shape=None):
    """Return the imprint of an array that is not divided into rows."""
    array = np.asarray(array)
    value = float(array.reshape(-1)[0]) if array.size == 1 else None
    part = Part(*sketch(name, array, start), 0, value)
    dtype = array.dtype.name if array.dtype.kind == "f" else "exact"
    shape = tuple(array.shape if shape is None else shape)
    return Imprint(name, how, dtype, shape, "", {rank: part}, fingerprint(array))


def outputs(name, rows, ids, owners, kind="Linear", trait=""):
    """Return the imprint of a module's outputs, by the ranks that have the samples."""
    sums, squares = sketch_rows(name, rows, ids)
    parts = {
        rank: Part(sums[owners == rank].sum(0), squares[owners == rank].sum(), COUNT)
        for rank in set(owners.tolist())
    }
    return Imprint(name, "rows", "float32", rows.shape[1:], "first", parts, None, kind, trait)


class Training:
    """What N ranks and one process compute in a step, as arrays that a test may change.

    Each is a dict: of a rank's `samples`, of the `outputs` of modules, its `loss`, its `local`
    gradients, and by phase of "start", "gradients", "parameters", "optimizer" and "buffers".
    """

    def __init__(self, seed=0):
        self.random = random = np.random.default_rng(seed)

        def normal(*shape):
            return random.normal(size=shape).astype(np.float32)

        start = {name: normal(*shape) for name, shape in PARAMETERS.items()}
        samples = normal(SIZE * COUNT, 12)
        rows = {"body": samples @ start["body.weight"].T + start["body.bias"]}
        rows["head"] = rows["body"] @ start["head.weight"].T
        losses = normal(SIZE) + 4
        local = [{name: normal(*shape) for name, shape in PARAMETERS.items()} for _ in range(SIZE)]
        mean = {name: sum(each[name] for each in local) / np.float32(SIZE) for name in start}
        after = {
            "start": start,
            "gradients": mean,
            "parameters": {name: start[name] - np.float32(0.1) * mean[name] for name in start},
            "optimizer": {f"{name}.momentum_buffer": mean[name] for name in start},
            "buffers": {"running_mean": normal(8)},
        }
        self.whole = {"samples": samples, "outputs": rows, "loss": losses.mean(), **after}
        self.ranks = []
        for rank in range(SIZE):
            mine = slice(rank * COUNT, (rank + 1) * COUNT)
            part = {name: x[mine] for name, x in rows.items()}
            own = {"samples": samples[mine], "outputs": part, "loss": losses[rank]}
            self.ranks.append(copy.deepcopy({**own, "local": local[rank], **after}))
        self.before = None  # of the step before this one: a dict for each rank, and the reference's
        self.last = 2  # number of the step after it
        self.traits = {}
        self.random_ranks = self.absent = ()
        self.exact = False  # whether the bits of all phases are recorded
        self.facts = {}  # of all ranks

    def keep(self):
        """Let what all have now be the step before, and make other gradients for this one."""
        self.before = copy.deepcopy((self.ranks, self.whole))
        for name, x in self.whole["gradients"].items():
            g = self.random.normal(size=x.shape).astype(np.float32)
            self._set(self.whole, name, g)
            for data in self.ranks:
                if name in data["gradients"]:
                    self._set(data, name, g)

    @staticmethod
    def _set(data, name, g):
        data["gradients"][name] = data["optimizer"][f"{name}.momentum_buffer"] = g
        data["parameters"][name] = data["start"][name] - np.float32(0.1) * g

    def _steps(self, data, before, *arguments):
        """Return the steps of a run: the one with the number 1, or that and the last."""
        if before is None:
            return [self._step(data, *arguments)]
        last = self._step(data, *arguments)
        last.number = self.last
        return [self._step(before, *arguments), last]

    def _step(self, data, rank, owners, noise=0.0):
        """Return a step; each element is changed by about `noise` times itself."""

        def moved(x):
            random = self.random.normal(size=np.shape(x))
            return (x * (1 + noise * random)).astype(x.dtype) if noise else np.asarray(x)

        step = Step(1, stepped=True, sites={"backward": "train.py:7", "step": "train.py:8"})
        ids = row_ids([data["samples"]]) if len(data["samples"]) else np.empty(0, np.uint64)
        step.ids.append(ids)
        step.random = rank in self.random_ranks and len(ids) == COUNT
        for name, rows in data["outputs"].items():
            kind, trait = self.traits.get(name, ("Linear", ""))
            step.put("forward", outputs(name, moved(rows), ids, owners, kind, trait))
        loss = float(moved(np.float32(data["loss"])))
        step.put(
            "forward", Imprint("loss", "loss", parts={rank: Part(np.zeros(1), loss**2, 1, loss)})
        )
        for phase in ("start", "gradients", "parameters", "optimizer", "buffers"):
            for name, x in data[phase].items():
                found = Imprint(name, "whole") if x is None else whole(name, moved(x), rank)
                if phase != "start" and not self.exact:
                    found.hash = None
                step.put(phase, found)
        step.local = {name: whole(name, x, rank) for name, x in data.get("local", {}).items()}
        return step

    def runs(self):
        """Return the runs of a check of this training."""
        past, first = self.before or ([None] * len(self.ranks), None)
        ranks = {
            rank: Log(
                rank,
                self._steps(data, past[rank], rank, np.full(len(data["samples"]), rank)),
                dict(self.facts),
            )
            for rank, data in enumerate(self.ranks)
        }
        for rank in self.absent:
            ranks[rank].steps.clear()
        owners = np.repeat(np.arange(SIZE), COUNT)
        runs = [
            {0: Log(0, self._steps(self.whole, first, 0, owners, noise))} for noise in (0, 0, 1e-7)
        ]
        return Runs(ranks, *runs, copies=False)


class Copied(Training):
    """A reference of one process for each rank, that has its batch and all ranks' gradients."""

    def __init__(self, seed=0):
        super().__init__(seed)
        self.alone = copy.deepcopy(self.ranks)

    def runs(self):
        """Return the runs of a check of this training."""
        runs = []
        for noise in (0, 0, 1e-7):
            steps = (
                self._step(data, rank, np.full(COUNT, rank), noise)
                for rank, data in enumerate(self.alone)
            )
            runs.append({rank: Log(rank, [step]) for rank, step in enumerate(steps)})
        return Runs(super().runs().ranks, *runs, copies=True)


STAGES = (("body", "body.weight", "body.bias", "running_mean"), ("head", "head.weight"))


class Piped(Training):
    """A pipeline of two ranks, the first of which has the samples: a step of 4 microbatches."""

    def __init__(self, seed=0):
        super().__init__(seed)
        self.ranks, self.behind, self.targets, self.shards = [], (), "all", 0
        for held in STAGES:
            data = {key: x for key, x in self.whole.items() if not isinstance(x, dict)}
            for key, found in self.whole.items():
                if isinstance(found, dict):
                    names = [name for name in found if self._of(name) in held]
                    data[key] = {name: found[name] for name in names}
            self.ranks.append(copy.deepcopy(data))

    @staticmethod
    def _of(name):
        return name.removesuffix(".momentum_buffer")

    def runs(self):
        """Return the runs of a check of this training."""
        count, ranks = len(self.whole["samples"]), {}
        for rank, data in enumerate(self.ranks):
            step = self._step(data, rank, np.full(count, rank))
            (ids,) = step.ids
            step.batches = 1 + (rank in self.behind)
            if rank:
                step.ids.clear()
                step.pairs.append(ids if self.targets == "all" else ids + np.uint64(1))
            facts = {"held": frozenset(STAGES[rank]), "microbatches": 4, "leader": 0}
            ranks[rank] = Log(rank, [step], {**facts, "shards": self.shards})
        owners, runs = np.zeros(count, int), []
        for noise in (0, 0, 1e-7):
            step = self._step(self.whole, 0, owners, noise)
            step.pairs.append(step.ids[0])
            runs.append({0: Log(0, [step])})
        return Runs(ranks, *runs, copies=False)
