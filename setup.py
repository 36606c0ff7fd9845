"""What setup.cfg cannot say: what is compiled, where there is a C compiler."""

import configparser
import re
import shutil
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

# With CFLAGS=-Ofast GCC would link code that turns subnormal numbers to zero in the whole process.
# A product and a sum contracted to one operation are rounded once instead of twice.
EXACT = ["-fno-fast-math", "-fno-unsafe-math-optimizations", "-ffp-contract=off"]

# The compiled module, and so the wheel, serves every Python from 3.10 on; one without a GIL has no
# stable ABI.
STABLE = not sysconfig.get_config_var("Py_GIL_DISABLED")

SHIPPED = "mpidist/launcher/shipped"  # what `mpidist slurm` writes


def described(text: str, source: str = "") -> str:
    """Return the README for a package index, where a link into the checkout leads nowhere.

    Links go to the repository at `source`; without one, their words stay; pictures go with their
    paragraphs, and links in brackets with these.
    """

    def link(match: re.Match) -> str:
        picture, words, target = match.groups()
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        if not source:
            return words
        return f"{picture}[{words}]({source}/{'raw' if picture else 'blob'}/main/{target})"

    if not source:
        local = r"\((?!https?:|#)[^)\s]*\)"
        text = re.sub(rf"^!\[[^\]]*\]{local}(.+\n)+\n", "", text, flags=re.MULTILINE)
        text = re.sub(rf" \(\[[^\]]*\]{local}\)", "", text)
    parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)  # code as it stands
    parts[::2] = [re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]*)\)", link, part) for part in parts[::2]]
    return "".join(parts)


def long_description() -> str:
    """Return the README as the package's metadata have it."""
    settings = configparser.ConfigParser()
    settings.read("setup.cfg")
    urls = settings["metadata"].get("project_urls", "")
    source = dict(re.findall(r"^(\w+) *= *(\S+)$", urls, re.MULTILINE)).get("Source", "")
    return described(Path("README.md").read_text(encoding="utf-8"), source)


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
    long_description=long_description(),
    cmdclass={"build_py": BuildWithScripts},
    ext_modules=[
        Extension(
            "mpidist.shared_memory._functions",
            [
                f"mpidist/shared_memory/{name}.c"
                for name in ("module", "compiled", "digest", "exact", "steps")
            ],
            depends=["mpidist/shared_memory/compiled.h"],
            define_macros=[("Py_LIMITED_API", "0x030A0000")] * STABLE,
            py_limited_api=STABLE,
            extra_compile_args=["-O3", *EXACT],
            extra_link_args=EXACT,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if STABLE else {},
)
