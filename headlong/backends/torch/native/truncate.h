/* Which tokens may come: the cuts of kernels/truncate.py. Nothing is sorted: a cut is found by the digits of its key. */

#define WHOLE 0x1p40  /* the weight of a position's best token */
#define DIGIT 11      /* bits */

typedef struct {
    float *scores;  /* [n, vocab]; -inf where cut off */
    const int64_t *top_k;
    const float *top_p, *min_p, *threshold;  /* [n], as the one before and the next */
    const uint8_t *coin;
    long n, vocab;
} Truncate;

/* A place in the ranking: what is above the key is before it, and what is on it up to the token. */
typedef struct {
    uint32_t key;
    long token;
} Rank;

static inline int within(uint32_t key, long token, Rank end) {
    return key > end.key || (key == end.key && token <= end.token);
}

/* In the order of the scores; -0.0 is 0.0. */
static inline uint32_t key_of(float score) {
    float plain = score + 0.0f;
    uint32_t bits;
    memcpy(&bits, &plain, sizeof bits);
    return bits ^ (bits >> 31 ? 0xFFFFFFFFu : 0x80000000u);
}

static inline int64_t part_of(float part, int64_t total) {
    double share = ceil((double)part * (double)total);
    return share < 1 ? 1 : (int64_t)share;
}

/* The last of the best tokens whose weights together reach what is wanted, among those within an end; that end where
 * they do not. Without weights each counts for 1. */
static Rank reach(const uint32_t *keys, const int64_t *weights, long n, Rank end, int64_t wanted) {
    uint32_t found = 0;
    for (int shift = 32 - DIGIT; shift > -DIGIT; shift -= DIGIT) {
        int low = shift < 0 ? 0 : shift, high = shift + DIGIT;
        int64_t sums[1 << DIGIT] = {0};
        for (long i = 0; i < n; i++)
            if ((high == 32 || keys[i] >> high == found >> high) && within(keys[i], i, end))
                sums[(keys[i] & (high == 32 ? ~0u : (1u << high) - 1)) >> low] += weights ? weights[i] : 1;
        long digit = (1 << (high - low)) - 1;
        for (; sums[digit] < wanted; digit--) {
            if (digit == 0) return end;
            wanted -= sums[digit];
        }
        found |= (uint32_t)digit << low;
    }
    for (long i = 0; i < n; i++)
        if (keys[i] == found && (wanted -= weights ? weights[i] : 1) <= 0) return (Rank){found, i};
    return end;
}

/* The last token of at least such a weight, among those within an end. */
static Rank lightest(const uint32_t *keys, const int64_t *weights, long n, Rank end, int64_t least) {
    Rank last = {0xFFFFFFFFu, -1};
    for (long i = 0; i < n; i++)
        if (weights[i] >= least && keys[i] <= last.key && within(keys[i], i, end)) last = (Rank){keys[i], i};
    return last;
}

static void truncate_positions(const void *job, long first, long last) {
    const Truncate *a = job;
    long vocab = a->vocab;
    int64_t *weights = malloc(vocab * sizeof *weights);
    uint32_t *keys = malloc(vocab * sizeof *keys);
    for (long at = first; at < last; at++) {
        float *scores = a->scores + at * vocab, top = -INFINITY;
        for (long i = 0; i < vocab; i++) top = scores[i] > top ? scores[i] : top;
        for (long i = 0; i < vocab; i += WIDTH) {
            floats weight = exps(load_some(scores + i, vocab - i) - top) * (float)WHOLE;
            for (int j = 0; j < WIDTH && i + j < vocab; j++) {
                weights[i + j] = scores[i + j] > -INFINITY ? (int64_t)weight[j] : 0;
                keys[i + j] = key_of(scores[i + j]);
            }
        }
        Rank end = {0, vocab};
        if (a->top_k[at] < vocab) end = reach(keys, NULL, vocab, end, a->top_k[at]);
        int64_t total = 0, lowest = (int64_t)ceil((double)a->min_p[at] * WHOLE);
        for (long i = 0; i < vocab; i++) total += within(keys[i], i, end) ? weights[i] : 0;
        if (a->top_p[at] <= 1) end = reach(keys, weights, vocab, end, part_of(a->top_p[at], total));
        Rank good = {0xFFFFFFFFu, -1};  /* what is before it is too good */
        if (a->coin[at]) {
            total = 0;
            for (long i = 0; i < vocab; i++)
                total += within(keys[i], i, end) && weights[i] >= lowest ? weights[i] : 0;
            int64_t least = part_of(a->threshold[at], total);
            good = lightest(keys, weights, vocab, end, least > lowest ? least : lowest);
        }
        for (long i = 0; i < vocab; i++)
            if (!within(keys[i], i, end) || weights[i] < lowest || within(keys[i], i + 1, good)) scores[i] = -INFINITY;
    }
    free(weights);
    free(keys);
}

void truncate_scores(const Truncate *a) { share(truncate_positions, a, a->n, 1); }
