/* Products with weights: y [N, out] = x [N, in] w', weights in float32, bfloat16 or 8 bits.
 *
 * Weights are packed: rows stand side by side in the lanes of a vector, TALL vectors to a strip, so no sum has to be taken
 * apart, and a strip is read from end to end.
 */
#define CHUNK_BYTES (1 << 18)  /* weights in the largest chunk of a product: what is fetched past its end is wasted */
#define AHEAD 8192  /* bytes of them that are fetched before their turn */
#define CHUNKS 8  /* of a smaller product, so that threads end together */

static inline long whole(long size, long block) { return (size + block - 1) / block * block; }

/* Share blocks of weight rows of so many bytes each. */
static void share_blocks(Work work, const void *job, long blocks, long bytes) {
    long most = CHUNK_BYTES / bytes, even = blocks / CHUNKS;
    share(work, job, blocks, even < most ? even : most);
}

/* ---- float32 and bfloat16 -------------------------------------------------------------------------------------- */

/* Each product of a weight row and a token is LANES sums, of every sixteenth element each, added in the order of
 * `add_lanes`; the same for any number of tokens. Lanes come one after the other, in turns that are their own numbers'
 * bits in reverse, so that what waits to be added is little. */
#if WIDTH == 16
#define BROAD 8  /* tokens, and vectors of weight rows, that share a pass: their sums fill the registers */
#else
#define BROAD 4
#endif
#define TALL 3
#define STRIP (TALL * WIDTH)  /* weight rows of a pass */
#define LEVELS 4  /* of additions over lanes */
#define BLOCK 32  /* elements: rows are whole blocks, zeros past their end */
#define CROWD 4  /* tiles of tokens that share a lane's weights */

const long strip_rows = STRIP;
static const int TURN[LANES] = {0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15};

typedef struct {
    float *y;
    const float *x;
    const void *packed;  /* [strips, LANES, steps, STRIP]; of bfloat16 two steps are a word */
    long half;           /* the weight is bfloat16, else float32 */
    long tokens, in, out;
} Linear;

typedef struct {
    const Linear *of;
    const float *x;    /* tokens as they are multiplied: */
    long tile, apart;  /* so far from one another are tiles of BROAD tokens, the tokens of a tile, */
    long lane, step;   /* its lanes, and the steps of a lane */
    long steps;        /* vectors in a row */
} Product;

/* What waits to be added, of one tile and a strip. */
typedef struct {
    floats at[LEVELS + 1][BROAD][TALL];
} Waiting;

/* One lane of `tokens` of the tile at token m and a strip's weight rows w. `tokens` and `half` are constants wherever this
 * is called, so that each has loops of its own. Steps come in their order, of bfloat16 the even ones first. */
static inline __attribute__((always_inline)) void multiply_lane(Waiting *waiting, const Product *p, const words *w,
                                                                int turn, long m, const int tokens, const int half) {
    const long each = half ? 2 : 1;
    floats sum[BROAD][TALL] = {0};
    for (long odd = 0; odd < each; odd++) {
        const float *x = p->x + m / BROAD * p->tile + TURN[turn] * p->lane + odd * p->step;
        for (long i = 0; i < p->steps / each; i++, x += each * p->step) {
            floats at[TALL];
            for (int n = 0; n < TALL; n++) {
                const words *from = w + i * TALL + n;
                at[n] = half ? (floats)(odd ? *from & 0xFFFF0000u : *from << 16) : (floats)*from;
                HOLD(at[n]);  /* compilers would rather read it again for every token */
                if (!odd && !m) __builtin_prefetch((const char *)from + AHEAD, 0, 2);
            }
            for (int t = 0; t < tokens; t++)
                for (int n = 0; n < TALL; n++) sum[t][n] += x[t * p->apart] * at[n];
        }
    }
    int level = 0;
    for (; turn >> level & 1; level++)
        for (int t = 0; t < tokens; t++)
            for (int n = 0; n < TALL; n++) sum[t][n] += waiting->at[level][t][n];
    for (int t = 0; t < tokens; t++)
        for (int n = 0; n < TALL; n++) waiting->at[level][t][n] = sum[t][n];
}

/* A strip by up to CROWD tiles from token `first` on: every lane's weights are read once and multiplied while they are
 * near. */
