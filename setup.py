"""What setup.cfg cannot say: what is compiled, where there is a C compiler."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "mpidist.symmetric._compiled",
            [f"mpidist/symmetric/{name}.c" for name in ("module", "compiled", "steps")],
            depends=["mpidist/symmetric/compiled.h"],
            extra_compile_args=["-O3"],
            optional=True,
        )
    ]
)
