"""CUDA kernels for reductions, and stream operations that write and await words."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import cupy

from ..errors import Unsupported

OPTIONS = ("-fmad=false",)  # numpy rounds a product before it is added

# cupy compiles with -ftz=true, by which subnormal numbers of 32 bits become zero: the instructions
# for float are written out, as numpy keeps such numbers.

FUNCTIONS = r"""
struct mpidist_bfloat16 {  // the upper half of a float; cupy has none in all versions
  unsigned short bits;
  __device__ mpidist_bfloat16() {}
  __device__ explicit mpidist_bfloat16(float wide) {
    unsigned int all = __float_as_uint(wide);
    bool nan = (all & 0x7fffffffu) > 0x7f800000u;  // which rounding could make an infinity
    bits = nan ? (all >> 16) & 0x8000u | 0x7fc0u : all + 0x7fffu + (all >> 16 & 1u) >> 16;
  }
  __device__ operator float() const { return __uint_as_float((unsigned int)bits << 16); }
};
template <class T> struct mpidist_wide { typedef T type; };
template <> struct mpidist_wide<float16> { typedef float type; };
template <> struct mpidist_wide<mpidist_bfloat16> { typedef float type; };
template <class T> __device__ T mpidist_add(T a, T b) { return a + b; }
template <class T> __device__ T mpidist_minus(T a, T b) { return a - b; }
template <class T> __device__ T mpidist_times(T a, T b) { return a * b; }
template <class T> __device__ T mpidist_over(T a, T b) { return a / b; }
template <class T> __device__ bool mpidist_at_least(T a, T b) { return a >= b; }

