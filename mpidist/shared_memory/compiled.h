/* Structures that Python passes to the compiled functions by address.  compiled.py repeats them. */

#include <stddef.h>
#include <stdint.h>

/* Steps need atomic 64-bit words and 64-bit addresses; vectors are those of x86-64.  A build with
   MPIDIST_PORTABLE is what other processors get. */
#if defined(__GNUC__) && UINTPTR_MAX == UINT64_MAX
#define RUNS_STEPS 1
#if defined(__x86_64__) && !defined(MPIDIST_PORTABLE)
#define HAS_VECTORS 1
#endif
#endif

/* A copy of `count` bytes: by the C library's memmove if `width` is 0; with streaming stores of
   `width` bytes, between memory that does not overlap; or, if `width` is MEASURED, by what the pace
   of this process says is faster. */
#define MEASURED -1
struct copy {
    uintptr_t target, source;
    size_t count;
    int width;
};

/* What stores cost, in ticks a KiB, where the other ranks have read what was there before.

   On some processors such a store waits until the readers have given up the line: 28 ns a line on
   a Zen 4 whose cores share no cache, where streaming stores take 2; on others memmove's stores are
   as fast as these.  A virtual machine may change between both every minute.  So copies into such
   memory time themselves.  Ordinary stores are used until four in a row take more than
   `SLOW` times as long as streaming ones; then these for the next `patience` copies, twice as many
   each time.  Trying ordinary ones again takes a few: the first finds lines that nobody holds. */
struct pace {
    uint64_t ordinary, streaming; /* of the last copy, and of the fastest of late; 0: not known */
    int64_t copies, left, slow, fast, patience; /* left: copies to stream before the next try */
};

/* Types of numbers; integers with or without sign. */
enum number { INT8, INT16, INT32, INT64, FLOAT16, BFLOAT16, FLOAT32, FLOAT64, NUMBERS };

/* A sum of arrays of `count` elements of type `number`, by vectors of `width` bytes (FLOAT16: 32 or
   64).  `arrays` has the addresses of the sources, then those of the targets.  A target is equal to
   a source or overlaps none.  With streaming stores (`streamed`), all targets begin at the same
   offset in a cache line, a multiple of the element's size.  Floats have a `divisor`, or 0.
   The sources are added in their order; or as a tree, of floats of four bytes and more, that splits
   them at the largest power of two below their number; or exactly (exact.c), of floats, from two
   sources or more. */
enum grouping { IN_ORDER, AS_TREE, EXACTLY };
struct sum {
    const uintptr_t *arrays;
    size_t count;
    int sources, targets, number, divisor, streamed, width, grouping;
};

/* Where the operations of a communicator are recorded: backends/flight.py has the layout.  `count` is
   the number of operations of this process so far, on all communicators; each has an entry in the
   `ring`, and the last of a communicator also in its `track`, number `serial`. */
struct flight {
    int64_t *count, *ring, *track;
    int64_t serial;
};
enum { ENTRIES = 1024, ENTRY_WORDS = 4 };            /* of the ring */
/* Odd factors of the check sum of an entry, after the golden ratio and the roots of 2 and 3. */
#define CHECK_WHAT UINT64_C(0x9e3779b97f4a7c15)
#define CHECK_TIME UINT64_C(0x6a09e667f3bcc909)
#define CHECK_MARK UINT64_C(0xbb67ae8584caa73b)
enum { TRACK_BEGUN = 1, TRACK_ARRIVED, TRACK_ENDED, TRACK_LAST }; /* words of the track */

/* A meeting of the ranks: an arrival at an operation, or a barrier.  `mine` is this rank's word in
   shared memory, `others` are the words of the `count` ranks that it waits for.  A wait reads them
   `looks` times, then `yields` times and yields the core in between.  At an arrival, each rank also
   stores the operation's fingerprint `mark` in one of the `history` words that begin `prints` words
   behind its own, and compares those of the others.  `flight` is NULL without a record. */
struct meeting {
    int64_t *mine;
    int64_t *const *others;
    int count, looks, yields, prints, history;
    int64_t mark;
    const struct flight *flight;
};

/* `count` words and the values with which the Python call of this step is skipped. */
struct check {
    const int64_t *const *words;
    const int64_t *expected;
    int count;
};

enum kind { COPY, SUM, ARRIVE, MEET, CHECK, CALL, KINDS };

struct step {
    int64_t kind;
    const void *what; /* structure of that kind; NULL for a CALL of a Python function */
};

/* `flight`, if not NULL, is where the end of the operation is recorded. */
struct program {
    const struct step *steps;
    int count;
    const struct flight *flight;
};

int mpidist_width(void);
int mpidist_runs_steps(void);
void mpidist_copy(const struct copy *copy);
int mpidist_streams_next(struct pace *pace);
void mpidist_took(struct pace *pace, int streamed, uint64_t cost);
extern struct pace mpidist_pace;
void mpidist_sum(const struct sum *sum);
enum { DIGEST = 4 }; /* sums of a digest */
void mpidist_digest(uintptr_t address, size_t count, uint64_t *sums);
void mpidist_exact(const struct sum *sum);
void mpidist_announce(const struct meeting *meeting, int64_t sequence, int64_t mark);
int mpidist_run(const struct program *program, int64_t sequence, int at);
