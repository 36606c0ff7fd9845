"""Other libraries beside mpidist: how they are called and compiled, and what is left out."""

import ctypes
import json
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import compare, peers
from mpidist import Unsupported
from mpidist.bench import Workload


def case(collective, nbytes=48, in_place=False):
    return Workload(collective, 1, 3, 0, nbytes, "float32", "sum", in_place).case(nbytes)


@pytest.mark.parametrize(
    ("collective", "count"),
    [
        ("allreduce", 12),
        ("broadcast", 12),
        ("reduce_scatter", 4),
        ("allgather", 4),
        ("alltoall", 4),
    ],
)
def test_arguments_of_a_call_in_c(collective, count):
    given = []
    library = SimpleNamespace(**{f"lib_{collective}": lambda *words: given.append(words)})
    one = case(collective)
    peers.in_c(library, "lib", one)()
    ((x, out, n),) = given
    assert x.value == one.x.ctypes.data and n.value == count
    assert out.value == (None if one.out is None else one.out.ctypes.data)


def test_a_collective_that_a_library_lacks():
    with pytest.raises(Unsupported, match="lib has no alltoall"):
        peers.in_c(SimpleNamespace(), "lib", case("alltoall"))


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_compiled_once_and_anew_after_a_change(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "HERE", tmp_path)
    source, made = tmp_path / "toy.cpp", tmp_path / "toy.so"
    source.write_text(
        'extern "C" void toy_allreduce(float*x, float*y, long n) { y[n - 1] = x[0]; }'
    )
    peers.compiled(tmp_path, "toy", [], [])
    x, y = np.full(3, 7, np.float32), np.zeros(3, np.float32)
    one = SimpleNamespace(collective="allreduce", x=x, out=y, size=2)
    peers.in_c(ctypes.CDLL(str(made)), "toy", one)()
    assert y.tolist() == [0, 0, 7]
    before = made.stat().st_mtime_ns
    peers.compiled(tmp_path, "toy", [], [])
    assert made.stat().st_mtime_ns == before
    source.write_text("this is no C++")
    made.unlink()
    with pytest.raises(peers.Missing, match="cannot be compiled: .*error"):
        peers.compiled(tmp_path, "toy", [], [])


def test_without_a_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(peers.Missing, match="no C\\+\\+ compiler"):
        peers.compiled(tmp_path, "oneccl", [], [])


def test_what_cannot_run_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert peers.main(["--prepare", str(tmp_path / "built")]) == 0
    lacks = json.loads(capsys.readouterr().out)
    assert set(lacks) == set(peers.LIBRARIES)
    assert "pip install oneccl-devel" in lacks["oneCCL"] and "no source" in lacks["DeepSpeed"]


def test_the_first_python_that_has_a_library(tmp_path, monkeypatch, capsys):
    script = tmp_path / "benchmarks" / "peers.py"
    script.parent.mkdir()
    found = {"oneCCL": "no header", "DeepSpeed": "", "gloo": ""}
    script.write_text(f"import json; print(json.dumps({found!r}))")
    monkeypatch.setattr(compare, "ROOT", tmp_path)
    libraries, notes = compare.find_libraries([sys.executable, sys.executable], tmp_path)
    assert libraries == {"DeepSpeed": sys.executable, "gloo": sys.executable}
    assert notes == ["Left out, oneCCL: no header."] and notes[0] in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["allreduce"], ["--libraries", "nccl", "allreduce"]])
def test_bad_options_are_refused(words, capsys):
    with pytest.raises(SystemExit) as ended:
        peers.read_options(words)
    assert ended.value.code == 2 and "expected" in capsys.readouterr().err
