/* What Python passes to the compiled code: each function gets the address of one of these. */

#include <stddef.h>
#include <stdint.h>

/* `count` bytes that do not overlap, by vectors of `width` bytes that go round the cache; or as the
   C library copies, if `width` is 0. */
struct copy {
    uintptr_t target, source;
    size_t count;
    int width;
};

/* `count` elements of `itemsize` bytes, 4 or 8, by vectors of `width` bytes.  `arrays` has the
   addresses of the sources, then those of the targets; a target is a source, or apart from all.
   Streamed, all targets lie at the same place of a line, a multiple of an element. */
struct sum {
    const uintptr_t *arrays;
    size_t count;
    int sources, targets, itemsize, divisor, streamed, width;
};

/* Words in shared memory by which ranks meet: `mine` and those of `count` others.  Who waits looks
   `looks` times, then `yields` times with the core given away between.  At an arrival, a `mark` is
   left in one of the `history` words from `prints` words behind on, and compared. */
struct meeting {
    int64_t *mine;
    int64_t *const *others;
    int count, looks, yields, prints, history;
    int64_t mark;
};

/* `count` words, and what they are if nothing is to be done about them. */
struct check {
    const int64_t *const *words;
    const int64_t *expected;
    int count;
};

enum kind { COPY, SUM, ARRIVE, MEET, CHECK, CALL, KINDS };

struct step {
    int64_t kind;
    const void *what; /* of that kind; NULL of a CALL, which is Python's */
};

struct program {
    const struct step *steps;
    int count;
};

int mpidist_width(void);
void mpidist_copy(const struct copy *copy);
void mpidist_sum(const struct sum *sum);
int mpidist_run(const struct program *program, int64_t sequence, int at);
