/* Sums of several arrays into several targets in one pass, and copies; with or without streaming
   stores.  Sums have the bits of numpy, and for bfloat16 those of ml_dtypes.

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
#define LEAST 32     /* copies to stream before ordinary stores are tried again, at first: it may be
                        that four in a row were the first ones in new memory */
#define MOST 8192    /* and at most: each try costs a few slow copies */

/* Return whether the next copy is to use streaming stores: that is the way now, or a trial. */
int mpidist_streams_next(struct pace *pace)
{
    int64_t n = pace->copies;

    if (pace->left > 0)
        return 1;
    pace->copies++;
    return n % TRIAL == 0 || (n < TRIAL && (n & (n - 1)) == 0); /* at first: 0, 1, 2, 4, 8 … */
}

/* Note the cost of a copy, in ticks a KiB. */
void mpidist_took(struct pace *pace, int streamed, uint64_t cost)
{
    if (streamed) {
        /* The fastest of late: one of a few KiB in the cache says little of the long ones. */
        pace->streaming += pace->streaming / 16;
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

/* The sources are added in their order as the type TOTAL, to which a NUMBER widens, and the result
   is narrowed: half precision is added as float, integers with or without sign as unsigned ones,
   which wrap.  A divisor divides each term of half precision (FIRST) or the sum (LAST).  If it is a
   power of two, terms are multiplied by its inverse, which is faster and as exact: up to 2^16 ranks
   no product is rounded. */
enum divides { NEVER, FIRST, LAST };

#define TERM(X) (scales ? (X) * inverse : divides == FIRST ? (X) / divisor : (X))
#define QUOTIENT(X) (divides == LAST ? (X) / divisor : (X))

/* Sum elements `begin` to `end` (exclusive). */
#define SUM_ONE_BY_ONE(NAME, ISA, NUMBER, TOTAL, WIDEN, NARROW, DIVIDES)                           \
    __attribute__((target(ISA))) static void NAME##_1(const struct sum *sum, size_t begin,         \
                                                      size_t end)                                  \
    {                                                                                              \
        const enum divides divides = sum->divisor ? DIVIDES : NEVER;                               \
        const int scales = divides == FIRST && !(sum->divisor & (sum->divisor - 1));               \
        const TOTAL divisor = (TOTAL)sum->divisor;                                                 \
        const TOTAL inverse = (TOTAL)(scales ? 1.0 / sum->divisor : 1);                            \
        for (size_t at = begin; at < end; at++) {                                                  \
            TOTAL total = TERM(WIDEN(((const NUMBER *)sum->arrays[0])[at]));                       \
            for (int source = 1; source < sum->sources; source++)                                  \
                total += TERM(WIDEN(((const NUMBER *)sum->arrays[source])[at]));                   \
            total = QUOTIENT(total);                                                               \
            if (sum->grouping == EXACTLY && total != total) /* never of a whole number */          \
                total = (TOTAL)__builtin_nan("");                                                  \
            for (int target = 0; target < sum->targets; target++)                                  \
                ((NUMBER *)sum->arrays[sum->sources + target])[at] = NARROW(total);                \
        }                                                                                          \
    }

/* The same, AT_ONCE vectors at a time; with streaming stores, `begin` is the start of a line.  A
   vector of half precision widens to two vectors, its PARTS. */
#define SUM_BY_VECTOR(NAME, ISA, WIDTH, NUMBER, TOTAL, PARTS, WIDEN, NARROW, DIVIDES)              \
    __attribute__((target(ISA))) static void NAME##_##WIDTH(const struct sum *sum, size_t begin,   \
                                                            size_t end)                            \
    {                                                                                              \
        typedef TOTAL vector __attribute__((vector_size(WIDTH)));                                  \
        typedef uint32_t bits __attribute__((vector_size(WIDTH)));                                 \
        typedef bits memory __attribute__((aligned(1), may_alias));                                \
        const enum divides divides = sum->divisor ? DIVIDES : NEVER;                               \
        const int scales = divides == FIRST && !(sum->divisor & (sum->divisor - 1));               \
        const vector divisor = (vector){0} + (TOTAL)sum->divisor;                                  \
        const TOTAL inverse = (TOTAL)(scales ? 1.0 / sum->divisor : 1);                            \
        for (size_t at = begin; at < end; at += AT_ONCE * WIDTH / sizeof(NUMBER)) {                \
            const char *from = (const char *)((const NUMBER *)sum->arrays[0] + at);                \
            vector total[AT_ONCE][PARTS];                                                          \
            for (int v = 0; v < AT_ONCE; v++)                                                      \
                for (int part = 0; part < PARTS; part++)                                           \
                    total[v][part] = TERM(WIDEN(from + v * WIDTH, part));                          \
            for (int source = 1; source < sum->sources; source++) {                                \
                from = (const char *)((const NUMBER *)sum->arrays[source] + at);                   \
                for (int v = 0; v < AT_ONCE; v++)                                                  \
                    for (int part = 0; part < PARTS; part++)                                       \
                        total[v][part] += TERM(WIDEN(from + v * WIDTH, part));                     \
            }                                                                                      \
            bits result[AT_ONCE];                                                                  \
            for (int v = 0; v < AT_ONCE; v++) {                                                    \
                total[v][0] = QUOTIENT(total[v][0]);                                               \
                for (int part = 0; sum->grouping == EXACTLY && part < PARTS; part++)               \
                    total[v][part] = ONE_NAN(total[v][part], TOTAL);                               \
                result[v] = (bits)NARROW(total[v]);                                                \
            }                                                                                      \
            for (int target = 0; target < sum->targets; target++) {                                \
                char *to = (char *)((NUMBER *)sum->arrays[sum->sources + target] + at);            \
                for (int v = 0; v < AT_ONCE; v++)                                                  \
                    if (sum->streamed)                                                             \
                        STREAM_##WIDTH(to + v * WIDTH, result[v]);                                 \
                    else                                                                           \
                        *(memory *)(to + v * WIDTH) = result[v];                                   \
            }                                                                                      \
        }                                                                                          \
    }

