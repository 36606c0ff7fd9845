/* Copies that go round the cache: "non-temporal" or streaming stores.

   A line that is written through the cache is read from memory first, and pushes out another that
   somebody may still need.  Where the result is too long to stay in the cache anyway, both are for
   nothing.  Numpy and the C library have no such copy for the lengths that matter here.

   Source: Intel 64 and IA-32 Architectures Optimization Reference Manual, "Non-temporal Stores". */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

#define LINE 64

/* One function for each width: whole lines are streamed, what is before and behind them is not. */
#define STREAM(NAME, TARGET, VECTOR, LOAD, STORE)                                                  \
    __attribute__((target(TARGET))) static void NAME(char *to, const char *from, size_t lines)     \
    {                                                                                              \
        enum { PARTS = LINE / sizeof(VECTOR) };                                                    \
        for (; lines > 0; lines--, to += LINE, from += LINE) {                                     \
            VECTOR line[PARTS];                                                                    \
            for (int part = 0; part < PARTS; part++)                                               \
                line[part] = LOAD((const void *)(from + part * sizeof(VECTOR)));                   \
            for (int part = 0; part < PARTS; part++)                                               \
                STORE((void *)(to + part * sizeof(VECTOR)), line[part]);                           \
        }                                                                                          \
    }

STREAM(stream_64, "avx512f", __m512i, _mm512_loadu_si512, _mm512_stream_si512)
STREAM(stream_32, "avx", __m256i, _mm256_loadu_si256, _mm256_stream_si256)
STREAM(stream_16, "sse2", __m128i, _mm_loadu_si128, _mm_stream_si128)

int mpidist_stream_width(void)
{
    if (__builtin_cpu_supports("avx512f"))
        return 64;
    return __builtin_cpu_supports("avx") ? 32 : 16;
}

/* Copy `count` bytes, which do not overlap; `width` is what mpidist_stream_width gave, or less.
   The other ranks are told by plain stores that come after: the fence keeps that order. */
void mpidist_stream(uintptr_t target, uintptr_t source, size_t count, int width)
{
    char *to = (char *)target;
    const char *from = (const char *)source;
    size_t before = (LINE - (target & (LINE - 1))) & (LINE - 1), lines;

    if (before > count)
        before = count;
    memcpy(to, from, before);
    lines = (count - before) / LINE;
    if (width >= 64)
        stream_64(to + before, from + before, lines);
    else if (width >= 32)
        stream_32(to + before, from + before, lines);
    else
        stream_16(to + before, from + before, lines);
    _mm_sfence();
    before += lines * LINE;
    memcpy(to + before, from + before, count - before);
}

#else /* no such stores, or none that we know to write */

int mpidist_stream_width(void) { return 0; }

void mpidist_stream(uintptr_t target, uintptr_t source, size_t count, int width)
{
    (void)width;
    memcpy((void *)target, (const void *)source, count);
}

#endif
