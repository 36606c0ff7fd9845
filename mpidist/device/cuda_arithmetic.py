"""The arithmetic of a reduction on a CUDA device, in CUDA C++: the bits are those of numpy.

Sums, means and products of float16 are accumulated in float32, as on the host.

cupy has its kernels compiled with subnormal numbers of 32 bits taken for zero, which is cheaper and
cannot be switched off by an option: so for them the instructions that keep them are written out.
"""

from __future__ import annotations

OPTIONS = ("-fmad=false",)  # numpy rounds a product before it is added

FUNCTIONS = r"""
template <class T> struct mpidist_wide { typedef T type; };
template <> struct mpidist_wide<float16> { typedef float type; };
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
    "max": "(a != a || mpidist_at_least(a, b)) ? a : b",  # as numpy: of NaN, the first
    "min": "(a != a || mpidist_at_least(b, a)) ? a : b",
    "and": "a & b",
    "or": "a | b",
    "xor": "a ^ b",
}
"""By operation, `a` combined with `b`, of type T or a wider one."""


def fold_source(op: str, sources: int, divisor: int, targets: int) -> str:
    """Give the body of a loop that folds s0, s1, … in this order and stores into t0, t1, …."""
    wide = "typename mpidist_wide<T>::type" if op in ("sum", "mean", "prod") else "T"
    lines = [f"typedef {wide} W; W a = W(s0);"]
    lines += [f"{{ W b = W(s{k}); a = {COMBINES[op]}; }}" for k in range(1, sources)]
    lines += [f"a = mpidist_over(a, W({divisor}));"] * (divisor > 1)
    lines += [f"t{k} = T(a);" for k in range(targets)]
    return " ".join(lines)