/* Whatever NaN X is, the one that numpy calls nan: an exact sum does not depend on the order. */
#define ONE_NAN(X, TOTAL)                                                                          \
    ((vector)(((bits)((X) != (X)) & (bits)((vector){0} + (TOTAL)__builtin_nan(""))) |              \
              (~(bits)((X) != (X)) & (bits)(X))))

#define STREAM_16(TO, VECTOR) _mm_stream_si128((void *)(TO), (__m128i)(VECTOR))
#define STREAM_32(TO, VECTOR) _mm256_stream_si256((void *)(TO), (__m256i)(VECTOR))
#define STREAM_64(TO, VECTOR) _mm512_stream_si512((void *)(TO), (__m512i)(VECTOR))
#define ISA_16 "sse2"
#define ISA_32 "avx2,f16c" /* all processors with AVX2 have F16C */
#define ISA_64 "avx512f,avx512bw"

#define SUM_OF(NAME, NUMBER, DIVIDES)                                                              \
    SUM_ONE_BY_ONE(NAME, ISA_16, NUMBER, NUMBER, ITSELF, ITSELF, DIVIDES)                          \
    SUM_BY_VECTOR(NAME, ISA_16, 16, NUMBER, NUMBER, 1, LOADED, ONLY, DIVIDES)                      \
    SUM_BY_VECTOR(NAME, ISA_32, 32, NUMBER, NUMBER, 1, LOADED, ONLY, DIVIDES)                      \
    SUM_BY_VECTOR(NAME, ISA_64, 64, NUMBER, NUMBER, 1, LOADED, ONLY, DIVIDES)
#define ITSELF(X) (X)
#define LOADED(FROM, PART) ((vector) * (const memory *)(FROM))
#define ONLY(TOTAL) TOTAL[0]

