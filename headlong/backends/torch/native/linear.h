/* Products with weights: y [N, out] = x [N, in] w', weights in float32, bfloat16 or 8 bits.
 *
 * Each product of a weight row and a token is its own chain of sums over k, the same in every tile and for any number
 * of tokens.
 */
#define TILE 4  /* weight rows, and tokens, that share a pass */
#define CHUNK_BYTES (1 << 18)  /* weights in the largest chunk of a product: what is fetched past its end is wasted */
#define CHUNKS 8  /* of a smaller product, so that threads end together */

static inline long whole(long size, long block) { return (size + block - 1) / block * block; }

/* Share blocks of weight rows of so many bytes each. */
static void share_blocks(Work work, const void *job, long blocks, long bytes) {
    long most = CHUNK_BYTES / bytes, even = blocks / CHUNKS;
    share(work, job, blocks, even < most ? even : most);
}

/* ---- float32 and bfloat16 -------------------------------------------------------------------------------------- */

/* A block of bfloat16 is read as 16 words that hold two neighbours each: the even ones become floats by a shift, the
 * odd ones by a mask. So the tokens are laid out with the 16 even elements of each block first (see `ready`). */
#define BLOCK 32

static inline void multiply_f32(floats *sum, const float *w, floats even, floats odd) {
    *sum += load(w) * even;
    *sum += load(w + LANES) * odd;
}

static inline void multiply_bf16(floats *sum, const uint16_t *w, floats even, floats odd) {
    words pairs;
    memcpy(&pairs, w, sizeof pairs);
    *sum += (floats)(pairs << 16) * even;
    *sum += (floats)(pairs & 0xFFFF0000u) * odd;
}

typedef struct {
    float *y;
    const float *x;  /* [tokens, padded], as `ready` left it */
    const void *weight;
    long tokens, in, out, padded;
} Product;

/* `TOKENS` tokens by TILE weight rows, which may be one and the same past the end of the matrix. y rows are `out` apart. */
#define LINEAR_TILE(NAME, TYPE, MULTIPLY, TOKENS)                                                                   \
    static void NAME(float *y, const float *x, const TYPE *const w[TILE], const Product *p, long some) {            \
        floats sum[TOKENS][TILE] = {0};                                                                             \
        long in = p->in, padded = p->padded, k = 0;                                                                 \
        for (; k + BLOCK <= in; k += BLOCK)                                                                         \
            for (int n = 0; n < TILE; n++) {                                                                        \
                /* Rows are short streams: fetch the next tile's while this one's are multiplied. */                \
                __builtin_prefetch(w[n] + TILE * in + k, 0, 2);                                                     \
                if (sizeof(TYPE) == 4) __builtin_prefetch(w[n] + TILE * in + k + LANES, 0, 2);                      \
                for (int m = 0; m < TOKENS; m++)                                                                    \
                    MULTIPLY(&sum[m][n], w[n] + k, load(x + m * padded + k), load(x + m * padded + k + LANES));     \
            }                                                                                                       \
        if (k < in)                                                                                                 \
            for (int n = 0; n < TILE; n++) {                                                                        \
                TYPE tail[BLOCK] = {0};                                                                             \
                memcpy(tail, w[n] + k, sizeof(TYPE) * (in - k));                                                    \
                for (int m = 0; m < TOKENS; m++)                                                                    \
                    MULTIPLY(&sum[m][n], tail, load(x + m * padded + k), load(x + m * padded + k + LANES));         \
            }                                                                                                       \
        for (int m = 0; m < TOKENS; m++) {                                                                          \
            four sums = add_lanes4(sum[m]);                                                                         \
            memcpy(y + m * p->out, &sums, sizeof(float) * some);                                                    \
        }                                                                                                           \
    }