static inline __attribute__((always_inline)) void multiply_strip(const Product *p, long strip, long first, const int half) {
    Waiting waiting[CROWD];
    long out = p->of->out, n = strip * STRIP, some = out - n < STRIP ? out - n : STRIP, size = p->steps / (half ? 2 : 1) * TALL;
    long last = p->of->tokens - first < CROWD * BROAD ? p->of->tokens : first + CROWD * BROAD;
    const words *w = (const words *)p->of->packed + strip * LANES * size;
    for (int turn = 0; turn < LANES; turn++, w += size)
        for (long m = first; m < last; m += BROAD) {
            Waiting *to = waiting + (m - first) / BROAD;
            switch (last - m) {
                case 1: multiply_lane(to, p, w, turn, m, 1, half); break;
                case 2: multiply_lane(to, p, w, turn, m, 2, half); break;
                case 3: multiply_lane(to, p, w, turn, m, 3, half); break;
                case 4: multiply_lane(to, p, w, turn, m, 4, half); break;
                case 5: multiply_lane(to, p, w, turn, m, BROAD < 5 ? BROAD : 5, half); break;
                case 6: multiply_lane(to, p, w, turn, m, BROAD < 6 ? BROAD : 6, half); break;
                case 7: multiply_lane(to, p, w, turn, m, BROAD < 7 ? BROAD : 7, half); break;
                default: multiply_lane(to, p, w, turn, m, BROAD, half);
            }
        }
    for (long m = first; m < last; m++)
        memcpy(p->of->y + m * out + n, waiting[(m - first) / BROAD].at[LEVELS][(m - first) % BROAD], sizeof(float) * some);
}

/* Strips first .. last - 1. */
#define LINEAR(NAME, half)                                                                     \
    static void NAME(const void *job, long first, long last) {                                 \
        const Product *p = job;                                                                \
        for (long strip = first; strip < last; strip++)                                        \
            for (long m = 0; m < p->of->tokens; m += CROWD * BROAD) multiply_strip(p, strip, m, half); \
    }

LINEAR(linear_wide, 0)
LINEAR(linear_half, 1)

/* Tiles first .. last - 1 of BROAD tokens, to [LANES, steps, BROAD] each. */
static void pack_tokens(const void *job, long first, long last) {
    const Product *p = job;
    const Linear *a = p->of;
    for (long tile = first; tile < last; tile++)
        for (long i = 0; i < p->steps; i++)
            for (long at = i * LANES; at < (i + 1) * LANES; at += WIDTH) {
                floats square[WIDTH] = {0};
                for (long m = 0; m < BROAD && tile * BROAD + m < a->tokens; m++)
                    square[m] = load_some(a->x + (tile * BROAD + m) * a->in + at, a->in - at);
                transpose(square);
                float *to = (float *)p->x + tile * p->tile + at % LANES * p->lane + i * BROAD;
                for (int lane = 0; lane < WIDTH; lane++) memcpy(to + lane * p->lane, &square[lane], sizeof(float) * BROAD);
            }
}

/* Where tokens are few they are multiplied as they are, or in a copy whose rows are whole blocks. */
void linear(const Linear *a) {
    long padded = whole(a->in, BLOCK), steps = padded / LANES, many = a->tokens > BROAD;
    float *made = many || padded > a->in ? aligned_alloc(64, sizeof(float) * whole(a->tokens, BROAD) * padded) : NULL;
    Product job = {a, made ? made : a->x, BROAD * padded, padded, 1, LANES, steps};
    if (many) {
        job.apart = 1, job.lane = steps * BROAD, job.step = BROAD;
        share(pack_tokens, &job, (a->tokens + BROAD - 1) / BROAD, 4);
    } else if (made) {
        memset(made, 0, sizeof(float) * a->tokens * padded);
        for (long m = 0; m < a->tokens; m++) memcpy(made + m * padded, a->x + m * a->in, sizeof(float) * a->in);
    }
    share_blocks(a->half ? linear_half : linear_wide, &job, (a->out + STRIP - 1) / STRIP, STRIP * padded * (a->half ? 2 : 4));
    free(made);
}

typedef struct {
    void *packed;
    const void *matrix;  /* [out, in] */
    long half, in, out;
} Pack;

/* Where an element of a row stands in a packed matrix. */
static inline long packed_place(long row, long k, long steps, long half) {
    long step = k / LANES, first = (row / STRIP * LANES + TURN[k % LANES]) * steps;
    return half ? (first + step / 2 * 2) * STRIP + row % STRIP * 2 + step % 2 : (first + step) * STRIP + row % STRIP;
}