SUM_OF(sum_int8, uint8_t, NEVER)
SUM_OF(sum_int16, uint16_t, NEVER)
SUM_OF(sum_int32, uint32_t, NEVER)
SUM_OF(sum_int64, uint64_t, NEVER)
SUM_OF(sum_float32, float, LAST)
SUM_OF(sum_float64, double, LAST)

/* The same, as a tree.  Sums of 1, 2, 4 … sources wait until another of as many is there, so those
   that wait are the ones in the number of sources so far, which is a counter.  7 sources:

       0+1      (0+1)+(2+3)      (0+1+2+3), 4+5      (0+1+2+3) + ((4+5)+6)             */
#define DEPTH 32 /* more than the digits of the number of sources */
#define TREE_OF(NAME, SUFFIX, ISA, NUMBER, VECTOR, STEP, COUNT, LOAD, STORE)                       \
    __attribute__((target(ISA))) static void NAME##_##SUFFIX(const struct sum *sum, size_t begin,  \
                                                             size_t end)                           \
    {                                                                                              \
        const NUMBER divisor = (NUMBER)sum->divisor;                                               \
        for (size_t at = begin; at < end; at += STEP) {                                            \
            VECTOR waiting[DEPTH][COUNT];                                                          \
            int depth = 0;                                                                         \
            for (int source = 0; source < sum->sources; source += 2) {                             \
                VECTOR total[COUNT];                                                               \
                for (int v = 0; v < COUNT; v++)                                                    \
                    total[v] = LOAD(sum->arrays[source], v);                                       \
                for (int v = 0; source + 1 < sum->sources && v < COUNT; v++)                       \
                    total[v] += LOAD(sum->arrays[source + 1], v);                                  \
                if (source + 1 < sum->sources)                                                     \
                    for (int pairs = source >> 1; pairs & 1; pairs >>= 1) {                        \
                        depth--;                                                                   \
                        for (int v = 0; v < COUNT; v++)                                            \
                            total[v] = waiting[depth][v] + total[v];                               \
                    }                                                                              \
                memcpy(waiting[depth++], total, sizeof total);                                     \
            }                                                                                      \
            for (; depth > 1; depth--)                                                             \
                for (int v = 0; v < COUNT; v++)                                                    \
                    waiting[depth - 2][v] += waiting[depth - 1][v];                                \
            for (int v = 0; sum->divisor && v < COUNT; v++)                                        \
                waiting[0][v] /= divisor;                                                          \
            for (int target = 0; target < sum->targets; target++)                                  \
                for (int v = 0; v < COUNT; v++)                                                    \
                    STORE(sum->arrays[sum->sources + target], v, waiting[0][v]);                   \
        }                                                                                          \
    }
