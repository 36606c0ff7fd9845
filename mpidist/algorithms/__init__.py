"""The shipped algorithms, one family of generators per file; all modules here are imported.

In the docstrings, p is the number of ranks, n the bytes of the whole buffer, lg the logarithm to
base 2, and k the arity of a tree.  "Bytes per rank" are the bytes that one rank sends, and "to its
right" means towards the next higher rank, modulo p.
"""

import pkgutil
from importlib import import_module

for _module in pkgutil.iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
