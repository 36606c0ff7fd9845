"""The shipped schedules: only generators, one family a file; modules here find themselves."""

import pkgutil
from importlib import import_module

for _module in pkgutil.iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
