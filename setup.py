"""What setup.cfg cannot say: what is compiled, where there is a C compiler."""

import shutil
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

# With CFLAGS=-Ofast GCC would link code that turns subnormal numbers to zero in the whole process.
EXACT = ["-fno-fast-math", "-fno-unsafe-math-optimizations"]

SHIPPED = "mpidist/launcher/shipped"  # what `mpidist slurm` writes


class BuildWithScripts(build_py):
    """Build, with the scripts for SLURM and the program of one of them among the package's data."""

    def run(self) -> None:
        """Build the modules, then copy the scripts beside them."""
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib, SHIPPED)
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree("slurm", target / "slurm", dirs_exist_ok=True, ignore=ignored)
            (target / "examples").mkdir(exist_ok=True)
            shutil.copy("examples/digits.py", target / "examples")


setup(
    cmdclass={"build_py": BuildWithScripts},
    ext_modules=[
        Extension(
            "mpidist.shared_memory._compiled",
            [f"mpidist/shared_memory/{name}.c" for name in ("module", "compiled", "steps")],
            depends=["mpidist/shared_memory/compiled.h"],
            extra_compile_args=["-O3", *EXACT],
            extra_link_args=EXACT,
            optional=True,
        )
    ],
)
