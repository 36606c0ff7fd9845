/* The digest of bytes: four sums over their 64-bit words, at the speed of the memory.  digest.py says
   what they find, and has them in numpy.

   Vectors of 16 bytes, which every compiler of vectors has, do here: wider ones are faster only from
   the cache.  Two halves are read at a time, as a processor fetches ahead within a page only. */

#include "compiled.h"

#include <string.h>

#ifdef __GNUC__
typedef uint64_t vector __attribute__((vector_size(16)));
#else
typedef uint64_t vector;
#endif
enum { HALVES = 2, ROW = sizeof(vector), LANES = ROW / sizeof(uint64_t) };
enum { ALL, HIGH, ALL_TIMES, HIGH_TIMES, SUMS = DIGEST };

/* Store the sums of the words' low halves and high halves, and the same with each word times its
   position from 1 on.

   What a column of the rows adds up to so far is added, after each row, to the columns of `_TIMES`:
   so a word counts there as often as rows follow, without a multiplication.  Low halves are what
   the words are without the high ones, also in sums, where no carry is lost of either. */
void mpidist_digest(uintptr_t address, size_t count, uint64_t *sums)
{
    const char *from = (const char *)address;
    size_t rows = count / (HALVES * ROW), left = count % (HALVES * ROW);
    uint64_t each = (uint64_t)rows * LANES, position = HALVES * each, total[SUMS] = {0};
    uint64_t lanes[SUMS][HALVES][LANES];
    vector columns[SUMS][HALVES];

    memset(columns, 0, sizeof columns);
    for (size_t row = 0; row < rows; row++, from += ROW)
        for (int half = 0; half < HALVES; half++) {
            vector words;
            memcpy(&words, from + half * rows * ROW, sizeof words);
            columns[ALL][half] += words;
            columns[HIGH][half] += words >> 32;
            columns[ALL_TIMES][half] += columns[ALL][half];
            columns[HIGH_TIMES][half] += columns[HIGH][half];
        }
    from += (HALVES - 1) * rows * ROW;
    memcpy(lanes, columns, sizeof lanes);
    for (int sum = ALL; sum <= HIGH; sum++)
        for (int half = 0; half < HALVES; half++)
            for (int lane = 0; lane < LANES; lane++) {
                uint64_t all = lanes[sum][half][lane];
                uint64_t before = rows * all - lanes[sum + 2][half][lane];
                total[sum] += all;
                total[sum + 2] += LANES * before + (half * each + lane + 1) * all;
            }
    /* The rest, its last word filled up with zeros. */
    for (; left > 0; from += 8, left -= left < 8 ? left : 8) {
        uint64_t word = 0;
        memcpy(&word, from, left < 8 ? left : 8);
        position++;
        total[ALL] += word;
        total[HIGH] += word >> 32;
        total[ALL_TIMES] += position * word;
        total[HIGH_TIMES] += position * (word >> 32);
    }
    for (int sum = ALL; sum < SUMS; sum += 2) {
        sums[sum] = total[sum] - (total[sum + 1] << 32);
        sums[sum + 1] = total[sum + 1];
    }
}
