/* Noise that belongs to a position: the numbers of kernels/noise.py. */

static inline uint32_t mix_word(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
}

static inline words mix_words(words x) {
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
}

/* (word + 1/2) / 2^32, rounded once, below 1. */
static inline floats units(words x) {
    float u[WIDTH];
    for (int i = 0; i < WIDTH; i++) u[i] = (float)(((double)x[i] + 0.5) * 0x1p-32);
    floats v = load(u);
    return pick(v > 1.0f - 0x1p-24f, (floats){0} + (1.0f - 0x1p-24f), v);
}

/* The natural logarithm of normal positive floats, to about two units in the last place: x = 2^n m with m from
 * 1/sqrt(2) to sqrt(2), and log m = 2 atanh((m - 1) / (m + 1)). */
static inline floats logs(floats x) {
    ints bits = (ints)x;
    ints n = (bits - 0x3F3504F3) >> 23;
    floats m = (floats)(bits - (n << 23));
    floats s = (m - 1.0f) / (m + 1.0f), t = s * s;
    floats series = t * (1.0f / 11) + 1.0f / 9;
    series = series * t + 1.0f / 7;
    series = series * t + 1.0f / 5;
    series = series * t + 1.0f / 3;
    floats whole = __builtin_convertvector(n, floats);
    floats small = whole * 1.42860677e-6f + 2.0f * s * t * series;
    return whole * 0.693145752f + (2.0f * s + small);
}

/* -log(-log(1 - u)); what 1 - u loses of a small u is added back. */
static inline floats gumbels(floats u) {
    floats rest = 1.0f - u, lost = (1.0f - rest) - u;
    return -logs(-(logs(rest) + lost / rest));
}

/* Two words of a seed, a stream and a position; all bits depend on all. */
typedef struct {
    uint32_t low, high;
} Keys;

static inline Keys keys_of(uint64_t seed, uint32_t stream, uint64_t position) {
    uint32_t low = mix_word((uint32_t)seed ^ stream * 0x9E3779B9u);
    uint32_t high = mix_word(((uint32_t)(seed >> 32) ^ stream * 0x85EBCA6Bu) + low);
    low = mix_word(low ^ high);
    low ^= mix_word((uint32_t)position);
    high += mix_word((uint32_t)position ^ 0x5BD1E995u);
    return (Keys){mix_word(low), mix_word(high)};
}

/* Between 0 and 1. */
static inline double chance(Keys keys) { return (mix_word(keys.low ^ keys.high) + 0.5) * 0x1p-32; }

/* Standard Gumbel noise of some tokens. */
static inline floats noise_of(words tokens, Keys keys) {
    return gumbels(units(mix_words(mix_words(tokens ^ keys.low) ^ keys.high)));
}

typedef struct {
    float *y;  /* [B, W, vocab] */
    const int64_t *seeds, *streams, *positions;  /* [B], [B], [B, W] */
    long batch, width, vocab;
} Gumbel;

static void gumbel_positions(const void *job, long first, long last) {
    const Gumbel *a = job;
    words lanes;
    for (int i = 0; i < WIDTH; i++) lanes[i] = i;
    for (long at = first; at < last; at++) {
        Keys keys = keys_of(a->seeds[at / a->width], a->streams[at / a->width], a->positions[at]);
        float *y = a->y + at * a->vocab;
        MAP(y, a->vocab, noise_of(lanes + (uint32_t)i, keys));
    }
}

/* Standard Gumbel noise for every token of every position. */
void gumbel(const Gumbel *a) { share(gumbel_positions, a, a->batch * a->width, 1); }
