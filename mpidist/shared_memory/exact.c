/* Correctly rounded sums and means of several arrays, in one pass: each result is the exact sum of
   all terms (divided by their number), rounded once, to nearest, ties to even.

   Floats of two and four bytes are added as doubles (sums of bfloat16 as floats, where these hold
   them), which is exact while the exponents of the terms are close enough; doubles by Knuth's
   TwoSum, whose errors then have an exact sum.  Where they are not, and for infinities and NaN, the
   terms of the element are added as whole numbers.  So neither the order of the terms nor overflow
   on the way matters.

   Source: Knuth, The Art of Computer Programming 2, 4.2.2, theorem B; Boldo and Melquiond, "Emulation
   of FMA and correctly rounded sums: proved algorithms using rounding to odd", IEEE TC 57 (2008). */

#include "compiled.h"

#ifdef HAS_VECTORS
#include <immintrin.h>
#include <string.h>

/* A format: its bytes, the digits of a significand, the exponent of the smallest number. */
struct format {
    int itemsize, digits, least;
    uint64_t infinity;
};
static const struct format formats[NUMBERS] = {
    [FLOAT16] = {2, 11, -24, 0x7c00},
    [BFLOAT16] = {2, 8, -133, 0x7f80},
    [FLOAT32] = {4, 24, -149, 0x7f800000},
    [FLOAT64] = {8, 53, -1074, 0x7ff0000000000000},
};

/* A whole number of units of 2^-BASE, in two's complement: of sums of doubles, and, for a division,
   64 digits behind the last of theirs. */
enum { BASE = 1074 + 64, LIMBS = 36 };

static uint64_t bits_at(uintptr_t array, size_t at, int itemsize)
{
    uint64_t bits = 0;

    memcpy(&bits, (const char *)array + at * itemsize, itemsize); /* little-endian, as all x86-64 */
    return bits;
}

/* Add significand * 2^offset, or subtract it. */
static void add(uint64_t *limbs, uint64_t significand, int offset, int negative)
{
    unsigned __int128 shifted = (unsigned __int128)significand << (offset & 63);
    uint64_t parts[2] = {(uint64_t)shifted, (uint64_t)(shifted >> 64)};
    uint64_t carry = 0;

    for (int limb = offset >> 6, part = 0; limb < LIMBS && (part < 2 || carry); limb++, part++) {
        uint64_t other = (part < 2 ? parts[part] : 0), before = limbs[limb];
        unsigned __int128 result = negative ? (unsigned __int128)before - other - carry
                                            : (unsigned __int128)before + other + carry;
        limbs[limb] = (uint64_t)result;
        carry = (uint64_t)(result >> 64) & 1;
    }
}

/* Return the bits of one element's result, by whole numbers. */
static uint64_t exact_one(const struct sum *sum, size_t at)
{
    const struct format *format = &formats[sum->number];
    const int fraction = format->digits - 1, lowest = format->least + BASE;
    const uint64_t infinity = format->infinity, sign = (infinity << 1) & ~infinity;
    const uint64_t nan = infinity | UINT64_C(1) << (fraction - 1);
    uint64_t limbs[LIMBS] = {0}, rest = 0;
    int infinities = 0, only_minus_zeros = 1, negative, top = LIMBS - 1;

    for (int source = 0; source < sum->sources; source++) {
        uint64_t bits = bits_at(sum->arrays[source], at, format->itemsize), size = bits & (sign - 1);
        uint64_t significand = size & ((UINT64_C(1) << fraction) - 1);
        int exponent = (int)(size >> fraction);

        if (size > infinity)
            return nan;
        only_minus_zeros &= bits == sign;
        if (size == infinity)
            infinities |= bits & sign ? 2 : 1;
        else if (exponent)
            add(limbs, significand | UINT64_C(1) << fraction, lowest + exponent - 1, !!(bits & sign));
        else
            add(limbs, significand, lowest, !!(bits & sign));
    }
    if (infinities)
        return infinities == 3 ? nan : infinities == 2 ? sign | infinity : infinity;
    negative = limbs[top] >> 63;
    if (negative) {
        int carry = 1;
        for (int limb = 0; limb < LIMBS; limb++) {
            limbs[limb] = ~limbs[limb] + carry;
            carry = carry && !limbs[limb];
        }
    }
    if (sum->divisor)
        for (int limb = top; limb >= 0; limb--) {
            unsigned __int128 whole = (unsigned __int128)rest << 64 | limbs[limb];
            limbs[limb] = (uint64_t)(whole / sum->divisor);
            rest = (uint64_t)(whole % sum->divisor);
        }
    while (top > 0 && !limbs[top])
        top--;
    if (!limbs[top])
        return only_minus_zeros ? sign : 0;
    /* digits of the number:  1xxxxxxxxxx h rrrrrrr   the unit is worth the last x; h, a half, and
                                        ^ unit        the rest r decide how it is rounded. */
    int unit = 64 * top + 63 - __builtin_clzll(limbs[top]) - fraction;
    if (unit < lowest)
        unit = lowest;
    uint64_t digits = limbs[unit >> 6] >> (unit & 63);
    if (unit & 63)
        digits |= limbs[(unit >> 6) + 1] << (64 - (unit & 63));
    int half = limbs[(unit - 1) >> 6] >> ((unit - 1) & 63) & 1;
    rest |= limbs[(unit - 1) >> 6] & ((UINT64_C(1) << ((unit - 1) & 63)) - 1);
    for (int limb = ((unit - 1) >> 6) - 1; limb >= 0; limb--)
        rest |= limbs[limb];
    digits += half && (rest || digits & 1);
    /* The first digit of a normal number, which is not stored, adds 1 to the exponent. */
    digits += (uint64_t)(unit - lowest) << fraction;
    return (digits < infinity ? digits : infinity) | (negative ? sign : 0);
}

