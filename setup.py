"""What setup.cfg cannot say: the streaming copies are compiled, where there is a compiler."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "mpidist.symmetric._streaming",
            ["mpidist/symmetric/streaming.c"],
            extra_compile_args=["-O3"],
            optional=True,
        )
    ]
)