__device__ float mpidist_add(float a, float b) {
  float c; asm("add.rn.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b)); return c;
}
__device__ float mpidist_minus(float a, float b) {
  float c; asm("sub.rn.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b)); return c;
}
__device__ float mpidist_times(float a, float b) {
  float c; asm("mul.rn.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b)); return c;
}
__device__ float mpidist_over(float a, float b) {
  float c; asm("div.rn.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b)); return c;
}
__device__ bool mpidist_at_least(float a, float b) {
  int c;
  asm("{ .reg .pred p; setp.ge.f32 p, %1, %2; selp.s32 %0, 1, 0, p; }"
      : "=r"(c) : "f"(a), "f"(b));
  return c;
}

template <class R> __device__ complex<R> mpidist_add(complex<R> a, complex<R> b) {
  return complex<R>(mpidist_add(a.real(), b.real()), mpidist_add(a.imag(), b.imag()));
}
template <class R> __device__ complex<R> mpidist_times(complex<R> a, complex<R> b) {
  return complex<R>(
      mpidist_minus(mpidist_times(a.real(), b.real()), mpidist_times(a.imag(), b.imag())),
      mpidist_add(mpidist_times(a.real(), b.imag()), mpidist_times(a.imag(), b.real())));
}
template <class R> __device__ complex<R> mpidist_over(complex<R> a, complex<R> n) {
  // Smith's formula for a real divisor, as numpy computes it.
  R zero = R(0), scale = mpidist_over(R(1), n.real());
  return complex<R>(
      mpidist_times(mpidist_add(a.real(), mpidist_times(a.imag(), zero)), scale),
      mpidist_times(mpidist_minus(a.imag(), mpidist_times(a.real(), zero)), scale));
}
"""

COMBINES = {
    "sum": "mpidist_add(a, b)",
    "mean": "mpidist_add(a, b)",
    "prod": "mpidist_times(a, b)",
    "max": "(a != a || mpidist_at_least(a, b)) ? a : b",  # as numpy: the first NaN
    "min": "(a != a || mpidist_at_least(b, a)) ? a : b",
    "and": "a & b",
    "or": "a | b",
    "xor": "a ^ b",
}
"""The CUDA expression that combines `a` with `b`, of type T or a wider one, by operation."""


HALVES = {"float16": "float16", "bfloat16": "mpidist_bfloat16"}
"""The CUDA types of half precision, by dtype."""


def fold_source(op: str, sources: int, divisor: int, targets: int, half: str = "") -> str:
    """Return the CUDA code that combines elements s0, s1, … in this order into t0, t1, ….

    `sources` and `targets` are the numbers of arrays; the result is divided by a `divisor` above 1,
    of half precision (`half` is its dtype) each operand, as on the host: the sum may be too large.
    The code is the body of a loop over the elements, of type T: bfloat16 as its bits.
    """
    kind, exact = HALVES.get(half, "T"), op in ("max", "min", "and", "or", "xor")
    wide = "T" if exact and half != "bfloat16" else f"typename mpidist_wide<{kind}>::type"
    value, back = "W({0})", f"{kind}(a)"
    if half == "bfloat16":
        value, back = f"W(reinterpret_cast<const {kind}&>({{0}}))", f"{kind}(a).bits"
    if half and divisor > 1:
        value = f"mpidist_over({value}, W({divisor}))"
    lines = [f"typedef {wide} W; W a = {value.format('s0')};"]
    lines += [
        f"{{ W b = {value.format(f's{k}')}; a = {COMBINES[op]}; }}" for k in range(1, sources)
    ]
    lines += [f"a = mpidist_over(a, W({divisor}));"] * (divisor > 1 and not half)
    lines += [f"t{k} = {back};" for k in range(targets)]
    return " ".join(lines)


DIGEST_THREADS = 1 << 16  # each adds its sums to the same four words: not one for each word

DIGEST = """
unsigned long long low = 0, high = 0, low_at = 0, high_at = 0;
for (long long k = i; k < words; k += threads) {
  unsigned long long word = 0;
  for (int j = 0; j < 8 / (int)sizeof(T); ++j) {
    long long at = k * (8 / (int)sizeof(T)) + j;
    if (at < count) word |= (unsigned long long)x[at] << (8 * sizeof(T) * j);
  }
  unsigned long long l = word & 0xffffffffull, h = word >> 32;
  low += l; high += h; low_at += l * (k + 1); high_at += h * (k + 1);
}
atomicAdd((unsigned long long *)&sums[0], low);
atomicAdd((unsigned long long *)&sums[1], high);
atomicAdd((unsigned long long *)&sums[2], low_at);
atomicAdd((unsigned long long *)&sums[3], high_at);
"""
"""The CUDA code that adds the digest of the words i, i + threads, … of an array to four sums."""


@lru_cache(maxsize=1)
def digest_kernel() -> Any:
    """Return cupy's kernel of :data:`DIGEST`: x, its length, words, threads, sums; cached."""
    return cupy.ElementwiseKernel(
        "raw T x, int64 count, int64 words, int64 threads",
        "raw uint64 sums",
        DIGEST,
        "mpidist_digest",
        no_return=True,
    )


_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ
_FLUSH = 1 << 30  # CU_STREAM_WAIT_VALUE_FLUSH


def write_word(pointer: int, value: int, stream: int) -> None:
    """Queue the write of a 32-bit word."""
    _queue_word("cuStreamWriteValue32_v2", stream, pointer, value, 0)


def wait_word(pointer: int, value: int, stream: int, flush: bool) -> None:
    """Queue a wait until a 32-bit word is at least `value` (by their signed difference).

    With `flush`, work after the wait sees the writes that other GPUs made before that of the word.
    """
    flags = _AT_LEAST | (_FLUSH if flush else 0)
    _queue_word("cuStreamWaitValue32_v2", stream, pointer, value, flags)


@lru_cache(maxsize=64)
def fold(op: str, sources: int, targets: int, divisor: int, half: str = "") -> Any:
    """Return cupy's kernel that combines arrays s0, s1, … in this order into t0, t1, …; cached.

    The parameters are those of :func:`fold_source`.
    """
    return cupy.ElementwiseKernel(
        ", ".join(f"T s{k}" for k in range(sources)),
        ", ".join(f"T t{k}" for k in range(targets)),
        fold_source(op, sources, divisor, targets, half),
        f"mpidist_{op}{half and '_'}{half}",
        preamble=FUNCTIONS,
        no_return=True,
        options=OPTIONS,
    )


def _queue_word(name: str, stream: int, pointer: int, value: int, flags: int) -> None:
    status = _driver(name)(
        ctypes.c_void_p(stream),
        ctypes.c_uint64(pointer),
        ctypes.c_uint32(value),
        ctypes.c_uint(flags),
    )
    if status:
        raise Unsupported(f"{name}: the driver reports status {status}")


@lru_cache(maxsize=2)
def _driver(name: str) -> Any:
    """Return the function `name` of the CUDA driver; Unsupported if the driver lacks it.

    It is cached, because the look-up costs more than a call.
    """
    try:
        return getattr(ctypes.CDLL("libcuda.so.1"), name)
    except (OSError, AttributeError) as error:
        raise Unsupported(f"the CUDA driver is too old: it has no {name}: {error}") from None