static int log2_up(int count) { return count > 1 ? 32 - __builtin_clz(count - 1) : 0; }

/* Return the largest difference of exponents with which a sum in doubles is exact.  Of float16 it is
   not asked for: its numbers are multiples of 2^-24 below 2^16, which is 40 digits. */
static int spread(const struct sum *sum)
{
    int terms = log2_up(sum->sources), digits = formats[sum->number].digits;

    if (sum->number == FLOAT64) /* the errors have an exact sum */
        return 54 - 2 * terms;
    return 53 - digits - terms;
}

#define ROWS 2 /* vectors in a row: the loop over the arrays costs as much as an addition */

#define ISA_256 "avx2,f16c,fma"
#define ISA_512 "avx512f,avx512bw"
#define LANES(BITS) (BITS / 32)
#define GREATER_256(A, B) (unsigned)_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(A, B)))
#define GREATER_512(A, B) (unsigned)_mm512_cmpgt_epi32_mask(A, B)
#define LOWER_256(X) _mm256_castps256_ps128(X)
#define LOWER_512(X) _mm512_castps512_ps256(X)
#define UPPER_256(X) _mm256_extractf128_ps(X, 1)
#define UPPER_512(X) _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(X), 1))
#define JOINED_256(A, B) _mm256_insertf128_ps(_mm256_castps128_ps256(A), B, 1)
#define JOINED_512(A, B)                                                                           \
    _mm512_castpd_ps(_mm512_insertf64x4(_mm512_castpd256_pd512(_mm256_castps_pd(A)),               \
                                        _mm256_castps_pd(B), 1))
#define SMALL_256(NAME) _mm_##NAME
#define SMALL_512(NAME) _mm256_##NAME

/* Widen a row at FROM to the bits of floats, and to doubles. */
#define FLOAT_ROW(P, BITS, FROM)                                                                   \
    bits = P##_loadu_si##BITS((const void *)(FROM));                                               \
    low = P##_cvtps_pd(SMALL_##BITS(loadu_ps)((const void *)(FROM)));                              \
    high = P##_cvtps_pd(SMALL_##BITS(loadu_ps)((const void *)(FROM + BITS / 16)));
#define PARTED(P, BITS, FLOATS)                                                                    \
    bits = P##_castps_si##BITS(FLOATS);                                                            \
    low = P##_cvtps_pd(LOWER_##BITS(FLOATS));                                                      \
    high = P##_cvtps_pd(UPPER_##BITS(FLOATS));
