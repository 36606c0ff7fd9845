/* Sums of several arrays into several targets in one pass, and copies; with or without streaming
   stores.

   Numpy sums two arrays at a time into one target, so it reads its own intermediate results again.

   An ordinary store reads the cache line from memory first, and evicts another line.  Both are
   waste if the result is too long to stay in the cache: streaming, or "non-temporal", stores bypass
   it.
   Neither numpy nor the C library uses them for the lengths that matter here.  Only whole lines are
   streamed; the bytes before the first and after the last are stored as usual.  The other ranks are
   notified by plain stores that follow, and the fence keeps that order.

   Source: Intel 64 and IA-32 Architectures Optimization Reference Manual, "Non-temporal Stores". */

#include "compiled.h"

#include <string.h>

/* Threads of a process share it: what one of them loses to another is one sample. */
struct pace mpidist_pace;

#define SLOW 3       /* streaming also costs the reader, who finds the data in memory */
#define TRIAL 1024   /* copies between two trials of streaming stores; in the beginning fewer */
#define ROW 4        /* slow copies in a row: one may have been interrupted */
#define CALM 256     /* fast copies in a row, after which the machine has changed */
#define LEAST 512    /* copies to stream before ordinary stores are tried again, at first */
#define MOST 8192    /* and at most: each try costs a few slow copies */

/* Return whether the next copy is to use streaming stores: that is the way now, or a trial. */
int mpidist_streams_next(struct pace *pace)
{
    int64_t n = pace->copies;

    if (pace->left > 0)
        return 1;
    pace->copies++;
    return n % TRIAL == 0 || (n < TRIAL && (n & (n - 1)) == 0);
}

/* Note the cost of a copy, in ticks a KiB. */
void mpidist_took(struct pace *pace, int streamed, uint64_t cost)
{
    if (streamed) {
        if (!pace->streaming || cost < pace->streaming)
            pace->streaming = cost;
        if (pace->left > 0)
            pace->left--;
        return;
    }
    pace->ordinary = cost;
    if (cost <= SLOW * pace->streaming || !pace->streaming) {
        pace->slow = 0;
        if (++pace->fast >= CALM)
            pace->patience = 0;
        return;
    }
    pace->fast = 0;
    if (++pace->slow < ROW)
        return;
    pace->patience = !pace->patience            ? LEAST
                     : pace->patience < MOST / 2 ? 2 * pace->patience
                                                 : MOST;
    pace->left = pace->patience;
    pace->slow = 0;
}

#ifdef HAS_VECTORS
#include <immintrin.h>

#define LINE 64
#define AT_ONCE 4 /* vectors in a row: the loop over the arrays costs as much as an addition */
#define BLOCK (AT_ONCE * 64)

/* Elements `begin` to `end` (exclusive): sum the sources in their order, divide, store. */
#define SUM_ONE_BY_ONE(NAME, NUMBER)                                                               \
    static void NAME(const struct sum *sum, size_t begin, size_t end)                              \
    {                                                                                              \
        for (size_t at = begin; at < end; at++) {                                                  \
            NUMBER total = ((const NUMBER *)sum->arrays[0])[at];                                   \
            for (int source = 1; source < sum->sources; source++)                                  \
                total += ((const NUMBER *)sum->arrays[source])[at];                                \
            if (sum->divisor)                                                                      \
                total /= (NUMBER)sum->divisor;                                                     \
            for (int target = 0; target < sum->targets; target++)                                  \
                ((NUMBER *)sum->arrays[sum->sources + target])[at] = total;                        \
        }                                                                                          \
    }

/* The same, AT_ONCE vectors at a time; with streaming stores, `begin` is the start of a line. */
#define SUM_BY_VECTOR(NAME, ISA, NUMBER, VECTOR, PREFIX, SUFFIX)                                   \
    __attribute__((target(ISA))) static void NAME(const struct sum *sum, size_t begin, size_t end) \
    {                                                                                              \
        enum { LANES = sizeof(VECTOR) / sizeof(NUMBER) };                                          \
        const VECTOR divisor = PREFIX##_set1_##SUFFIX((NUMBER)sum->divisor);                       \
        for (size_t at = begin; at < end; at += AT_ONCE * LANES) {                                 \
            const NUMBER *from = (const NUMBER *)sum->arrays[0] + at;                              \
            VECTOR total[AT_ONCE];                                                                 \
            for (int v = 0; v < AT_ONCE; v++)                                                      \
                total[v] = PREFIX##_loadu_##SUFFIX(from + v * LANES);                              \
            for (int source = 1; source < sum->sources; source++) {                                \
                from = (const NUMBER *)sum->arrays[source] + at;                                   \
                for (int v = 0; v < AT_ONCE; v++)                                                  \
                    total[v] = PREFIX##_add_##SUFFIX(                                              \
                        total[v], PREFIX##_loadu_##SUFFIX(from + v * LANES));                      \
            }                                                                                      \
            for (int v = 0; v < AT_ONCE && sum->divisor; v++)                                      \
                total[v] = PREFIX##_div_##SUFFIX(total[v], divisor);                               \
            for (int target = 0; target < sum->targets; target++) {                                \
                NUMBER *to = (NUMBER *)sum->arrays[sum->sources + target] + at;                    \
                for (int v = 0; v < AT_ONCE; v++)                                                  \
                    if (sum->streamed)                                                             \
                        PREFIX##_stream_##SUFFIX(to + v * LANES, total[v]);                        \
                    else                                                                           \
                        PREFIX##_storeu_##SUFFIX(to + v * LANES, total[v]);                        \
            }                                                                                      \
        }                                                                                          \
    }