/* Tiles first .. last - 1 of the weight's rows. */
#define LINEAR(NAME, TYPE, MULTIPLY)                                                                                \
    LINEAR_TILE(NAME##_1, TYPE, MULTIPLY, 1)                                                                        \
    LINEAR_TILE(NAME##_2, TYPE, MULTIPLY, 2)                                                                        \
    LINEAR_TILE(NAME##_3, TYPE, MULTIPLY, 3)                                                                        \
    LINEAR_TILE(NAME##_4, TYPE, MULTIPLY, 4)                                                                        \
    static void NAME(const void *job, long first, long last) {                                                      \
        const Product *p = job;                                                                                     \
        for (long n = first * TILE; n < last * TILE; n += TILE) {                                                   \
            const TYPE *w[TILE];                                                                                    \
            long some = p->out - n < TILE ? p->out - n : TILE;                                                      \
            for (int i = 0; i < TILE; i++) w[i] = (const TYPE *)p->weight + (n + (i < some ? i : 0)) * p->in;       \
            for (long m = 0; m < p->tokens; m += TILE) {                                                            \
                float *y = p->y + m * p->out + n;                                                                   \
                const float *x = p->x + m * p->padded;                                                              \
                long count = p->tokens - m;                                                                         \
                if (count == 1) NAME##_1(y, x, w, p, some);                                                         \
                else if (count == 2) NAME##_2(y, x, w, p, some);                                                    \
                else if (count == 3) NAME##_3(y, x, w, p, some);                                                    \
                else NAME##_4(y, x, w, p, some);                                                                    \
            }                                                                                                       \
        }                                                                                                           \
    }

LINEAR(linear_wide, float, multiply_f32)
LINEAR(linear_half, uint16_t, multiply_bf16)

/* Tokens padded with zeros to whole blocks; for bfloat16 the even elements of each block come first. */
static float *ready(const float *x, long tokens, long in, long padded, long half) {
    float *to = aligned_alloc(64, sizeof(float) * tokens * padded);
    for (long m = 0; m < tokens; m++) {
        float *row = to + m * padded;
        memcpy(row, x + m * in, sizeof(float) * in);
        memset(row + in, 0, sizeof(float) * (padded - in));
        for (long start = 0; half && start < padded; start += BLOCK) {
            floats low = load(row + start), high = load(row + start + LANES);
            store(row + start, evens(low, high));
            store(row + start + LANES, odds(low, high));
        }
    }
    return to;
}

/* ---- many tokens ----------------------------------------------------------------------------------------------- */

/* The 16 lanes of a product's sum one after the other, each for many weight rows and tokens at once: the rows stand in
 * the lanes of a vector now, so no sum has to be taken apart. Lane l of a row's step i is what `ready` and the tiles
 * above have there, and the lanes are added in the order of `add_lanes`, so the bits are those of a few tokens. */
#define MANY 48  /* tokens from which the new order pays for itself */
#define BROAD 8  /* tokens, and vectors of weight rows, that share a pass: their sums fill the registers */
#define TALL 3
#define LEVELS 4  /* of additions over lanes */

static const int ADDED[LANES] = {0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15};

typedef struct {
    float *y;
    const float *x;
    const void *weight;
    long half;  /* the weight is bfloat16, else float32 */
    long tokens, in, out;
    long steps;     /* vectors in a row */
    float *packed;  /* [tokens / BROAD, LANES, steps, BROAD] */
} Many;

static inline floats token_step(const Many *a, long token, long step) {
    if (token >= a->tokens) return (floats){0};
    long start = step / 2 * BLOCK;
    const float *x = a->x + token * a->in + start;
    floats low = load_some(x, a->in - start), high = load_some(x + LANES, a->in - start - LANES);
    if (a->half) return step % 2 ? odds(low, high) : evens(low, high);
    return step % 2 ? high : low;
}

static inline floats half_step(const uint16_t *from, long left, long step) {
    words pairs = {0};
    if (left >= BLOCK) memcpy(&pairs, from, sizeof pairs);
    else if (left > 0) memcpy(&pairs, from, sizeof(uint16_t) * left);
    return step % 2 ? (floats)(pairs & 0xFFFF0000u) : (floats)(pairs << 16);
}

/* One step of LANES weight rows, zeros past the last. */
static inline void load_square(const Many *a, floats square[LANES], long row, long step) {
    long start = a->half ? step / 2 * BLOCK : step * LANES, left = a->in - start, at = row * a->in + start;
    const uint16_t *half = (const uint16_t *)a->weight + at;
    const float *wide = (const float *)a->weight + at;
    /* Loops without a choice inside where nothing is missing. */
    if (row + LANES <= a->out && left >= BLOCK && a->half)
        for (int n = 0; n < LANES; n++) square[n] = half_step(half + n * a->in, BLOCK, step);
    else if (row + LANES <= a->out && left >= LANES && !a->half)
        for (int n = 0; n < LANES; n++) square[n] = load(wide + n * a->in);
    else
        for (int n = 0; n < LANES; n++) {
            long some = row + n < a->out ? left : 0;
            square[n] = a->half ? half_step(half + n * a->in, some, step) : load_some(wide + n * a->in, some);
        }
}

/* Tiles first .. last - 1 of BROAD tokens. */
static void pack_tokens(const void *job, long first, long last) {
    const Many *a = job;
    for (long tile = first; tile < last; tile++)
        for (long i = 0; i < a->steps; i++) {
            floats square[LANES] = {0};
            for (int m = 0; m < BROAD; m++) square[m] = token_step(a, tile * BROAD + m, i);
            transpose(square);
            for (int j = 0; j < LANES; j++)
                memcpy(a->packed + ((tile * LANES + j) * a->steps + i) * BROAD, &square[ADDED[j]], sizeof(float) * BROAD);
        }
}

/* TALL vectors of weight rows from row n on, to [LANES][apart], of which [steps][TALL] vectors each are used. */
static void pack_weights(const Many *a, floats *to, long n, long apart) {
    for (long v = 0; v < TALL; v++)
        for (long i = 0; i < a->steps; i++) {
            floats square[LANES];
            load_square(a, square, n + v * LANES, i);
            transpose(square);
            for (int j = 0; j < LANES; j++) to[j * apart + i * TALL + v] = square[ADDED[j]];
        }
}

/* BROAD tokens by TALL vectors of weight rows; waiting[LEVELS] is what they come to. */
static void multiply_many(floats waiting[LEVELS + 1][BROAD][TALL], const float *x, const floats *w, long steps,
                          long apart) {
    for (int j = 0; j < LANES; j++, x += steps * BROAD, w += apart) {
        floats sum[BROAD][TALL] = {0};
        for (long i = 0; i < steps; i++)
            for (int m = 0; m < BROAD; m++)
                for (int n = 0; n < TALL; n++) sum[m][n] += x[i * BROAD + m] * w[i * TALL + n];
        int level = 0;
        for (; j >> level & 1; level++)
            for (int m = 0; m < BROAD; m++)
                for (int n = 0; n < TALL; n++) sum[m][n] += waiting[level][m][n];
        for (int m = 0; m < BROAD; m++)
            for (int n = 0; n < TALL; n++) waiting[level][m][n] = sum[m][n];
    }
}

/* The part of the weight rows from row n on that is fetched while the tile of tokens at m is multiplied. */
static void fetch_weights(const Many *a, long n, long m) {
    long bytes = a->in * (a->half ? 2 : 4), rows = a->out - n < TALL * LANES ? a->out - n : TALL * LANES;
    if (rows <= 0) return;
    const char *from = (const char *)a->weight + n * bytes;
    long first = rows * bytes * m / a->tokens, last = rows * bytes * (m + BROAD) / a->tokens;
    for (long at = first; at < last && at < rows * bytes; at += 64) __builtin_prefetch(from + at, 0, 2);
}

/* Tiles first .. last - 1 of TALL vectors of weight rows. */
static void linear_many(const void *job, long first, long last) {
    const Many *a = job;
    long apart = a->steps * TALL + 1;  /* odd, or lanes of many sizes would meet in one set of the cache */
    floats *w = aligned_alloc(64, sizeof(floats) * LANES * apart), waiting[LEVELS + 1][BROAD][TALL];
    for (long n = first * TALL * LANES; n < last * TALL * LANES; n += TALL * LANES) {
        pack_weights(a, w, n, apart);
        for (long m = 0; m < a->tokens; m++) {
            if (m % BROAD == 0) {
                fetch_weights(a, n + TALL * LANES, m);
                multiply_many(waiting, a->packed + m * LANES * a->steps, w, a->steps, apart);
            }
            long some = a->out - n < TALL * LANES ? a->out - n : TALL * LANES;
            memcpy(a->y + m * a->out + n, waiting[LEVELS][m % BROAD], sizeof(float) * some);
        }
    }
    free(w);
}

typedef struct {
    float *y;
    const float *x;
    const void *weight;
    long half;  /* the weight is bfloat16, else float32 */
    long tokens, in, out;
} Linear;

static void share_many(const Linear *a, long steps) {
    long tiles = (a->tokens + BROAD - 1) / BROAD;
    float *packed = aligned_alloc(64, sizeof(floats) * tiles * steps * BROAD);
    Many job = {a->y, a->x, a->weight, a->half, a->tokens, a->in, a->out, steps, packed};
    share(pack_tokens, &job, tiles, 4);
    share(linear_many, &job, (a->out + TALL * LANES - 1) / (TALL * LANES), 1);
    free(packed);
}

void linear(const Linear *a) {
    long padded = whole(a->in, BLOCK), bytes = a->in * (a->half ? 2 : 4);
    if (a->tokens >= MANY) {
        share_many(a, padded / LANES);
        return;
    }
    float *made = a->half || padded > a->in ? ready(a->x, a->tokens, a->in, padded, a->half) : NULL;
    Product job = {a->y, made ? made : a->x, a->weight, a->tokens, a->in, a->out, padded};
    share_blocks(a->half ? linear_half : linear_wide, &job, (a->out + TILE - 1) / TILE, TILE * bytes);
    free(made);
}

/* ---- 8 bits ---------------------------------------------------------------------------------------------------- */

/* Weights are codes 1 .. 255 around 128 with a scale for each row, tokens codes -127 .. 127 with a scale for each
 * group of them. Sums inside a group are whole numbers, so they are the same on every machine.
 *
 * Weights are packed: rows stand side by side in the lanes of a vector, four codes of each, STACK vectors to a band. So
 * no sum has to be taken apart, and a band is read from end to end. */
#if defined(__AVX512F__)
#define STACK 3  /* vectors of weight rows that share a pass with TILE tokens: their sums fill the registers */
#else
#define STACK 1
#endif
#define BAND (STACK * LANES)  /* weight rows */
#define FOURS 16  /* words of four codes in a group */
#define AHEAD 4096  /* bytes that are fetched before their turn */

const long band_rows = BAND;

typedef struct {
    float *y;
    const float *x;
    const void *packed;   /* [bands, in / 4, BAND, 4] */
    const float *scales;  /* [bands, BAND] */
    long tokens, size, in, out;  /* x has `size` columns, the weight `in`, whole groups */
} LinearInt8;

typedef struct {
    const LinearInt8 *of;
    int32_t *codes;   /* [tokens, in / 4] */
    int32_t *starts;  /* [tokens, groups]: what a sum over the group begins with, which takes the 128 off every weight */
    float *scales;    /* [tokens, groups] */
} ByteProduct;

/* A group of one token. */
static void encode(const float *x, long left, int32_t *codes, int32_t *start, float *scale) {
    floats parts[4], most = {0};
    for (int i = 0; i < 4; i++) {
        parts[i] = load_some(x + i * LANES, left - i * LANES);
        floats size = (floats)((words)parts[i] & 0x7FFFFFFFu);
        most = pick(size > most, size, most);
    }
    float largest = 0.0f;
    for (int i = 0; i < LANES; i++) largest = most[i] > largest ? most[i] : largest;
    float by = largest > 0.0f ? 127.0f / largest : 0.0f;
    ints sum = {0};
    for (int i = 0; i < 4; i++) {
        floats half = (floats)(((words)parts[i] & 0x80000000u) | (words)((floats){0} + 0.5f));
        ints rounded = __builtin_convertvector(parts[i] * by + half, ints);
        sum += rounded;
        narrow narrowed = __builtin_convertvector(rounded, narrow);
        memcpy(codes + i * 4, &narrowed, sizeof narrowed);
    }
    *start = 0;
    for (int i = 0; i < LANES; i++) *start -= 128 * sum[i];
    *scale = largest / 127.0f;
}

/* `tokens` is a constant wherever this is called, so that every count has loops of its own. */
static inline __attribute__((always_inline)) void multiply_bytes(const ByteProduct *p, long band, long m,
                                                                 const int tokens) {
    const LinearInt8 *a = p->of;
    long fours = a->in / 4, groups = fours / FOURS, n = band * BAND;
    const uint8_t *w = (const uint8_t *)a->packed + n * a->in;
    floats sum[TILE][STACK] = {0};
    for (long g = 0; g < groups; g++) {
        ints part[TILE][STACK];
        for (int j = 0; j < tokens; j++)
            for (int i = 0; i < STACK; i++) part[j][i] = (ints){0} + p->starts[(m + j) * groups + g];
        for (long k = g * FOURS; k < (g + 1) * FOURS; k++, w += BAND * 4) {
            bytes at[STACK];
            for (int i = 0; i < STACK; i++) {
                memcpy(&at[i], w + i * LANES * 4, sizeof at[i]);
                if (!m) __builtin_prefetch(w + AHEAD + i * LANES * 4, 0, 2);
            }
            for (int j = 0; j < tokens; j++)
                for (int i = 0; i < STACK; i++)
                    part[j][i] = add_products(part[j][i], at[i], (bytes)((ints){0} + p->codes[(m + j) * fours + k]));
        }
        for (int j = 0; j < tokens; j++)
            for (int i = 0; i < STACK; i++)
                sum[j][i] += __builtin_convertvector(part[j][i], floats) * p->scales[(m + j) * groups + g];
    }
    for (int j = 0; j < tokens; j++) {
        for (int i = 0; i < STACK; i++) sum[j][i] *= load(a->scales + n + i * LANES);
        memcpy(a->y + (m + j) * a->out + n, sum[j], sizeof(float) * (a->out - n < BAND ? a->out - n : BAND));
    }
}

/* Bands first .. last - 1. */
static void linear_bytes(const void *job, long first, long last) {
    const ByteProduct *p = job;
    for (long band = first; band < last; band++)
        for (long m = 0; m < p->of->tokens; m += TILE) {
            long count = p->of->tokens - m;
            if (count == 1) multiply_bytes(p, band, m, 1);
            else if (count == 2) multiply_bytes(p, band, m, 2);
            else if (count == 3) multiply_bytes(p, band, m, 3);
            else multiply_bytes(p, band, m, 4);
        }
}

void linear_int8(const LinearInt8 *a) {
    long fours = a->in / 4, groups = fours / FOURS;
    int32_t *made = malloc(sizeof(int32_t) * a->tokens * (fours + 2 * groups));
    ByteProduct job = {a, made, made + a->tokens * fours, (float *)made + a->tokens * (fours + groups)};
    for (long m = 0; m < a->tokens; m++)
        for (long g = 0; g < groups; g++)
            encode(a->x + m * a->size + g * FOURS * 4, a->size - g * FOURS * 4, job.codes + m * fours + g * FOURS,
                   job.starts + m * groups + g, job.scales + m * groups + g);
    share_blocks(linear_bytes, &job, (a->out + BAND - 1) / BAND, BAND * a->in);
    free(made);
}