#define HALF_256(FROM) _mm_loadu_si128((const void *)(FROM))
#define HALF_512(FROM) _mm256_loadu_si256((const void *)(FROM))
#define FLOAT16_ROW(P, BITS, FROM) PARTED(P, BITS, P##_cvtph_ps(HALF_##BITS(FROM)))
#define BFLOAT16_ROW(P, BITS, FROM)                                                                \
    PARTED(P, BITS,                                                                                \
           P##_castsi##BITS##_ps(P##_slli_epi32(P##_cvtepu16_epi32(HALF_##BITS(FROM)), 16)))

/* Round doubles to a row of floats; or to half precision by way of floats that are rounded to odd:
   the last of their digits is 1 if any digit behind it was, so that the second rounding is the only
   one. */
#define FLOATS_OF(P, BITS, LOW, HIGH) JOINED_##BITS(P##_cvtpd_ps(LOW), P##_cvtpd_ps(HIGH))
#define ODD(P, BITS, X)                                                                            \
    P##_castsi##BITS##_pd(P##_andnot_si##BITS(                                                     \
        behind, P##_or_si##BITS(P##_castpd_si##BITS(X),                                            \
                                P##_add_epi64(P##_and_si##BITS(P##_castpd_si##BITS(X), behind),    \
                                              behind))))
#define ODD_FLOATS(P, BITS, LOW, HIGH) FLOATS_OF(P, BITS, ODD(P, BITS, LOW), ODD(P, BITS, HIGH))
#define AS_IT_IS(BITS, FLOATS) FLOATS
#define TO_FLOAT16_256(FLOATS) _mm256_cvtps_ph(FLOATS, 0)
#define TO_FLOAT16_512(FLOATS) _mm512_cvtps_ph(FLOATS, 0)
#define TO_FLOAT16(BITS, FLOATS) TO_FLOAT16_##BITS(FLOATS)
#define ROUNDED(P, BITS, X)                                                                        \
    P##_srli_epi32(P##_add_epi32(P##_add_epi32(X, P##_set1_epi32(0x7fff)),                         \
                                 P##_and_si##BITS(P##_srli_epi32(X, 16), P##_set1_epi32(1))),      \
                   16)
#define PACKED_256(X) _mm_packus_epi32(_mm256_castsi256_si128(X), _mm256_extracti128_si256(X, 1))
#define PACKED_512(X) _mm512_cvtepi32_epi16(X)
#define TO_BFLOAT16_256(X) PACKED_256(ROUNDED(_mm256, 256, _mm256_castps_si256(X)))
#define TO_BFLOAT16_512(X) PACKED_512(ROUNDED(_mm512, 512, _mm512_castps_si512(X)))
#define TO_BFLOAT16(BITS, FLOATS) TO_BFLOAT16_##BITS(FLOATS)

#define STORE_256(TO, ROW) _mm256_storeu_ps((void *)(TO), ROW)
#define STORE_512(TO, ROW) _mm512_storeu_ps((void *)(TO), ROW)
#define STREAM_256(TO, ROW) _mm256_stream_ps((void *)(TO), ROW)
#define STREAM_512(TO, ROW) _mm512_stream_ps((void *)(TO), ROW)
#define LOAD_256(FROM) _mm256_loadu_ps((const void *)(FROM))
#define LOAD_512(FROM) _mm512_loadu_ps((const void *)(FROM))
#define STORE_HALF_256(TO, ROW) _mm_storeu_si128((void *)(TO), ROW)
#define STORE_HALF_512(TO, ROW) _mm256_storeu_si256((void *)(TO), ROW)
#define STREAM_HALF_256(TO, ROW) _mm_stream_si128((void *)(TO), ROW)
#define STREAM_HALF_512(TO, ROW) _mm256_stream_si256((void *)(TO), ROW)

/* Replace the results of the lanes `bad` in a row of ITEMSIZE bytes an element. */
#define PATCH(BAD, ROW, AT, ITEMSIZE, STORE, LOAD)                                                 \
    if (__builtin_expect(BAD, 0)) {                                                                \
        char patched[64];                                                                          \
        STORE(patched, ROW);                                                                       \
        for (unsigned left = BAD; left; left &= left - 1) {                                        \
            uint64_t bits = exact_one(sum, AT + __builtin_ctz(left));                              \
            memcpy(patched + __builtin_ctz(left) * ITEMSIZE, &bits, ITEMSIZE);                     \
        }                                                                                          \
        ROW = LOAD(patched);                                                                       \
    }

/* Elements `begin` to `end`, whole rows: those of four bytes or two.

   If it `compares`, exponents are, by the bits of floats; else sums are exact in any case, and only
   infinities and NaN are added one by one.  A zero has none: 1 less than its bits is the
   largest number, so it is never the smallest term; subnormal numbers have exponent 1. */
