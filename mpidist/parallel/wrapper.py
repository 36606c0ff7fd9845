"""An object that stands in for a module: its calls and its modes are the module's."""

from __future__ import annotations

from typing import Any, NoReturn

from ..errors import InvalidArgument


class Uncopied:
    """What neither :mod:`copy` nor :mod:`pickle` can make another one of."""

    _comm: Any

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise InvalidArgument(
            f"rank {self._comm.rank}: a {type(self).__name__} holds a communicator and cannot be "
            "copied or pickled: copy a module or state_dict(), or save it with a Checkpoint"
        )


class Wrapper(Uncopied):
    """What a wrapper has of its module.

    Attributes
    ----------
    module : object
        What is wrapped.
    framework : Framework
        Of its parameters.
    reducer : Reducer
        Who is told before each forward.
    """

    module: Any
    framework: Any
    reducer: Any
    _remove: Any = None  # of the module's own hook before forward, if it has hooks

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Call the module."""
        if self._remove is None:
            self.reducer.prepare()
        return self.module(*inputs, **options)

    def __getattr__(self, name: str) -> NoReturn:
        """Say where an attribute is that only the module has."""
        said = f"{type(self).__name__!r} object has no attribute {name!r}"
        if not name.startswith("_") and hasattr(self.__dict__.get("module"), name):
            said += f", its module has: write model.module.{name}"
        raise AttributeError(said, name=name, obj=self)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Call the module's forward."""
        self.reducer.prepare()
        return self.module.forward(*inputs, **options)

    def backward(self, grad: Any) -> Any:
        """Call the module's backward."""
        return self.module.backward(grad)

    def parameters(self) -> list[Any]:
        """List the module's parameters."""
        return list(self.module.parameters())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, or (False) fill them with zeros where they are."""
        for p in self.parameters():
            if set_to_none:
                p.grad = None
            elif p.grad is not None:
                self.framework.clear(p)

    def train(self, mode: bool = True) -> Any:
        """Switch the module to training, or (False) to evaluation."""
        if mode:
            self.module.train()
        else:
            self.module.eval()
        return self

    def eval(self) -> Any:
        """Switch the module to evaluation."""
        return self.train(False)

    @property
    def training(self) -> bool:
        """Whether the module is in training."""
        return self.module.training


def check_arguments(
    module: Any, comm: Any, hook: Any, bucket_bytes: Any, first_bucket_bytes: Any
) -> None:
    """Raise InvalidArgument if a module cannot be wrapped so."""
    check_communicator(comm)
    sizes = {"bucket_bytes": bucket_bytes, "first_bucket_bytes": first_bucket_bytes}
    for argument, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InvalidArgument(
                f"rank {comm.rank}: {argument}={value!r}: allowed are whole numbers > 0"
            )
    if hook is not None and not callable(hook):
        raise InvalidArgument(
            f"rank {comm.rank}: hook={hook!r}: allowed are functions of a bucket, such as "
            "hooks.Compress('float16')"
        )
    if isinstance(hook, type):
        raise InvalidArgument(
            f"rank {comm.rank}: hook={hook.__name__} is a class: allowed are functions of a "
            f"bucket, such as {hook.__name__}()"
        )
    if isinstance(module, Wrapper) or not callable(getattr(module, "parameters", None)):
        raise InvalidArgument(
            f"rank {comm.rank}: module is of {type(module).__name__}: allowed are modules of "
            "PyTorch and mpidist.nn, and other objects with parameters(), not wrapped yet"
        )


def check_communicator(comm: Any) -> None:
    """Raise InvalidArgument for what is none, such as one of mpi4py."""
    if not isinstance(getattr(comm, "rank", None), int) or not hasattr(comm, "allgather_object"):
        raise InvalidArgument(
            f"comm={comm!r}: allowed are communicators, as mpidist.init() gives them"
        )


def check_ready(unready: list[str], rank: int) -> None:
    """Raise InvalidArgument if there are parameters or buffers without a shape."""
    if unready:
        raise InvalidArgument(
            f"rank {rank}: {', '.join(unready)}: no shape yet, as in a lazy module; call the "
            "module once, on an input like those to come, then wrap it"
        )
