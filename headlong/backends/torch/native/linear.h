/* Products with weights: y [N, out] = x [N, in] w', weights in float32, bfloat16 or 8 bits.
 *
 * Each product of a weight row and a token is its own chain of sums over k, the same in every tile and for any number
 * of tokens.
 */
#define TILE 4  /* weight rows that share a pass */
#if PIECE == 8
#define SHARED 3  /* tokens that do: their sums fill the registers, of which there are 16 of this width */
#else
#define SHARED 4
#endif
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

/* One piece of a block's weights: of its first 16 lanes, or of the others. */
static inline piece wide_piece(const float *block, long part, long odd) {
    return load_piece(block + part * PIECE + odd * LANES);
}

static inline piece half_piece(const uint16_t *block, long part, long odd) {
    piece_words pairs;
    memcpy(&pairs, block + part * 2 * PIECE, sizeof pairs);
    return odd ? (piece)(pairs & 0xFFFF0000u) : (piece)(pairs << 16);
}

typedef struct {
    float *y;
    const float *x;  /* [tokens, padded], as `ready` left it */
    const void *weight;
    long tokens, in, out, padded;
} Product;

/* `TOKENS` tokens by TILE weight rows, which may be one and the same past the end of the matrix. y rows are `out` apart.
 * Pieces come one after the other, so that the sums of one fit the registers. */
#define LINEAR_TILE(NAME, TYPE, TAKE, TOKENS)                                                                       \
    static inline __attribute__((always_inline)) void NAME##_block(piece sum[TOKENS][TILE], const float *x,         \
                                                                   const TYPE *const w[TILE], long padded,          \
                                                                   long part) {                                     \
        for (long odd = 0; odd < 2; odd++) {                                                                        \
            piece token[TOKENS];                                                                                    \
            for (int m = 0; m < TOKENS; m++) token[m] = load_piece(x + m * padded + part * PIECE + odd * LANES);    \
            for (int n = 0; n < TILE; n++) {                                                                        \
                piece weight = TAKE(w[n], part, odd);                                                               \
                for (int m = 0; m < TOKENS; m++) sum[m][n] += weight * token[m];                                    \
            }                                                                                                       \
        }                                                                                                           \
    }                                                                                                               \
    static void NAME(float *y, const float *x, const TYPE *const w[TILE], const Product *p, long some) {            \
        piece sums[PIECES][TOKENS][TILE];                                                                           \
        long in = p->in, padded = p->padded;                                                                        \
        for (long part = 0; part < PIECES; part++) {                                                                \
            piece sum[TOKENS][TILE] = {0};                                                                          \
            long k = 0;                                                                                             \
            for (; k + BLOCK <= in; k += BLOCK) {                                                                   \
                const TYPE *const at[TILE] = {w[0] + k, w[1] + k, w[2] + k, w[3] + k};                              \
                /* Rows are short streams: fetch the next tile's while this one's are multiplied. */                \
                for (int n = 0; n < TILE; n++) {                                                                    \
                    __builtin_prefetch(at[n] + TILE * in, 0, 2);                                                    \
                    if (sizeof(TYPE) == 4) __builtin_prefetch(at[n] + TILE * in + LANES, 0, 2);                     \
                }                                                                                                   \
                NAME##_block(sum, x + k, at, padded, part);                                                         \
            }                                                                                                       \
            if (k < in) {                                                                                           \
                TYPE tail[TILE][BLOCK] = {0};                                                                       \
                for (int n = 0; n < TILE; n++) memcpy(tail[n], w[n] + k, sizeof(TYPE) * (in - k));                  \
                NAME##_block(sum, x + k, (const TYPE *const[TILE]){tail[0], tail[1], tail[2], tail[3]}, padded, part);\
            }                                                                                                       \
            memcpy(sums[part], sum, sizeof sum);                                                                    \
        }                                                                                                           \
        for (int m = 0; m < TOKENS; m++) {                                                                          \
            four sum = add_lanes4(sums[0][m], TOKENS * TILE);                                                       \
            memcpy(y + m * p->out, &sum, sizeof(float) * some);                                                     \
        }                                                                                                           \
    }