#define TREE_BY_VECTOR(NAME, WIDTH, NUMBER)                                                        \
    typedef NUMBER NAME##_vector_##WIDTH __attribute__((vector_size(WIDTH)));                      \
    typedef NAME##_vector_##WIDTH NAME##_memory_##WIDTH __attribute__((aligned(1), may_alias));    \
    TREE_OF(NAME, WIDTH, ISA_##WIDTH, NUMBER, NAME##_vector_##WIDTH,                               \
            AT_ONCE *WIDTH / sizeof(NUMBER), AT_ONCE, LOADED_##WIDTH##_##NUMBER,                   \
            STORED_##WIDTH##_##NUMBER)
#define PLACE(ARRAY, V, NUMBER, WIDTH) ((char *)((NUMBER *)(ARRAY) + at) + (V) * WIDTH)
#define LOADED_AS(ARRAY, V, NUMBER, WIDTH)                                                         \
    (*(const tree_##NUMBER##_memory_##WIDTH *)PLACE(ARRAY, V, NUMBER, WIDTH))
#define STORED_AS(ARRAY, V, X, NUMBER, WIDTH)                                                      \
    do {                                                                                           \
        if (sum->streamed)                                                                         \
            STREAM_##WIDTH(PLACE(ARRAY, V, NUMBER, WIDTH), X);                                     \
        else                                                                                       \
            *(tree_##NUMBER##_memory_##WIDTH *)PLACE(ARRAY, V, NUMBER, WIDTH) = X;                 \
    } while (0)
#define LOADED_16_float(ARRAY, V) LOADED_AS(ARRAY, V, float, 16)
#define LOADED_32_float(ARRAY, V) LOADED_AS(ARRAY, V, float, 32)
#define LOADED_64_float(ARRAY, V) LOADED_AS(ARRAY, V, float, 64)
#define LOADED_16_double(ARRAY, V) LOADED_AS(ARRAY, V, double, 16)
#define LOADED_32_double(ARRAY, V) LOADED_AS(ARRAY, V, double, 32)
#define LOADED_64_double(ARRAY, V) LOADED_AS(ARRAY, V, double, 64)
#define STORED_16_float(ARRAY, V, X) STORED_AS(ARRAY, V, X, float, 16)
#define STORED_32_float(ARRAY, V, X) STORED_AS(ARRAY, V, X, float, 32)
#define STORED_64_float(ARRAY, V, X) STORED_AS(ARRAY, V, X, float, 64)
#define STORED_16_double(ARRAY, V, X) STORED_AS(ARRAY, V, X, double, 16)
#define STORED_32_double(ARRAY, V, X) STORED_AS(ARRAY, V, X, double, 32)
#define STORED_64_double(ARRAY, V, X) STORED_AS(ARRAY, V, X, double, 64)
#define ONE_FLOAT(ARRAY, V) ((const float *)(ARRAY))[at + (V)]
#define ONE_DOUBLE(ARRAY, V) ((const double *)(ARRAY))[at + (V)]
#define STORE_FLOAT(ARRAY, V, X) (((float *)(ARRAY))[at + (V)] = (X))
#define STORE_DOUBLE(ARRAY, V, X) (((double *)(ARRAY))[at + (V)] = (X))

TREE_OF(tree_float, 1, ISA_16, float, float, 1, 1, ONE_FLOAT, STORE_FLOAT)
TREE_BY_VECTOR(tree_float, 16, float)
TREE_BY_VECTOR(tree_float, 32, float)
TREE_BY_VECTOR(tree_float, 64, float)
TREE_OF(tree_double, 1, ISA_16, double, double, 1, 1, ONE_DOUBLE, STORE_DOUBLE)
TREE_BY_VECTOR(tree_double, 16, double)
TREE_BY_VECTOR(tree_double, 32, double)
TREE_BY_VECTOR(tree_double, 64, double)

/* float16, by the processor's conversions: 0 is to nearest, ties to even.  None for 16 bytes. */
#define WIDENED_32(FROM, PART)                                                                     \
    ((vector)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(FROM) + (PART))))
#define WIDENED_64(FROM, PART)                                                                     \
    ((vector)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(FROM) + (PART))))
#define NARROWED_32(TOTAL)                                                                         \
    _mm256_inserti128_si256(_mm256_castsi128_si256(_mm256_cvtps_ph(TOTAL[0], 0)),                  \
                            _mm256_cvtps_ph(TOTAL[1], 0), 1)
#define NARROWED_64(TOTAL)                                                                         \
    _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtps_ph(TOTAL[0], 0)),                       \
                       _mm512_cvtps_ph(TOTAL[1], 0), 1)
#define NARROWED_1(TOTAL) _cvtss_sh(TOTAL, 0)

SUM_ONE_BY_ONE(sum_float16, ISA_32, uint16_t, float, _cvtsh_ss, NARROWED_1, FIRST)
SUM_BY_VECTOR(sum_float16, ISA_32, 32, uint16_t, float, 2, WIDENED_32, NARROWED_32, FIRST)
SUM_BY_VECTOR(sum_float16, ISA_64, 64, uint16_t, float, 2, WIDENED_64, NARROWED_64, FIRST)