#define EXACT_FLOATS(NAME, compares, ISA, P, BITS, ITEMSIZE, ROW_TYPE, ROW, FLOATS, NARROW, STORE, \
                     STREAM, LOAD)                                                                 \
    __attribute__((target(ISA))) static void NAME##_##BITS(const struct sum *sum, size_t begin,    \
                                                           size_t end)                             \
    {                                                                                              \
        const int lanes = LANES(BITS), divides = sum->divisor;                                     \
        const int scales = divides && !(divides & (divides - 1));                                  \
        const P##d_type divisor = P##_set1_pd(divides ? divides : 1);                              \
        const P##d_type inverse = P##_set1_pd(scales ? 1.0 / divides : 1);                         \
        const P##i_type size = P##_set1_epi32(0x7fffffff), one = P##_set1_epi32(1);                \
        const P##i_type exponent = P##_set1_epi32(0x7f800000), least = P##_set1_epi32(0x00800000); \
        const P##i_type limit = P##_set1_epi32(spread(sum) << 23);                                 \
        const P##i_type finite = P##_set1_epi32(0x7f7fffff);                                       \
        const P##i_type behind = P##_set1_epi64x(0x1fffffff);                                      \
        (void)behind;                                                                              \
        for (size_t at = begin; at < end; at += ROWS * lanes) {                                    \
            P##d_type total[ROWS][2];                                                              \
            P##i_type largest[ROWS], smallest[ROWS], bits;                                         \
            P##d_type low, high;                                                                   \
            ROW_TYPE rows[ROWS];                                                                   \
            for (int row = 0; row < ROWS; row++) {                                                 \
                ROW(P, BITS, (const char *)sum->arrays[0] + (at + row * lanes) * ITEMSIZE)         \
                total[row][0] = low, total[row][1] = high;                                         \
                if (compares) {                                                                    \
                    largest[row] = P##_and_si##BITS(bits, size);                                   \
                    smallest[row] = P##_sub_epi32(largest[row], one);                              \
                }                                                                                  \
            }                                                                                      \
            for (int source = 1; source < sum->sources; source++)                                  \
                for (int row = 0; row < ROWS; row++) {                                             \
                    ROW(P, BITS, (const char *)sum->arrays[source] + (at + row * lanes) * ITEMSIZE)\
                    total[row][0] = P##_add_pd(total[row][0], low);                                \
                    total[row][1] = P##_add_pd(total[row][1], high);                               \
                    if (!compares)                                                                 \
                        continue;                                                                  \
                    bits = P##_and_si##BITS(bits, size);                                           \
                    largest[row] = P##_max_epu32(largest[row], bits);                              \
                    smallest[row] = P##_min_epu32(smallest[row], P##_sub_epi32(bits, one));        \
                }                                                                                  \
            for (int row = 0; row < ROWS; row++) {                                                 \
                unsigned bad = 0;                                                                  \
                if (compares) {                                                                    \
                    P##i_type first = P##_and_si##BITS(largest[row], exponent);                    \
                    P##i_type last = P##_and_si##BITS(P##_add_epi32(smallest[row], one), exponent);\
                    last = P##_max_epu32(last, least);                                             \
                    bad = GREATER_##BITS(P##_sub_epi32(first, last), limit);                       \
                    bad |= GREATER_##BITS(largest[row], finite);                                   \
                }                                                                                  \
                for (int part = 0; divides && part < 2; part++)                                    \
                    total[row][part] = scales ? P##_mul_pd(total[row][part], inverse)              \
                                              : P##_div_pd(total[row][part], divisor);             \
                P##_type result = FLOATS(P, BITS, total[row][0], total[row][1]);                   \
                if (!compares) {                                                                   \
                    bits = P##_and_si##BITS(P##_castps_si##BITS(result), size);                    \
                    bad = GREATER_##BITS(bits, finite);                                            \
                }                                                                                  \
                if (sum->number == BFLOAT16 && divides) { /* a subnormal float was rounded twice */\
                    bits = P##_and_si##BITS(P##_castps_si##BITS(result), size);                    \
                    bad |= GREATER_##BITS(least, bits) & GREATER_##BITS(bits, P##_setzero_si##BITS()); \
                }                                                                                  \
                rows[row] = NARROW(BITS, result);                                                  \
                PATCH(bad, rows[row], at + row * lanes, ITEMSIZE, STORE, LOAD)                     \
            }                                                                                      \
            for (int target = 0; target < sum->targets; target++) {                                \
                char *to = (char *)sum->arrays[sum->sources + target] + at * ITEMSIZE;             \
                for (int row = 0; row < ROWS; row++)                                               \
                    if (sum->streamed)                                                             \
                        STREAM(to + row * lanes * ITEMSIZE, rows[row]);                            \
                    else                                                                           \
                        STORE(to + row * lanes * ITEMSIZE, rows[row]);                             \
            }                                                                                      \
        }                                                                                          \
    }

