/* Runs the steps of a kernel one after another, without returning to Python between them.

   A step in Python takes half a microsecond, and several if its data have been evicted from the
   cache.  With more ranks than cores, a waiting rank also notices sooner that the others have
   arrived. */

#include "compiled.h"

#ifdef RUNS_STEPS
#include <sched.h>
#include <time.h>

/* Tell the processor that this is a loop that waits. */
static void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Spin for a short time; return whether all awaited ranks have reached a number. */
static int reached(const struct meeting *meeting, int64_t number)
{
    int looks = meeting->looks, yields = meeting->yields;

    for (int other = 0; other < meeting->count; other++)
        while (__atomic_load_n(meeting->others[other], __ATOMIC_ACQUIRE) < number) {
            if (looks-- > 0)
                relax();
            else if (yields-- > 0)
                sched_yield();
            else
                return 0;
        }
    return 1;
}

/* Reach the next barrier; return whether all awaited ranks have reached it too. */
static int meet(const struct meeting *meeting)
{
    int64_t number = *meeting->mine + 1;

    __atomic_store_n(meeting->mine, number, __ATOMIC_RELEASE);
    return reached(meeting, number);
}

/* Return whether a rank that has reached an operation announced it by the fingerprint `mark`.

   Of p ranks on one core the last to arrive goes on at once, so p - 1 see a later number: to ask
   Python then took half of a call's time.  But a rank at `sequence` + 3 may be storing the
   fingerprint of the fourth in the same word, for `history` is 4: the number is read again after
   the fingerprint (Board.announce has the picture). */
static int announced(const struct meeting *meeting, const int64_t *words, int64_t sequence,
                     int64_t at)
{
    int64_t mark = __atomic_load_n(words + at, __ATOMIC_ACQUIRE);

    return mark == meeting->mark &&
           __atomic_load_n(words, __ATOMIC_RELAXED) - sequence < meeting->history - 1;
}

/* Store an entry.  Its stamp has a check sum of the rest, by which one that is half written is no
   operation. */
static void store(int64_t *entry, uint64_t stamp, uint64_t what, uint64_t time, int64_t mark)
{
    __atomic_store_n(entry + 1, what, __ATOMIC_RELAXED);
    __atomic_store_n(entry + 2, time, __ATOMIC_RELAXED);
    __atomic_store_n(entry + 3, mark, __ATOMIC_RELAXED);
    __atomic_store_n(entry, stamp, __ATOMIC_RELAXED);
}

/* Record an operation: it is the last that is known of this process if it is killed.

   Two threads, on communicators of their own, may take the same number and overwrite each other's
   entry in the ring, not those in their tracks; and one that is interrupted here sets the count back,
   by all that the other did meanwhile.  Who reads knows (backends/flight.py): the number is not
   counted atomically, as that would wait for all stores before it, those to other ranks' cores too. */
static void record(const struct flight *flight, int64_t sequence, int64_t mark)
{
    struct timespec now;
    uint64_t number = __atomic_load_n(flight->count, __ATOMIC_RELAXED) + 1;
    uint64_t what = (uint64_t)sequence << 16 | (uint64_t)flight->serial, time, sum;
    int64_t *entry = flight->ring + (number - 1) % ENTRIES * ENTRY_WORDS;

    clock_gettime(CLOCK_MONOTONIC_COARSE, &now); /* 5 ns; the exact one takes 25 */
    time = (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
    sum = ((number ^ what) * CHECK_WHAT ^ time * CHECK_TIME ^ (uint64_t)mark * CHECK_MARK) >> 32;
    __atomic_store_n(flight->count, number, __ATOMIC_RELAXED);
    store(entry, (number & UINT32_MAX) | sum << 32, what, time, mark);
    store(flight->track + TRACK_LAST, (number & UINT32_MAX) | sum << 32, what, time, mark);
    __atomic_store_n(flight->track + TRACK_BEGUN, sequence, __ATOMIC_RELAXED);
}

/* Announce that this rank has reached an operation: on the board, and then in the record, for which
   no other rank waits. */
void mpidist_announce(const struct meeting *meeting, int64_t sequence, int64_t mark)
{
    /* Released: who reads it in place of the one four operations before also reads the number of
       the operation before this one, or a later one. */
    __atomic_store_n(meeting->mine + meeting->prints + sequence % meeting->history, mark,
                     __ATOMIC_RELEASE);
    __atomic_store_n(meeting->mine, sequence, __ATOMIC_RELEASE);
    if (meeting->flight)
        record(meeting->flight, sequence, mark);
}

/* Record that an operation has come as far as a word of the track says. */
static void reached_by(const struct flight *flight, int word, int64_t sequence)
{
    if (flight)
        __atomic_store_n(flight->track + word, sequence, __ATOMIC_RELAXED);
}

/* Arrive at an operation; return whether all ranks have arrived at the same one.  0 too if a rank
   has gone on so far that Python must say whether it was the same. */
static int arrive(const struct meeting *meeting, int64_t sequence)
{
    int64_t at = meeting->prints + sequence % meeting->history;

    mpidist_announce(meeting, sequence, meeting->mark);
    if (!reached(meeting, sequence))
        return 0;
    for (int other = 0; other < meeting->count; other++)
        if (!announced(meeting, meeting->others[other], sequence, at))
            return 0;
    reached_by(meeting->flight, TRACK_ARRIVED, sequence);
    return 1;
}

/* Return whether all words have their expected values.  The order of these loads does not matter:
   the words are this rank's own, or a meeting lies between their being written and this step. */
static int expected(const struct check *check)
{
    for (int word = 0; word < check->count; word++)
        if (__atomic_load_n(check->words[word], __ATOMIC_RELAXED) != check->expected[word])
            return 0;
    return 1;
}

/* Run the steps from number `at` on, for operation number `sequence`.  Return the number of the
   step that Python must run, or at which it must go on waiting; -1 at the end. */
int mpidist_run(const struct program *program, int64_t sequence, int at)
{
    for (; at < program->count; at++) {
        const void *what = program->steps[at].what;
        switch (program->steps[at].kind) {
        case COPY:
            mpidist_copy(what);
            break;
        case SUM:
            mpidist_sum(what);
            break;
        case ARRIVE:
            if (!arrive(what, sequence))
                return at;
            break;
        case MEET:
            if (!meet(what))
                return at;
            break;
        case CHECK:
            if (!expected(what))
                return at;
            break;
        default:
            return at;
        }
    }
    reached_by(program->flight, TRACK_ENDED, sequence);
    return -1;
}

int mpidist_runs_steps(void) { return 1; }

#else /* atomic 64-bit reads might need a library there */

void mpidist_announce(const struct meeting *meeting, int64_t sequence, int64_t mark)
{
    (void)meeting, (void)sequence, (void)mark;
}

int mpidist_run(const struct program *program, int64_t sequence, int at)
{
    (void)program, (void)sequence;
    return at;
}

int mpidist_runs_steps(void) { return 0; }

#endif