/* bfloat16, the upper half of a float.  A vector's parts are its elements at even and at odd places.
   ROUNDED has the result in its upper half: to nearest, ties to even.  A NaN keeps only its sign, and
   the quiet bit, which arithmetic has set.  (AVX512-BF16 turns subnormal numbers to zero.) */
#define UPPER 0xffff0000u
#define PAYLOAD 0x003fffffu
#define ROUNDED(BITS) ((BITS) + 0x7fff + ((BITS) >> 16 & 1))
#define CANONICAL(X) ((bits)(X) & ~((bits)((X) != (X)) & PAYLOAD))

/* Without the empty asm, GCC reads the memory once for each part: 0.8 of the speed. */
#define IN_REGISTER(FROM)                                                                          \
    ({                                                                                             \
        bits row = *(const memory *)(FROM);                                                        \
        __asm__("" : "+v"(row));                                                                   \
        row;                                                                                       \
    })
#define FROM_PAIR(FROM, PART)                                                                      \
    ((vector)((PART) ? IN_REGISTER(FROM) & UPPER : IN_REGISTER(FROM) << 16))
#define PAIR(EVEN, ODD) (ROUNDED(EVEN) >> 16 | (ROUNDED(ODD) & UPPER))
#define TO_PAIR(TOTAL, ANY_NAN)                                                                    \
    (__builtin_expect(ANY_NAN, 0) ? PAIR(CANONICAL(TOTAL[0]), CANONICAL(TOTAL[1]))                 \
               : PAIR((bits)TOTAL[0], (bits)TOTAL[1]))
#define TO_PAIR_16(TOTAL) TO_PAIR(TOTAL, _mm_movemask_ps(_mm_cmpunord_ps(TOTAL[0], TOTAL[1])))
#define TO_PAIR_32(TOTAL)                                                                          \
    TO_PAIR(TOTAL, _mm256_movemask_ps(_mm256_cmp_ps(TOTAL[0], TOTAL[1], _CMP_UNORD_Q)))
#define TO_PAIR_64(TOTAL) TO_PAIR(TOTAL, _mm512_cmp_ps_mask(TOTAL[0], TOTAL[1], _CMP_UNORD_Q))

static inline float from_bfloat16(uint16_t half)
{
    uint32_t bits = (uint32_t)half << 16;
    float number;

    memcpy(&number, &bits, sizeof number);
    return number;
}

static inline uint16_t to_bfloat16(float number)
{
    uint32_t bits;

    memcpy(&bits, &number, sizeof bits);
    return ROUNDED(number == number ? bits : bits & ~PAYLOAD) >> 16;
}

SUM_ONE_BY_ONE(sum_bfloat16, ISA_16, uint16_t, float, from_bfloat16, to_bfloat16, FIRST)
SUM_BY_VECTOR(sum_bfloat16, ISA_16, 16, uint16_t, float, 2, FROM_PAIR, TO_PAIR_16, FIRST)
SUM_BY_VECTOR(sum_bfloat16, ISA_32, 32, uint16_t, float, 2, FROM_PAIR, TO_PAIR_32, FIRST)
SUM_BY_VECTOR(sum_bfloat16, ISA_64, 64, uint16_t, float, 2, FROM_PAIR, TO_PAIR_64, FIRST)