typedef __m256 _mm256_type;
typedef __m256d _mm256d_type;
typedef __m256i _mm256i_type;
typedef __m512 _mm512_type;
typedef __m512d _mm512d_type;
typedef __m512i _mm512i_type;
#define _mm512_set1_epi64x _mm512_set1_epi64

EXACT_FLOATS(float32, 1, ISA_256, _mm256, 256, 4, __m256, FLOAT_ROW, FLOATS_OF, AS_IT_IS, STORE_256,
             STREAM_256, LOAD_256)
EXACT_FLOATS(float32, 1, ISA_512, _mm512, 512, 4, __m512, FLOAT_ROW, FLOATS_OF, AS_IT_IS, STORE_512,
             STREAM_512, LOAD_512)
EXACT_FLOATS(float16, 0, ISA_256, _mm256, 256, 2, __m128i, FLOAT16_ROW, ODD_FLOATS, TO_FLOAT16,
             STORE_HALF_256, STREAM_HALF_256, HALF_256)
EXACT_FLOATS(float16, 0, ISA_512, _mm512, 512, 2, __m256i, FLOAT16_ROW, ODD_FLOATS, TO_FLOAT16,
             STORE_HALF_512, STREAM_HALF_512, HALF_512)
EXACT_FLOATS(bfloat16, 1, ISA_256, _mm256, 256, 2, __m128i, BFLOAT16_ROW, ODD_FLOATS, TO_BFLOAT16,
             STORE_HALF_256, STREAM_HALF_256, HALF_256)
EXACT_FLOATS(bfloat16, 1, ISA_512, _mm512, 512, 2, __m256i, BFLOAT16_ROW, ODD_FLOATS, TO_BFLOAT16,
             STORE_HALF_512, STREAM_HALF_512, HALF_512)

/* Sums of bfloat16 as floats; a row that these do not hold is added as doubles.

   A vector has the elements at even places, as the upper halves of floats, and those at odd places.
   The exponents are compared in 16 bits, as above in 32. */