/* Tiles first .. last - 1 of the weight's rows. */
#define LINEAR(NAME, TYPE, TAKE)                                                                                    \
    LINEAR_TILE(NAME##_1, TYPE, TAKE, 1)                                                                            \
    LINEAR_TILE(NAME##_2, TYPE, TAKE, 2)                                                                            \
    LINEAR_TILE(NAME##_3, TYPE, TAKE, 3)                                                                            \
    LINEAR_TILE(NAME##_4, TYPE, TAKE, 4)                                                                            \
    static void NAME(const void *job, long first, long last) {                                                      \
        const Product *p = job;                                                                                     \
        for (long n = first * TILE; n < last * TILE; n += TILE) {                                                   \
            const TYPE *w[TILE];                                                                                    \
            long some = p->out - n < TILE ? p->out - n : TILE;                                                      \
            for (int i = 0; i < TILE; i++) w[i] = (const TYPE *)p->weight + (n + (i < some ? i : 0)) * p->in;       \
            for (long m = 0; m < p->tokens; m += SHARED) {                                                          \
                float *y = p->y + m * p->out + n;                                                                   \
                const float *x = p->x + m * p->padded;                                                              \
                long count = p->tokens - m < SHARED ? p->tokens - m : SHARED;                                       \
                if (count == 1) NAME##_1(y, x, w, p, some);                                                         \
                else if (count == 2) NAME##_2(y, x, w, p, some);                                                    \
                else if (count == 3) NAME##_3(y, x, w, p, some);                                                    \
                else NAME##_4(y, x, w, p, some);                                                                    \
            }                                                                                                       \
        }                                                                                                           \
    }

LINEAR(linear_wide, float, wide_piece)
LINEAR(linear_half, uint16_t, half_piece)

/* Tokens padded with zeros to whole blocks; for bfloat16 the even elements of each block come first. */
static float *ready(const float *x, long tokens, long in, long padded, long half) {
    float *to = aligned_alloc(64, sizeof(float) * tokens * padded);
    for (long m = 0; m < tokens; m++) {
        float *row = to + m * padded;
        memcpy(row, x + m * in, sizeof(float) * in);
        memset(row + in, 0, sizeof(float) * (padded - in));
        for (long start = 0; half && start < padded; start += BLOCK) {
            float block[BLOCK];
            memcpy(block, row + start, sizeof block);
            for (int i = 0; i < LANES; i++) row[start + i] = block[2 * i], row[start + LANES + i] = block[2 * i + 1];
        }
    }
    return to;
}

/* ---- many tokens ----------------------------------------------------------------------------------------------- */

/* The 16 lanes of a product's sum one after the other, each for many weight rows and tokens at once: the rows stand in
 * the lanes of a piece now, so no sum has to be taken apart. Lane l of a row's step i is what `ready` and the tiles
 * above have there, and the lanes are added in the order of `add_lanes`, so the bits are those of a few tokens. Their
 * turns are their own numbers' bits in reverse, so a turn's lane is found as a lane's turn is. */
#define MANY 48  /* tokens from which the new order pays for itself */
#if PIECE == 8
#define BROAD 4  /* tokens, and pieces of weight rows, that share a pass: their sums fill the registers */
#else
#define BROAD 8
#endif
#define TALL 3
#define STRIP (TALL * PIECE)  /* weight rows of a pass */
#define LEVELS 4  /* of additions over lanes */

static const int TURN[LANES] = {0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15};

typedef struct {
    float *y;
    const float *x;
    const void *weight;
    long half;  /* the weight is bfloat16, else float32 */
    long tokens, in, out;
    long steps;     /* vectors in a row */
    float *packed;  /* [tokens / BROAD, LANES, steps, BROAD] */
} Many;

/* One piece of a token's step. */
static inline piece token_step(const Many *a, long token, long step, long part) {
    long start = a->half ? step / 2 * BLOCK + part * 2 * PIECE + step % 2 : step * LANES + part * PIECE;
    long left = token < a->tokens ? a->in - start : 0;
    const float *x = a->x + token * a->in + start;
    if (!a->half) return load_left(x, left);
    piece v = {0};
    for (int i = 0; i < PIECE && 2 * i < left; i++) v[i] = x[2 * i];
    return v;
}

static inline piece half_step(const uint16_t *from, long left, long step) {
    piece_words pairs = {0};
    if (left >= 2 * PIECE) memcpy(&pairs, from, sizeof pairs);
    else if (left > 0) memcpy(&pairs, from, sizeof(uint16_t) * left);
    return step % 2 ? (piece)(pairs & 0xFFFF0000u) : (piece)(pairs << 16);
}

/* One piece of a step of PIECE weight rows, zeros past the last. */
static inline void load_square(const Many *a, piece square[PIECE], long row, long step, long part) {
    long start = a->half ? step / 2 * BLOCK + part * 2 * PIECE : step * LANES + part * PIECE, left = a->in - start;
    const uint16_t *half = (const uint16_t *)a->weight + row * a->in + start;
    const float *wide = (const float *)a->weight + row * a->in + start;
    /* Loops without a choice inside where nothing is missing. */
    if (row + PIECE <= a->out && left >= 2 * PIECE && a->half)
        for (int n = 0; n < PIECE; n++) square[n] = half_step(half + n * a->in, 2 * PIECE, step);
    else if (row + PIECE <= a->out && left >= PIECE && !a->half)
        for (int n = 0; n < PIECE; n++) square[n] = load_piece(wide + n * a->in);
    else
        for (int n = 0; n < PIECE; n++) {
            long some = row + n < a->out ? left : 0;
            square[n] = a->half ? half_step(half + n * a->in, some, step) : load_left(wide + n * a->in, some);
        }
}

/* Tiles first .. last - 1 of BROAD tokens. */
static void pack_tokens(const void *job, long first, long last) {
    const Many *a = job;
    for (long tile = first; tile < last; tile++)
        for (long i = 0; i < a->steps; i++)
            for (long part = 0; part < PIECES; part++) {
                piece square[PIECE] = {0};
                for (int m = 0; m < BROAD; m++) square[m] = token_step(a, tile * BROAD + m, i, part);
                transpose(square);
                for (int lane = 0; lane < PIECE; lane++)
                    memcpy(a->packed + ((tile * LANES + TURN[part * PIECE + lane]) * a->steps + i) * BROAD, &square[lane],
                           sizeof(float) * BROAD);
            }
}

/* TALL pieces of weight rows from row n on, to [LANES][apart], of which [steps][TALL] pieces each are used. */
static void pack_weights(const Many *a, piece *to, long n, long apart) {
    for (long v = 0; v < TALL; v++)
        for (long i = 0; i < a->steps; i++)
            for (long part = 0; part < PIECES; part++) {
                piece square[PIECE];
                load_square(a, square, n + v * PIECE, i, part);
                transpose(square);
                for (int lane = 0; lane < PIECE; lane++) to[TURN[part * PIECE + lane] * apart + i * TALL + v] = square[lane];
            }
}

/* BROAD tokens by TALL pieces of weight rows; waiting[LEVELS] is what they come to. */
static void multiply_many(piece waiting[LEVELS + 1][BROAD][TALL], const float *x, const piece *w, long steps,
                          long apart) {
    for (int j = 0; j < LANES; j++, x += steps * BROAD, w += apart) {
        piece sum[BROAD][TALL] = {0};
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
    long bytes = a->in * (a->half ? 2 : 4), rows = a->out - n < STRIP ? a->out - n : STRIP;
    if (rows <= 0) return;
    const char *from = (const char *)a->weight + n * bytes;
    long first = rows * bytes * m / a->tokens, last = rows * bytes * (m + BROAD) / a->tokens;
    for (long at = first; at < last && at < rows * bytes; at += 64) __builtin_prefetch(from + at, 0, 2);
}

/* Tiles first .. last - 1 of TALL pieces of weight rows. */
static void linear_many(const void *job, long first, long last) {
    const Many *a = job;
    long apart = a->steps * TALL + 1;  /* odd, or lanes of many sizes would meet in one set of the cache */
    piece *w = aligned_alloc(64, sizeof(piece) * LANES * apart), waiting[LEVELS + 1][BROAD][TALL];
    for (long n = first * STRIP; n < last * STRIP; n += STRIP) {
        pack_weights(a, w, n, apart);
        for (long m = 0; m < a->tokens; m++) {
            if (m % BROAD == 0) {
                fetch_weights(a, n + STRIP, m);
                multiply_many(waiting, a->packed + m * LANES * a->steps, w, a->steps, apart);
            }
            long some = a->out - n < STRIP ? a->out - n : STRIP;
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
    float *packed = aligned_alloc(64, sizeof(float) * tiles * LANES * steps * BROAD);
    Many job = {a->y, a->x, a->weight, a->half, a->tokens, a->in, a->out, steps, packed};
    share(pack_tokens, &job, tiles, 4);
    share(linear_many, &job, (a->out + STRIP - 1) / STRIP, 1);
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
 * Weights are packed: rows stand side by side in the lanes of a piece, four codes of each, STACK pieces to a band. So
 * no sum has to be taken apart, and a band is read from end to end. */
#if PIECE == 16
#define STACK 3  /* pieces of weight rows that share a pass with SHARED tokens: their sums fill the registers */
#else
#define STACK 2
#endif
#define BAND (STACK * PIECE)  /* weight rows */
#define FOURS 16  /* words of four codes in a group */
#define GROUP (4 * FOURS)
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
    int32_t *codes;   /* [tokens, in / 4, CODE] */
    int32_t *starts;  /* [tokens, groups]: what a sum over the group begins with, which takes the 128 off every weight */
    float *scales;    /* [tokens, groups] */
} ByteProduct;

/* A group of one token. */
static void encode(const float *x, long left, int32_t *codes, int32_t *start, float *scale) {
    float group[GROUP] = {0}, largest = 0.0f;
    int32_t rounded[GROUP], sum = 0;
    memcpy(group, x, sizeof(float) * (left < GROUP ? left : GROUP));
    piece most = {0};
    for (int i = 0; i < GROUP; i += PIECE) {
        piece size = (piece)((piece_words)load_piece(group + i) & 0x7FFFFFFFu);
        piece_ints more = size > most;
        most = (piece)((more & (piece_ints)size) | (~more & (piece_ints)most));
    }
    for (int i = 0; i < PIECE; i++) largest = most[i] > largest ? most[i] : largest;
    float by = largest > 0.0f ? 127.0f / largest : 0.0f;
    for (int i = 0; i < GROUP; i++) rounded[i] = (int32_t)(group[i] * by + copysignf(0.5f, group[i]));
    for (int i = 0; i < GROUP; i++) sum += rounded[i];
    for (int i = 0; i < FOURS; i++) {
        const int32_t *four = rounded + 4 * i;
        for (int j = 0; j < CODE; j++)
            codes[CODE * i + j] = CODE == 2 ? (four[j] & 0xFFFF) | (int32_t)((uint32_t)four[j + 2] << 16)
                                            : (int32_t)((four[0] & 0xFFu) | (four[1] & 0xFFu) << 8 |
                                                        (four[2] & 0xFFu) << 16 | (four[3] & 0xFFu) << 24);
    }
    *start = -128 * sum;
    *scale = largest / 127.0f;
}

/* `tokens` is a constant wherever this is called, so that every count has loops of its own. */
static inline __attribute__((always_inline)) void multiply_bytes(const ByteProduct *p, long band, long m,
                                                                 const int tokens) {
    const LinearInt8 *a = p->of;
    long fours = a->in / 4, groups = fours / FOURS, n = band * BAND;
    const uint8_t *w = (const uint8_t *)a->packed + n * a->in;
    piece sum[SHARED][STACK] = {0};
    for (long g = 0; g < groups; g++) {
        piece_ints part[SHARED][STACK];
        for (int j = 0; j < tokens; j++)
            for (int i = 0; i < STACK; i++) part[j][i] = (piece_ints){0} + p->starts[(m + j) * groups + g];
        for (long k = g * FOURS; k < (g + 1) * FOURS; k++, w += BAND * 4) {
            weights at[STACK];
            for (int i = 0; i < STACK; i++) {
                piece_words four;
                memcpy(&four, w + i * PIECE * 4, sizeof four);
                at[i] = ready_weights(four);
                if (!m) __builtin_prefetch(w + AHEAD + i * PIECE * 4, 0, 2);
            }
            for (int j = 0; j < tokens; j++)
                for (int i = 0; i < STACK; i++)
                    part[j][i] = add_products(part[j][i], at[i], p->codes + ((m + j) * fours + k) * CODE);
        }
        for (int j = 0; j < tokens; j++)
            for (int i = 0; i < STACK; i++)
                sum[j][i] += __builtin_convertvector(part[j][i], piece) * p->scales[(m + j) * groups + g];
    }
    for (int j = 0; j < tokens; j++) {
        for (int i = 0; i < STACK; i++) sum[j][i] *= load_piece(a->scales + n + i * PIECE);
        memcpy(a->y + (m + j) * a->out + n, sum[j], sizeof(float) * (a->out - n < BAND ? a->out - n : BAND));
    }
}

/* Bands first .. last - 1. */
static void linear_bytes(const void *job, long first, long last) {
    const ByteProduct *p = job;
    for (long band = first; band < last; band++)
        for (long m = 0; m < p->of->tokens; m += SHARED) {
            long count = p->of->tokens - m < SHARED ? p->of->tokens - m : SHARED;
            if (count == 1) multiply_bytes(p, band, m, 1);
            else if (count == 2) multiply_bytes(p, band, m, 2);
            else if (count == 3) multiply_bytes(p, band, m, 3);
            else multiply_bytes(p, band, m, SHARED);
        }
}

void linear_int8(const LinearInt8 *a) {
    long fours = a->in / 4, groups = fours / FOURS;
    int32_t *made = malloc(sizeof(int32_t) * a->tokens * (fours * CODE + 2 * groups)), *starts = made + a->tokens * fours * CODE;
    ByteProduct job = {a, made, starts, (float *)starts + a->tokens * groups};
    for (long m = 0; m < a->tokens; m++)
        for (long g = 0; g < groups; g++)
            encode(a->x + m * a->size + g * GROUP, a->size - g * GROUP, job.codes + (m * fours + g * FOURS) * CODE,
                   job.starts + m * groups + g, job.scales + m * groups + g);
    share_blocks(linear_bytes, &job, (a->out + BAND - 1) / BAND, BAND * a->in);
    free(made);
}