#define BY_WIDTH(NAME) {NAME##_1, NAME##_16, NAME##_32, NAME##_64}
typedef void (*summing)(const struct sum *, size_t, size_t);
static const summing trees[NUMBERS][4] = {
    [FLOAT32] = BY_WIDTH(tree_float),
    [FLOAT64] = BY_WIDTH(tree_double),
};
static const struct {
    size_t itemsize;
    summing by_width[4]; /* one by one, then 16, 32, 64 bytes */
} sums[NUMBERS] = {
    [INT8] = {1, BY_WIDTH(sum_int8)},
    [INT16] = {2, BY_WIDTH(sum_int16)},
    [INT32] = {4, BY_WIDTH(sum_int32)},
    [INT64] = {8, BY_WIDTH(sum_int64)},
    [FLOAT16] = {2, {sum_float16_1, NULL, sum_float16_32, sum_float16_64}},
    [BFLOAT16] = {2, BY_WIDTH(sum_bfloat16)},
    [FLOAT32] = {4, BY_WIDTH(sum_float32)},
    [FLOAT64] = {8, BY_WIDTH(sum_float64)},
};

#define COPY_BY_VECTOR(NAME, ISA, VECTOR, LOAD, STORE)                                             \
    __attribute__((target(ISA))) static void NAME(char *to, const char *from, size_t lines)        \
    {                                                                                              \
        for (; lines > 0; lines--, to += LINE, from += LINE)                                       \
            for (size_t at = 0; at < LINE; at += sizeof(VECTOR))                                   \
                STORE((void *)(to + at), LOAD((const void *)(from + at)));                         \
    }

COPY_BY_VECTOR(copy_64, "avx512f", __m512i, _mm512_loadu_si512, _mm512_stream_si512)
COPY_BY_VECTOR(copy_32, "avx", __m256i, _mm256_loadu_si256, _mm256_stream_si256)
COPY_BY_VECTOR(copy_16, "sse2", __m128i, _mm_loadu_si128, _mm_stream_si128)

/* Bytes of the widest vector of this processor. */
int mpidist_width(void)
{
    if (__builtin_cpu_supports("avx512bw"))
        return 64;
    return __builtin_cpu_supports("avx2") ? 32 : 16;
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

/* Not memcpy: it stands for numpy's assignment, which copies arrays that overlap, too. */
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

/* Sum all sources and store the result in all targets, in one pass.

   0           begin                                end           count
   | one by one | whole blocks, by vector            | one by one |
   With streaming stores the blocks begin with a line of the targets, else with the arrays. */
static void sum_by(const summing *functions, const struct sum *sum)
{
    size_t itemsize = sums[sum->number].itemsize, begin = 0, end;
    int by_width = sum->width >= 64 ? 3 : sum->width >= 32 ? 2 : 1;

    if (sum->streamed)
        begin = to_line(sum->arrays[sum->sources], sum->count * itemsize) / itemsize;
    end = begin + (sum->count - begin) * itemsize / BLOCK * (BLOCK / itemsize);
    functions[0](sum, 0, begin);
    functions[by_width](sum, begin, end);
    functions[0](sum, end, sum->count);
    _mm_sfence();
}

/* Round to nearest, with subnormal numbers, and raise no exceptions. */
#define IEEE 0x1f80

/* An exact sum has the same bits in a thread in which PyTorch or a BLAS turns subnormal numbers to
   zero.  One addition is rounded correctly as it is: of half precision too, for float has at least
   two digits more than twice as many (Figueroa, "When is double rounding innocuous?", 1995). */
void mpidist_sum(const struct sum *sum)
{
    unsigned mode;

    if (sum->grouping != EXACTLY) {
        sum_by(sum->grouping == AS_TREE ? trees[sum->number] : sums[sum->number].by_width, sum);
        return;
    }
    mode = _mm_getcsr();
    _mm_setcsr(IEEE);
    if (sum->sources == 2 && !sum->divisor && (sum->number != FLOAT16 || sum->width >= 32))
        sum_by(sums[sum->number].by_width, sum);
    else
        mpidist_exact(sum);
    _mm_setcsr(mode);
}

#else /* not x86-64: mpidist_width() returns 0, so there are neither sums nor streaming stores */

int mpidist_width(void) { return 0; }
void mpidist_copy(const struct copy *copy)
{
    memmove((void *)copy->target, (const void *)copy->source, copy->count);
}
void mpidist_sum(const struct sum *sum) { (void)sum; }

#endif