#define ANY_GREATER_256(A, B) _mm256_movemask_epi8(_mm256_cmpgt_epi16(A, B))
#define ANY_GREATER_512(A, B) _mm512_cmpgt_epi16_mask(A, B)
#define STORE_WHOLE_256(TO, ROW) _mm256_storeu_si256((void *)(TO), ROW)
#define STORE_WHOLE_512(TO, ROW) _mm512_storeu_si512((void *)(TO), ROW)
#define STREAM_WHOLE_256(TO, ROW) _mm256_stream_si256((void *)(TO), ROW)
#define STREAM_WHOLE_512(TO, ROW) _mm512_stream_si512((void *)(TO), ROW)
#define EVEN(P, BITS, ROW) P##_castsi##BITS##_ps(P##_slli_epi32(ROW, 16))
#define ODD_ONES(P, BITS, ROW) P##_castsi##BITS##_ps(P##_and_si##BITS(ROW, upper))
#define EXACT_BFLOAT16(ISA, P, BITS)                                                               \
    __attribute__((target(ISA))) static void bfloat16_sum_##BITS(const struct sum *sum,            \
                                                                 size_t begin, size_t end)         \
    {                                                                                              \
        const int lanes = BITS / 16, terms = log2_up(sum->sources);                                \
        const P##i_type upper = P##_set1_epi32((int)0xffff0000), size = P##_set1_epi16(0x7fff);    \
        const P##i_type one = P##_set1_epi16(1), exponent = P##_set1_epi16(0x7f80);                \
        const P##i_type least = P##_set1_epi16(0x0080);                                            \
        const P##i_type limit = P##_set1_epi16((short)((16 - terms) * 128));                       \
        const P##i_type highest = P##_set1_epi16((short)((255 - terms) * 128 - 1));                \
        if (terms > 16) {                                                                          \
            bfloat16_##BITS(sum, begin, end);                                                      \
            return;                                                                                \
        }                                                                                          \
        for (size_t at = begin; at < end; at += lanes) {                                           \
            P##i_type row = P##_loadu_si##BITS((const void *)((const short *)sum->arrays[0] + at));\
            P##_type even = EVEN(P, BITS, row), odd = ODD_ONES(P, BITS, row);                      \
            P##i_type largest = P##_and_si##BITS(row, size);                                       \
            P##i_type smallest = P##_sub_epi16(largest, one);                                      \
            for (int source = 1; source < sum->sources; source++) {                                \
                row = P##_loadu_si##BITS((const void *)((const short *)sum->arrays[source] + at)); \
                even = P##_add_ps(even, EVEN(P, BITS, row));                                       \
                odd = P##_add_ps(odd, ODD_ONES(P, BITS, row));                                     \
                row = P##_and_si##BITS(row, size);                                                 \
                largest = P##_max_epu16(largest, row);                                             \
                smallest = P##_min_epu16(smallest, P##_sub_epi16(row, one));                       \
            }                                                                                      \
            P##i_type first = P##_and_si##BITS(largest, exponent);                                 \
            P##i_type last = P##_and_si##BITS(P##_add_epi16(smallest, one), exponent);             \
            last = P##_max_epu16(last, least);                                                     \
            if (ANY_GREATER_##BITS(P##_sub_epi16(first, last), limit) ||                           \
                ANY_GREATER_##BITS(largest, highest)) { /* no sum of smaller ones overflows */     \
                bfloat16_##BITS(sum, at, at + lanes);                                              \
                continue;                                                                          \
            }                                                                                      \
            row = P##_or_si##BITS(                                                                 \
                ROUNDED(P, BITS, P##_castps_si##BITS(even)),                                       \
                P##_slli_epi32(ROUNDED(P, BITS, P##_castps_si##BITS(odd)), 16));                   \
            for (int target = 0; target < sum->targets; target++) {                                \
                short *to = (short *)sum->arrays[sum->sources + target] + at;                      \
                if (sum->streamed)                                                                 \
                    STREAM_WHOLE_##BITS(to, row);                                                  \
                else                                                                               \
                    STORE_WHOLE_##BITS(to, row);                                                   \
            }                                                                                      \
        }                                                                                          \
    }

EXACT_BFLOAT16(ISA_256, _mm256, 256)
EXACT_BFLOAT16(ISA_512, _mm512, 512)

/* Doubles.  A quotient is q + c, c of the remainder: it is right if a little more and a little less
   than c round to the same number. */
#define GREATER64_256(A, B) (unsigned)_mm256_movemask_pd(_mm256_castsi256_pd(_mm256_cmpgt_epi64(A, B)))
#define GREATER64_512(A, B) (unsigned)_mm512_cmpgt_epi64_mask(A, B)
#define WHERE_256(X, Y, HOW) (unsigned)_mm256_movemask_pd(_mm256_cmp_pd(X, Y, HOW))
#define WHERE_512(X, Y, HOW) (unsigned)_mm512_cmp_pd_mask(X, Y, HOW)
/* THEN where X is 0, else OTHERWISE. */
#define IF_ZERO_256(X, THEN, OTHERWISE)                                                            \
    _mm256_blendv_pd(OTHERWISE, THEN, _mm256_cmp_pd(X, _mm256_setzero_pd(), _CMP_EQ_OQ))
#define IF_ZERO_512(X, THEN, OTHERWISE)                                                            \
    _mm512_mask_blend_pd(_mm512_cmp_pd_mask(X, _mm512_setzero_pd(), _CMP_EQ_OQ), OTHERWISE, THEN)
#define ABS(P, BITS, X) P##_castsi##BITS##_pd(P##_and_si##BITS(P##_castpd_si##BITS(X), size))
#define EXPONENT(P, BITS, X) P##_srli_epi64(P##_and_si##BITS(P##_castpd_si##BITS(X), size), 52)
#define STORE64_256(TO, ROW) _mm256_storeu_pd((void *)(TO), ROW)
#define STORE64_512(TO, ROW) _mm512_storeu_pd((void *)(TO), ROW)
#define STREAM64_256(TO, ROW) _mm256_stream_pd((void *)(TO), ROW)
#define STREAM64_512(TO, ROW) _mm512_stream_pd((void *)(TO), ROW)
#define LOAD64_256(FROM) _mm256_loadu_pd((const void *)(FROM))
#define LOAD64_512(FROM) _mm512_loadu_pd((const void *)(FROM))

/* The error of the sum T of S and X. */
#define ERROR(P, S, X, T)                                                                          \
    P##_add_pd(P##_sub_pd(S, P##_sub_pd(T, P##_sub_pd(T, S))), P##_sub_pd(X, P##_sub_pd(T, S)))

#define EXACT_DOUBLES(ISA, P, BITS)                                                                \
    __attribute__((target(ISA))) static void float64_##BITS(const struct sum *sum, size_t begin,   \
                                                            size_t end)                            \
    {                                                                                              \
        const int lanes = BITS / 64, divides = sum->divisor, terms = log2_up(sum->sources);        \
        const int scales = divides && !(divides & (divides - 1));                                  \
        const P##d_type divisor = P##_set1_pd(divides ? divides : 1);                              \
        const P##d_type inverse = P##_set1_pd(scales ? 1.0 / divides : 1);                         \
        const P##d_type more = P##_set1_pd(1 + 0x1p-48), less = P##_set1_pd(1 - 0x1p-48);          \
        const P##d_type infinite = P##_set1_pd(__builtin_inf());                                   \
        const P##i_type size = P##_set1_epi64x(INT64_MAX);                                         \
        const P##i_type limit = P##_set1_epi64x(spread(sum));                                      \
        const P##i_type highest = P##_set1_epi64x(2045 - terms); /* no sum of these overflows */   \
        /* A quotient of a number with a larger exponent is normal, its remainder exact. */        \
        const P##i_type lowest = P##_set1_epi64x(scales ? log2_up(divides) : 110);                 \
        for (size_t at = begin; at < end; at += ROWS * lanes) {                                    \
            P##d_type total[ROWS], error[ROWS], largest[ROWS], smallest[ROWS];                     \
            for (int row = 0; row < ROWS; row++) {                                                 \
                total[row] = P##_loadu_pd((const double *)sum->arrays[0] + at + row * lanes);      \
                error[row] = P##_setzero_pd();                                                     \
                largest[row] = ABS(P, BITS, total[row]);                                           \
                smallest[row] = IF_ZERO_##BITS(total[row], infinite, largest[row]);                \
            }                                                                                      \
            for (int source = 1; source < sum->sources; source++)                                  \
                for (int row = 0; row < ROWS; row++) {                                             \
                    P##d_type x =                                                                  \
                        P##_loadu_pd((const double *)sum->arrays[source] + at + row * lanes);      \
                    P##d_type before = total[row], after = P##_add_pd(before, x);                  \
                    error[row] = P##_add_pd(error[row], ERROR(P, before, x, after));               \
                    total[row] = after;                                                            \
                    x = ABS(P, BITS, x);                                                           \
                    largest[row] = P##_max_pd(x, largest[row]); /* the latter if x is NaN */       \
                    smallest[row] = P##_min_pd(IF_ZERO_##BITS(x, infinite, x), smallest[row]);     \
                }                                                                                  \
            for (int row = 0; row < ROWS; row++) {                                                 \
                P##i_type first = EXPONENT(P, BITS, largest[row]);                                 \
                P##i_type last = EXPONENT(P, BITS, smallest[row]);                                 \
                unsigned bad = GREATER64_##BITS(P##_sub_epi64(first, last), limit);                \
                bad |= GREATER64_##BITS(first, highest);                                           \
                bad |= WHERE_##BITS(total[row], total[row], _CMP_UNORD_Q);                         \
                /* Not +0 added to -0. */                                                          \
                P##d_type sum_of_both = P##_add_pd(total[row], error[row]);                        \
                P##d_type result = IF_ZERO_##BITS(error[row], total[row], sum_of_both);            \
                if (divides) {                                                                     \
                    bad |= ~GREATER64_##BITS(EXPONENT(P, BITS, result), lowest) &                  \
                           WHERE_##BITS(result, P##_setzero_pd(), _CMP_NEQ_UQ);                    \
                    if (scales) {                                                                  \
                        result = P##_mul_pd(result, inverse);                                      \
                    } else {                                                                       \
                        P##d_type behind = ERROR(P, total[row], error[row], sum_of_both);          \
                        P##d_type quotient = P##_div_pd(result, divisor);                          \
                        P##d_type rest = P##_fnmadd_pd(quotient, divisor, result);                 \
                        rest = P##_div_pd(P##_add_pd(rest, behind), divisor);                      \
                        P##d_type above = P##_add_pd(quotient, P##_mul_pd(rest, more));            \
                        P##d_type below = P##_add_pd(quotient, P##_mul_pd(rest, less));            \
                        bad |= WHERE_##BITS(above, below, _CMP_NEQ_UQ);                            \
                        result = IF_ZERO_##BITS(rest, quotient, above);                            \
                    }                                                                              \
                }                                                                                  \
                total[row] = result;                                                               \
                PATCH(bad, total[row], at + row * lanes, 8, STORE64_##BITS, LOAD64_##BITS)         \
            }                                                                                      \
            for (int target = 0; target < sum->targets; target++) {                                \
                double *to = (double *)sum->arrays[sum->sources + target] + at;                    \
                for (int row = 0; row < ROWS; row++)                                               \
                    if (sum->streamed)                                                             \
                        STREAM64_##BITS(to + row * lanes, total[row]);                             \
                    else                                                                           \
                        STORE64_##BITS(to + row * lanes, total[row]);                              \
            }                                                                                      \
        }                                                                                          \
    }

EXACT_DOUBLES(ISA_256, _mm256, 256)
EXACT_DOUBLES(ISA_512, _mm512, 512)

static void (*const by_width[NUMBERS][2])(const struct sum *, size_t, size_t) = {
    [FLOAT16] = {float16_256, float16_512},
    [BFLOAT16] = {bfloat16_256, bfloat16_512},
    [FLOAT32] = {float32_256, float32_512},
    [FLOAT64] = {float64_256, float64_512},
};

enum { MOST = 64, BLOCK = 128 }; /* sources, and bytes of the rows that are summed at a time */

/* Elements `begin` to `end`, fewer than a block: of up to MOST sources in a copy with zeros behind. */
static void short_part(const struct sum *sum, size_t begin, size_t end, int wide, size_t block)
{
    const int itemsize = formats[sum->number].itemsize;
    const size_t from = begin * itemsize, bytes = (end - begin) * itemsize;
    uintptr_t arrays[MOST + 1];
    char copies[MOST + 1][BLOCK];
    struct sum part = *sum;

    if (begin == end)
        return;
    if (wide < 0 || sum->sources > MOST) {
        for (size_t at = begin; at < end; at++) {
            uint64_t bits = exact_one(sum, at);
            for (int target = 0; target < sum->targets; target++)
                memcpy((char *)sum->arrays[sum->sources + target] + at * itemsize, &bits, itemsize);
        }
        return;
    }
    for (int source = 0; source < sum->sources; source++) {
        memset(copies[source], 0, BLOCK);
        memcpy(copies[source], (const char *)sum->arrays[source] + from, bytes);
        arrays[source] = (uintptr_t)copies[source];
    }
    arrays[sum->sources] = (uintptr_t)copies[MOST];
    part.arrays = arrays, part.count = block, part.targets = 1, part.streamed = 0;
    by_width[sum->number][wide](&part, 0, block);
    for (int target = 0; target < sum->targets; target++)
        memcpy((char *)sum->arrays[sum->sources + target] + from, copies[MOST], bytes);
}

/* Store the correctly rounded sum, or mean, of all sources in all targets.  The caller has set the
   processor's rounding mode, in which subnormal numbers are none the less numbers. */
void mpidist_exact(const struct sum *sum)
{
    const size_t itemsize = formats[sum->number].itemsize;
    const int fits = sum->number != FLOAT16 || 40 + log2_up(sum->sources) <= 53;
    const int two = sum->width >= 32 && __builtin_cpu_supports("fma");
    const int wide = !fits ? -1 : sum->width >= 64 ? 1 : two ? 0 : -1;
    const size_t lanes = (itemsize < 8 ? 8 : 4) << (wide > 0), block = ROWS * lanes;
    size_t begin = 0, end;

    if (wide < 0) {
        short_part(sum, 0, sum->count, wide, block);
        return;
    }
    if (sum->streamed) { /* whole rows begin with a line of the targets */
        begin = (-sum->arrays[sum->sources] & 63) / itemsize;
        begin = begin < sum->count ? begin : sum->count;
    }
    end = begin + (sum->count - begin) / block * block;
    for (size_t at = 0; at < begin; at += block)
        short_part(sum, at, at + block < begin ? at + block : begin, wide, block);
    if (sum->number == BFLOAT16 && !sum->divisor)
        (wide ? bfloat16_sum_512 : bfloat16_sum_256)(sum, begin, end);
    else
        by_width[sum->number][wide](sum, begin, end);
    short_part(sum, end, sum->count, wide, block);
    _mm_sfence();
}

#endif
