"""What setup.cfg cannot say: what is compiled, where there is a C compiler."""

from setuptools import Extension, setup

# With CFLAGS=-Ofast GCC would link code that turns subnormal numbers to zero in the whole process.
EXACT = ["-fno-fast-math", "-fno-unsafe-math-optimizations"]

setup(
    ext_modules=[
        Extension(
            "mpidist.shared_memory._compiled",
            [f"mpidist/shared_memory/{name}.c" for name in ("module", "compiled", "steps")],
            depends=["mpidist/shared_memory/compiled.h"],
            extra_compile_args=["-O3", *EXACT],
            extra_link_args=EXACT,
            optional=True,
        )
    ]
)