#define COPY_BY_VECTOR(NAME, ISA, VECTOR, LOAD, STORE)                                             \
    __attribute__((target(ISA))) static void NAME(char *to, const char *from, size_t lines)        \
    {                                                                                              \
        for (; lines > 0; lines--, to += LINE, from += LINE)                                       \
            for (size_t at = 0; at < LINE; at += sizeof(VECTOR))                                   \
                STORE((void *)(to + at), LOAD((const void *)(from + at)));                         \
    }

SUM_ONE_BY_ONE(sum_float, float)
SUM_ONE_BY_ONE(sum_double, double)
SUM_BY_VECTOR(sum_float_64, "avx512f", float, __m512, _mm512, ps)
SUM_BY_VECTOR(sum_float_32, "avx", float, __m256, _mm256, ps)
SUM_BY_VECTOR(sum_float_16, "sse2", float, __m128, _mm, ps)
SUM_BY_VECTOR(sum_double_64, "avx512f", double, __m512d, _mm512, pd)
SUM_BY_VECTOR(sum_double_32, "avx", double, __m256d, _mm256, pd)
SUM_BY_VECTOR(sum_double_16, "sse2", double, __m128d, _mm, pd)
COPY_BY_VECTOR(copy_64, "avx512f", __m512i, _mm512_loadu_si512, _mm512_stream_si512)
COPY_BY_VECTOR(copy_32, "avx", __m256i, _mm256_loadu_si256, _mm256_stream_si256)
COPY_BY_VECTOR(copy_16, "sse2", __m128i, _mm_loadu_si128, _mm_stream_si128)

/* Bytes of the widest vector of this processor. */
int mpidist_width(void)
{
    if (__builtin_cpu_supports("avx512f"))
        return 64;
    return __builtin_cpu_supports("avx") ? 32 : 16;
}

/* Bytes from an address to the start of the next cache line, at most `count`. */
static size_t to_line(uintptr_t address, size_t count)
{
    size_t bytes = (LINE - (address & (LINE - 1))) & (LINE - 1);
    return bytes < count ? bytes : count;
}

static void copy_streaming(const struct copy *copy, int width)
{
    char *to = (char *)copy->target;
    const char *from = (const char *)copy->source;
    size_t before = to_line(copy->target, copy->count), lines = (copy->count - before) / LINE;

    memcpy(to, from, before);
    (width >= 64 ? copy_64 : width >= 32 ? copy_32 : copy_16)(to + before, from + before, lines);
    _mm_sfence();
    before += lines * LINE;
    memcpy(to + before, from + before, copy->count - before);
}

static void copy_plainly(const struct copy *copy)
{
    memmove((void *)copy->target, (const void *)copy->source, copy->count);
}

static void copy_measured(const struct copy *copy)
{
    int streamed = mpidist_streams_next(&mpidist_pace);
    uint64_t ticks = __rdtsc();

    if (streamed)
        copy_streaming(copy, mpidist_width());
    else
        copy_plainly(copy);
    mpidist_took(&mpidist_pace, streamed, (__rdtsc() - ticks) * 1024 / copy->count);
}

void mpidist_copy(const struct copy *copy)
{
    if (!copy->width)
        copy_plainly(copy);
    else if (copy->width == MEASURED)
        copy_measured(copy);
    else
        copy_streaming(copy, copy->width);
}

/* Sum all sources and store the result in all targets, in one pass. */
void mpidist_sum(const struct sum *sum)
{
    size_t itemsize = sum->itemsize, begin = 0, end;
    int width = sum->width;

    if (sum->streamed)
        begin = to_line(sum->arrays[sum->sources], sum->count * itemsize) / itemsize;
    end = begin + (sum->count - begin) * itemsize / BLOCK * (BLOCK / itemsize);
    if (itemsize == 4) {
        sum_float(sum, 0, begin);
        (width >= 64 ? sum_float_64 : width >= 32 ? sum_float_32 : sum_float_16)(sum, begin, end);
        sum_float(sum, end, sum->count);
    } else {
        sum_double(sum, 0, begin);
        (width >= 64   ? sum_double_64
         : width >= 32 ? sum_double_32
                       : sum_double_16)(sum, begin, end);
        sum_double(sum, end, sum->count);
    }
    _mm_sfence();
}

#else /* not x86-64: mpidist_width() returns 0, so there are neither sums nor streaming stores */

int mpidist_width(void) { return 0; }
void mpidist_copy(const struct copy *copy)
{
    memmove((void *)copy->target, (const void *)copy->source, copy->count);
}
void mpidist_sum(const struct sum *sum) { (void)sum; }

#endif