/* One block of a row as words, zeros past the last row and the row's end: 32 floats, or 16 pairs of bfloat16. */
static inline void load_block(const Pack *a, uint32_t to[BLOCK], long row, long start) {
    long some = row >= a->out ? 0 : a->in - start < BLOCK ? a->in - start : BLOCK;
    if (a->half) {
        uint16_t block[BLOCK] = {0};
        memcpy(block, (const uint16_t *)a->matrix + row * a->in + start, sizeof(uint16_t) * some);
        for (int i = 0; i < LANES; i++) to[i] = block[i] | (uint32_t)block[LANES + i] << 16;
    } else {
        memset(to, 0, sizeof(uint32_t) * BLOCK);
        memcpy(to, (const float *)a->matrix + row * a->in + start, sizeof(float) * some);
    }
}

/* Strips first .. last - 1. */
static void pack_strips(const void *job, long first, long last) {
    const Pack *a = job;
    long blocks = whole(a->in, BLOCK) / BLOCK, each = a->half ? 1 : 2, steps = blocks * each;
    for (long v = first * TALL; v < last * TALL; v++)
        for (long block = 0; block < blocks; block++) {
            uint32_t read[WIDTH][BLOCK];
            for (long n = 0; n < WIDTH; n++) load_block(a, read[n], v * WIDTH + n, block * BLOCK);
            for (long i = 0; i < each * LANES; i += WIDTH) {
                floats square[WIDTH];
                for (int n = 0; n < WIDTH; n++) memcpy(&square[n], read[n] + i, sizeof(floats));
                transpose(square);
                for (int lane = 0; lane < WIDTH; lane++) {
                    long turn = v / TALL * LANES + TURN[i % LANES + lane], step = block * each + i / LANES;
                    ((floats *)a->packed)[(turn * steps + step) * TALL + v % TALL] = square[lane];
                }
            }
        }
}

/* A matrix as `linear` takes it. */
void pack_linear(const Pack *a) { share(pack_strips, a, (a->out + STRIP - 1) / STRIP, 1); }

/* ---- 8 bits ---------------------------------------------------------------------------------------------------- */

/* Weights are codes 1 .. 255 around 128 with a scale for each row, tokens codes -127 .. 127 with a scale for each
 * group of them. Sums inside a group are whole numbers, so they are the same on every machine.
 *
 * Weights are packed: rows stand side by side in the lanes of a vector, four codes of each, STACK vectors to a band. So
 * no sum has to be taken apart, and a band is read from end to end. */
#if WIDTH == 16
#define STACK 3  /* vectors of weight rows, and tokens, that share a pass: their sums fill the registers */
#define SHARED 4
#elif WIDTH == 8
#define STACK 2
#define SHARED 3
#else
#define STACK 2
#define SHARED 4
#endif
#define BAND (STACK * WIDTH)  /* weight rows */
#define FOURS 16  /* words of four codes in a group */
#define GROUP (4 * FOURS)

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
    floats most = {0};
    for (int i = 0; i < GROUP; i += WIDTH) {
        floats size = (floats)((words)load(group + i) & 0x7FFFFFFFu);
        most = pick(size > most, size, most);
    }
    for (int i = 0; i < WIDTH; i++) largest = most[i] > largest ? most[i] : largest;
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
    floats sum[SHARED][STACK] = {0};
    for (long g = 0; g < groups; g++) {
        ints part[SHARED][STACK];
        for (int j = 0; j < tokens; j++)
            for (int i = 0; i < STACK; i++) part[j][i] = (ints){0} + p->starts[(m + j) * groups + g];
        for (long k = g * FOURS; k < (g + 1) * FOURS; k++, w += BAND * 4) {
            weights at[STACK];
            for (int i = 0; i < STACK; i++) {
                words four;
                memcpy(&four, w + i * WIDTH * 4, sizeof four);
                at[i] = ready_weights(four);
                if (!m) __builtin_prefetch(w + AHEAD + i * WIDTH * 4, 0, 2);
            }
            for (int j = 0; j < tokens; j++)
                for (int i = 0; i < STACK; i++)
                    part[j][i] = add_products(part[j][i], at[i], p->codes + ((m + j) * fours + k) * CODE);
        }
        for (int j = 0; j < tokens; j++)
            for (int i = 0; i < STACK; i++)
                sum[j][i] += __builtin_convertvector(part[j][i], floats) * p->scales[(m + j) * groups + g];
    }
    for (int j = 0; j < tokens; j++) {
        for (int i = 0; i < STACK; i++) sum[j][i] *= load(a->scales + n + i * WIDTH);
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
