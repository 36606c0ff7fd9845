/* Runs the steps of a kernel one after another without coming back to Python between them.

   A step of Python's takes half a microsecond, and several if what it needs has been pushed out of
   the cache meanwhile; with more ranks than cores, who waits comes back sooner to see that the
   others have come. */

#include "compiled.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <sched.h>

/* Tell whether all others have reached a number, looking for a while. */
static int reached(const struct meeting *meeting, int64_t number)
{
    int looks = meeting->looks, yields = meeting->yields;

    for (int other = 0; other < meeting->count; other++)
        while (__atomic_load_n(meeting->others[other], __ATOMIC_ACQUIRE) < number) {
            if (looks-- > 0)
                __builtin_ia32_pause();
            else if (yields-- > 0)
                sched_yield();
            else
                return 0;
        }
    return 1;
}

/* Come to the next meeting of the ranks. */
static int meet(const struct meeting *meeting)
{
    int64_t number = *meeting->mine + 1;

    __atomic_store_n(meeting->mine, number, __ATOMIC_RELEASE);
    return reached(meeting, number);
}

/* Come to an operation; 0 too if another rank is in a different one, or has gone on. */
static int arrive(const struct meeting *meeting, int64_t sequence)
{
    int64_t at = meeting->prints + sequence % meeting->history;

    meeting->mine[at] = meeting->mark;
    __atomic_store_n(meeting->mine, sequence, __ATOMIC_RELEASE);
    if (!reached(meeting, sequence))
        return 0;
    for (int other = 0; other < meeting->count; other++) {
        const int64_t *words = meeting->others[other];
        if (__atomic_load_n(words, __ATOMIC_RELAXED) != sequence || words[at] != meeting->mark)
            return 0;
    }
    return 1;
}

/* Tell whether words are as expected. */
static int expected(const struct check *check)
{
    for (int word = 0; word < check->count; word++)
        if (__atomic_load_n(check->words[word], __ATOMIC_RELAXED) != check->expected[word])
            return 0;
    return 1;
}

/* Run the steps from number `at` on, as operation number `sequence`.  Gives the number of the step
   that Python has to do, or at which it has to go on waiting; -1 at the end. */
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
    return -1;
}

#else /* as in compiled.c; and words of 64 bits may need a library there to be read at once */

int mpidist_run(const struct program *program, int64_t sequence, int at)
{
    (void)program, (void)sequence;
    return at;
}

#endif
