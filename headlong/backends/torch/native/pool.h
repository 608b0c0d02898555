/* Threads that share the work of one call.
 *
 * A call is cut into chunks; whoever is free takes the next one, the caller included. The caller waits only for chunks
 * that somebody has taken, never for a thread that has not come yet, so a busy machine costs what it takes and no
 * more: a barrier would cost a time slice in every call. Who computes a chunk changes nothing in it.
 */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>

#define SPINS 20000  /* looks for work before a thread goes to sleep, some 100 microseconds */
#define MAX_CHUNKS 0xFFFFFF

typedef void (*Work)(const void *job, long first, long last);  /* items first .. last - 1 */

static struct {
    /* The call's number (16 bits), its chunks (24 bits) and the next of them (24 bits), in one word: a thread that takes
     * a chunk learns in the same instant which call it belongs to and whether there is such a chunk. */
    _Atomic uint64_t ticket;
    _Atomic long finished;  /* chunks */
    Work work;
    const void *job;
    long items, grain;
    pthread_mutex_t caller, lock;
    pthread_cond_t wake;
    _Atomic int sleeping;
    int workers;  /* started, never ended */
    int threads;  /* asked for; 1 leaves the workers asleep */
} pool = {.caller = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

static inline void rest(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static void take_chunks(void) {
    for (;;) {
        uint64_t ticket = atomic_fetch_add(&pool.ticket, 1);
        long chunk = ticket & MAX_CHUNKS, chunks = ticket >> 24 & MAX_CHUNKS;
        if (chunk >= chunks) return;
        long first = chunk * pool.grain, last = first + pool.grain;
        pool.work(pool.job, first, last < pool.items ? last : pool.items);
        atomic_fetch_add(&pool.finished, 1);
    }
}

static uint16_t call_number(void) { return atomic_load(&pool.ticket) >> 48; }

static void *serve(void *unused) {
    (void)unused;
    for (uint16_t seen = 0;;) {
        for (int spin = 0; spin < SPINS && call_number() == seen; spin++) rest();
        if (call_number() == seen) {
            pthread_mutex_lock(&pool.lock);
            atomic_fetch_add(&pool.sleeping, 1);
            while (call_number() == seen) pthread_cond_wait(&pool.wake, &pool.lock);
            atomic_fetch_sub(&pool.sleeping, 1);
            pthread_mutex_unlock(&pool.lock);
        }
        seen = call_number();
        take_chunks();
    }
    return NULL;
}

/* Share the work of later calls among this many threads, the caller counted. */
void use_threads(int threads) {
    pthread_mutex_lock(&pool.caller);
    pool.threads = threads;
    while (pool.workers < threads - 1) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, serve, NULL)) break;
        pthread_detach(thread);
        pool.workers++;
    }
    pthread_mutex_unlock(&pool.caller);
}

/* Work on items 0 .. items - 1, at least `grain` in a chunk. A second caller at the same time works alone. */
static void share(Work work, const void *job, long items, long grain) {
    if (items > grain * MAX_CHUNKS) grain = items / MAX_CHUNKS + 1;
    if (grain < 1) grain = 1;
    uint64_t chunks = (items + grain - 1) / grain;
    if (chunks < 2 || pool.threads < 2 || pthread_mutex_trylock(&pool.caller)) {
        work(job, 0, items);
        return;
    }
    pool.work = work, pool.job = job, pool.items = items, pool.grain = grain;
    atomic_store(&pool.finished, 0);
    uint64_t number = (uint16_t)(call_number() + 1);
    atomic_store(&pool.ticket, number << 48 | chunks << 24);
    if (atomic_load(&pool.sleeping)) {
        pthread_mutex_lock(&pool.lock);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.lock);
    }
    take_chunks();
    for (long spin = 0; atomic_load(&pool.finished) < (long)chunks; spin++) spin < SPINS ? rest() : (void)sched_yield();
    pthread_mutex_unlock(&pool.caller);
}
