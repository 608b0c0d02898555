/* CPU kernels for rounds: float32 arithmetic, weights in float32 or bfloat16 (widened exactly).
 *
 * A row never sees its neighbours: every output is one fixed sequence of operations on that row's own data, whatever
 * the number of rows, threads or pages. Each function here has a reference in PyTorch beside its caller.
 *
 * N tokens, B rows of W tokens.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "pool.h"
#include "vector.h"

#define TILE 4  /* weight rows, and tokens, that share a pass */
#define CHUNK_BYTES (1 << 16)  /* weights in one chunk of a product */
#define ROWS 32  /* rows in one chunk of smaller work */

/* ---- linear: y [N, out] = x [N, in] w' ------------------------------------------------------------------------ */

/* Each product of a weight row and a token is its own chain of sums over k, the same in every tile.
 * A block of bfloat16 is read as 16 words that hold two neighbours each: the even ones become floats by a shift, the
 * odd ones by a mask. So the tokens are laid out with the 16 even elements of each block first (see `spread`). */
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
    const float *x;  /* [tokens, padded], as `spread` left it */
    const void *weight;
    const float *scales;
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

/* Tokens padded with zeros to whole blocks of `block`, every `apart`-th element of a block together: the order in
 * which a block of packed weights unpacks. */
static float *spread(const float *x, long tokens, long in, long padded, long block, long apart) {
    float *to = aligned_alloc(64, sizeof(float) * tokens * padded);
    for (long m = 0; m < tokens; m++)
        for (long start = 0; start < padded; start += block)
            for (long j = 0; j < block; j++) {
                long at = start + j % (block / apart) * apart + j / (block / apart);
                to[m * padded + start + j] = at < in ? x[m * in + at] : 0.0f;
            }
    return to;
}

static inline long whole(long size, long block) { return (size + block - 1) / block * block; }

/* `half`: the weight is bfloat16, else float32. */
void linear(float *y, const float *x, const void *weight, int half, long tokens, long in, long out) {
    long padded = whole(in, BLOCK);
    float *ready = spread(x, tokens, in, padded, BLOCK, half ? 2 : 1);
    Product job = {y, ready, weight, NULL, tokens, in, out, padded};
    share(half ? linear_half : linear_wide, &job, (out + TILE - 1) / TILE, CHUNK_BYTES / (TILE * in * (half ? 2 : 4)));
    free(ready);
}

/* Rows first .. last - 1 of signed bytes, in blocks of 16 words that hold four neighbours each. */
static void linear_bytes(const void *job, long first, long last) {
    const Product *p = job;
    for (long n = first; n < last; n++) {
        const int8_t *w = (const int8_t *)p->weight + n * p->in;
        for (long m = 0; m < p->tokens; m++) {
            const float *x = p->x + m * p->in;
            floats sum[4] = {0};
            for (long k = 0; k < p->in; k += 4 * LANES) {
                __builtin_prefetch(w + k + 8 * p->in, 0, 2);
                ints quads;
                memcpy(&quads, w + k, sizeof quads);
                sum[0] += __builtin_convertvector((quads << 24) >> 24, floats) * load(x + k);
                sum[1] += __builtin_convertvector((quads << 16) >> 24, floats) * load(x + k + LANES);
                sum[2] += __builtin_convertvector((quads << 8) >> 24, floats) * load(x + k + 2 * LANES);
                sum[3] += __builtin_convertvector(quads >> 24, floats) * load(x + k + 3 * LANES);
            }
            p->y[m * p->out + n] = add_lanes((sum[0] + sum[1]) + (sum[2] + sum[3])) * p->scales[n];
        }
    }
}

/* Weight rows of signed bytes, `in` a multiple of 64, with a scale each. */
void linear_int8(float *y, const float *x, const int8_t *weight, const float *scales, long tokens, long in, long out) {
    float *ready = spread(x, tokens, in, in, 4 * LANES, 4);
    Product job = {y, ready, weight, scales, tokens, in, out, in};
    share(linear_bytes, &job, out, CHUNK_BYTES / in);
    free(ready);
}

/* ---- norms and gates ------------------------------------------------------------------------------------------ */

static inline void scale_norm(float *y, const float *x, const float *weight, long size, float eps) {
    float scale = 1.0f / sqrtf(dot(x, x, size) / size + eps);
    MAP(y, size, load_some(x + i, size - i) * scale * load_some(weight + i, size - i));
}

/* Arguments of the functions on rows; which of them a function uses is said there. */
typedef struct {
    float *y, *x;
    const float *other, *weight, *cos, *sin;
    const int64_t *positions;
    long size, stride, heads, rotary;
    float eps;
} Rows;

static void add_norm_rows(const void *job, long first, long last) {
    const Rows *r = job;
    for (long row = first; row < last; row++) {
        float *in = r->x + row * r->size;
        const float *add = r->other + row * r->size;
        if (r->other) MAP(in, r->size, load_some(in + i, r->size - i) + load_some(add + i, r->size - i));
        scale_norm(r->y + row * r->size, in, r->weight, r->size, r->eps);
    }
}

/* x [N, size] += add (when there is one); y = norm of x. */
void add_norm(float *y, float *x, const float *add, const float *weight, long n, long size, float eps) {
    Rows job = {.y = y, .x = x, .other = add, .weight = weight, .size = size, .eps = eps};
    share(add_norm_rows, &job, n, ROWS);
}

static void swiglu_rows(const void *job, long first, long last) {
    const Rows *r = job;
    for (long row = first; row < last; row++) {
        const float *gate = r->other + row * 2 * r->size, *up = gate + r->size;
        float *out = r->y + row * r->size;
        MAP(out, r->size, silu16(load_some(gate + i, r->size - i)) * load_some(up + i, r->size - i));
    }
}

/* gate_up [N, 2 size], gate first -> y [N, size] = silu(gate) up. */
void swiglu(float *y, const float *gate_up, long n, long size) {
    Rows job = {.y = y, .other = gate_up, .size = size};
    share(swiglu_rows, &job, n, ROWS);
}

static void gate_rows(const void *job, long first, long last) {
    const Rows *r = job;
    for (long row = first; row < last; row++) {
        const float *in = r->x + row * r->size, *by = r->other + row * r->stride;
        float *out = r->y + row * r->size;
        MAP(out, r->size, load_some(in + i, r->size - i) * sigmoid16(load_some(by + i, r->size - i)));
    }
}

/* y [N, size] = x sigmoid(gate); gate rows are `stride` apart. */
void gate(float *y, float *x, const float *gates, long n, long size, long stride) {
    Rows job = {.y = y, .x = x, .other = gates, .size = size, .stride = stride};
    share(gate_rows, &job, n, ROWS);
}

static void norm_rope_rows(const void *job, long first, long last) {
    const Rows *r = job;
    long dim = r->size, half = r->rotary / 2;
    for (long row = first; row < last; row++) {
        const float *c = r->cos + r->positions[row] * half, *s = r->sin + r->positions[row] * half;
        for (long h = 0; h < r->heads; h++) {
            float *out = r->y + (row * r->heads + h) * dim;
            scale_norm(out, r->other + row * r->stride + h * dim, r->weight + h * dim, dim, r->eps);
            for (long j = 0; j < half; j++) {
                float a = out[j], b = out[j + half];
                out[j] = a * c[j] - b * s[j];
                out[j + half] = b * c[j] + a * s[j];
            }
        }
    }
}

/* Norm and rotate heads [N, heads, dim], rows `stride` apart; weight [heads, dim], cos and sin [positions, rotary / 2]. */
void norm_rope(float *y, const float *x, const float *weight, const float *cos, const float *sin,
               const int64_t *positions, long n, long heads, long dim, long rotary, long stride, float eps) {
    Rows job = {.y = y, .other = x, .weight = weight, .cos = cos, .sin = sin, .positions = positions, .size = dim,
                .stride = stride, .heads = heads, .rotary = rotary, .eps = eps};
    share(norm_rope_rows, &job, n, ROWS);
}

/* ---- attention over pages ------------------------------------------------------------------------------------- */

typedef struct {
    float *keys, *values;  /* [pages, kv_heads, page, dim] */
    long kv_heads, heads, dim, page;
} Pages;

static void attend_one(const Pages *p, float *out, const float *q, const int64_t *table, long kv, long keys, float *scores) {
    long group = p->heads / p->kv_heads, dim = p->dim, padded = (keys + LANES - 1) / LANES * LANES;
    float scale = 1.0f / sqrtf(dim);
    for (long t = 0; t < keys; t++) {
        const float *key = p->keys + ((table[t / p->page] * p->kv_heads + kv) * p->page + t % p->page) * dim;
        for (long g = 0; g < group; g++) scores[g * padded + t] = dot(q + g * dim, key, dim) * scale;
    }
    for (long g = 0; g < group; g++) {
        float *row = scores + g * padded, most = row[0];
        for (long t = 1; t < keys; t++) most = row[t] > most ? row[t] : most;
        for (long t = keys; t < padded; t++) row[t] = -INFINITY;
        floats sum = {0};
        for (long t = 0; t < padded; t += LANES) {
            floats e = exp16(load(row + t) - most);
            store(row + t, e);
            if (t + LANES > keys) for (long i = keys; i < padded; i++) row[i] = 0.0f;
            sum += load(row + t);
        }
        float share = 1.0f / add_lanes(sum);
        for (long i = 0; i < padded; i++) row[i] *= share;
        memset(out + g * dim, 0, sizeof(float) * dim);
    }
    for (long t = 0; t < keys; t++) {
        const float *value = p->values + ((table[t / p->page] * p->kv_heads + kv) * p->page + t % p->page) * dim;
        for (long g = 0; g < group; g++)
            for (long i = 0; i < dim; i++) out[g * dim + i] += scores[g * padded + t] * value[i];
    }
}

typedef struct {
    const Pages *pages;
    float *out;
    const float *q;
    const int64_t *positions, *table;
    long q_stride, table_width, width, longest;
} Attention;

/* Items are pairs of a token and a key/value head. */
static void attend_some(const void *job, long first, long last) {
    const Attention *a = job;
    const Pages *p = a->pages;
    long group = p->heads / p->kv_heads, limit = a->table_width * p->page;
    float *scores = malloc(sizeof(float) * group * whole(a->longest, LANES));
    for (long item = first; item < last; item++) {
        long n = item / p->kv_heads, h = item % p->kv_heads;
        /* Padding may stand past its row's pages; it attends to what is there and is thrown away. */
        long keys = a->positions[n] + 1 < limit ? a->positions[n] + 1 : limit;
        attend_one(p, a->out + (n * p->heads + h * group) * p->dim, a->q + n * a->q_stride + h * group * p->dim,
                   a->table + n / a->width * a->table_width, h, keys, scores);
    }
    free(scores);
}

/* Write k [N, kv_heads, dim] (rows `k_stride` apart, v likewise) to its pages, then attend with q [N, heads, dim];
 * token (b, w) sees the keys up to its own position through row b of the table [B, table_width]. */
void attend(const Pages *p, float *out, const float *q, const float *k, const float *v, long q_stride, long k_stride,
            long v_stride, const int64_t *write_pages, const int64_t *positions, const int64_t *table, long table_width,
            long batch, long width) {
    Attention job = {p, out, q, positions, table, q_stride, table_width, width, 0};
    for (long n = 0; n < batch * width; n++) {
        for (long h = 0; h < p->kv_heads; h++) {
            long slot = ((write_pages[n] * p->kv_heads + h) * p->page + positions[n] % p->page) * p->dim;
            memcpy(p->keys + slot, k + n * k_stride + h * p->dim, sizeof(float) * p->dim);
            memcpy(p->values + slot, v + n * v_stride + h * p->dim, sizeof(float) * p->dim);
        }
        if (positions[n] >= job.longest) job.longest = positions[n] + 1;
    }
    share(attend_some, &job, batch * width * p->kv_heads, 1);
}

/* ---- the gated delta rule over windows ------------------------------------------------------------------------- */

typedef struct {
    float *states;       /* [rows, heads, key_dim, value_dim] */
    float *waiting;      /* [rows, max_width, heads, key_dim + value_dim + 1]: key, correction, decay */
    float *inputs;       /* [rows, taps - 1 + max_width, channels] */
    const float *conv;   /* [taps, channels] */
    const float *decay;  /* [heads], -exp(A_log) */
    const float *dt_bias, *norm;
    long heads, key_heads, key_dim, value_dim, taps, max_width;
    float eps;
} Delta;

/* Never inlined: a fold repeats a window's updates bit for bit only if both run the same instructions. */
static __attribute__((noinline)) void advance(float *restrict state, const float *restrict key, const float *restrict correction,
                           float decay, long key_dim, long value_dim) {
    for (long i = 0; i < key_dim; i++)
        for (long j = 0; j < value_dim; j++)
            state[i * value_dim + j] = state[i * value_dim + j] * decay + key[i] * correction[j];
}

/* Commit the first `kept` of the waiting tokens of one head. */
static void fold(float *state, const float *waiting, long kept, long heads, long key_dim, long value_dim) {
    for (long j = 0; j < kept; j++) {
        const float *w = waiting + j * heads * (key_dim + value_dim + 1);
        advance(state, w, w + key_dim, w[key_dim + value_dim], key_dim, value_dim);
    }
}

static inline void unit(float *y, const float *x, long size, float scale) {
    float by = scale / sqrtf(dot(x, x, size) + 1e-6f);
    for (long i = 0; i < size; i++) y[i] = x[i] * by;
}

static void convolve(const Delta *d, float *mixed, float *inputs, const float *projected, long kept, long width,
                     long channels, long stride) {
    long past = d->taps - 1;
    memmove(inputs, inputs + kept * channels, sizeof(float) * past * channels);
    for (long t = 0; t < width; t++) memcpy(inputs + (past + t) * channels, projected + t * stride, sizeof(float) * channels);
    for (long t = 0; t < width; t++) {
        float *out = mixed + t * channels;
        const float *in = inputs + t * channels;
        for (long c = 0; c < channels; c++) out[c] = in[c] * d->conv[c];
        for (long tap = 1; tap < d->taps; tap++)
            for (long c = 0; c < channels; c++) out[c] += in[tap * channels + c] * d->conv[tap * channels + c];
        MAP(out, channels, silu16(load_some(out + i, channels - i)));
    }
}

/* One head of one row: fold what was kept, write the state, run the window on a copy. */
static void run_head(const Delta *d, float *out, const float *mixed, const float *projected, long row, long head,
                     long kept, long width, long stride, float *scratch) {
    long kd = d->key_dim, vd = d->value_dim, keys = d->key_heads * kd, values = d->heads * vd;
    long channels = 2 * keys + values, key_head = head / (d->heads / d->key_heads), entry = kd + vd + 1;
    float *state = d->states + (row * d->heads + head) * kd * vd;
    float *waiting = d->waiting + (row * d->max_width * d->heads + head) * entry;
    fold(state, waiting, kept, d->heads, kd, vd);
    float *local = scratch, *q = local + kd * vd, *seen_k = q + kd, *seen_q = seen_k + vd;
    if (width > 1) memcpy(local, state, sizeof(float) * kd * vd);
    for (long t = 0; t < width; t++) {
        const float *m = mixed + t * channels, *p = projected + t * stride;
        const float *current = width > 1 ? local : state, *v = m + 2 * keys + head * vd;
        float *w = waiting + t * d->heads * entry, *k = w, *correction = w + kd;
        unit(q, m + key_head * kd, kd, 1.0f / sqrtf(kd));
        unit(k, m + keys + key_head * kd, kd, 1.0f);
        float step = p[channels + values + d->heads + head] + d->dt_bias[head];
        float decay = expf(d->decay[head] * (fmaxf(step, 0.0f) + log1pf(expf(-fabsf(step)))));
        float strength = 1.0f / (1.0f + expf(-p[channels + values + head]));
        w[kd + vd] = decay;
        memset(seen_k, 0, sizeof(float) * 2 * vd);
        for (long i = 0; i < kd; i++)
            for (long j = 0; j < vd; j++) {
                seen_k[j] += k[i] * current[i * vd + j];
                seen_q[j] += q[i] * current[i * vd + j];
            }
        float overlap = dot(q, k, kd);
        for (long j = 0; j < vd; j++) {
            correction[j] = (v[j] - decay * seen_k[j]) * strength;
            seen_q[j] = decay * seen_q[j] + overlap * correction[j];
        }
        if (t + 1 < width) advance(local, k, correction, decay, kd, vd);
        float *o = out + (t * d->heads + head) * vd;
        const float *z = p + channels + head * vd;
        scale_norm(o, seen_q, d->norm, vd, d->eps);
        MAP(o, vd, load_some(o + i, vd - i) * silu16(load_some(z + i, vd - i)));
    }
}

typedef struct {
    const Delta *delta;
    float *out;
    const float *mixed, *projected;
    const int64_t *rows, *kept;
    long width, stride, channels;
} Windows;

/* Items are pairs of a row and a head. */
static void run_heads(const void *job, long first, long last) {
    const Windows *w = job;
    const Delta *d = w->delta;
    float *scratch = malloc(sizeof(float) * (d->key_dim * d->value_dim + d->key_dim + 2 * d->value_dim));
    for (long item = first; item < last; item++) {
        long b = item / d->heads, token = b * w->width;
        run_head(d, w->out + token * d->heads * d->value_dim, w->mixed + token * w->channels,
                 w->projected + token * w->stride, w->rows[b], item % d->heads, w->kept[b], w->width, w->stride, scratch);
    }
    free(scratch);
}

/* projected [B W, stride]: qkv, z, b, a -> out [B W, heads value_dim], convolved, recurred, normed and gated. */
void delta_window(const Delta *d, float *out, const float *projected, const int64_t *rows, const int64_t *kept,
                  long batch, long width, long stride) {
    long channels = 2 * d->key_heads * d->key_dim + d->heads * d->value_dim;
    float *mixed = malloc(sizeof(float) * batch * width * channels);
    for (long b = 0; b < batch; b++)
        convolve(d, mixed + b * width * channels, d->inputs + rows[b] * (d->taps - 1 + d->max_width) * channels,
                 projected + b * width * stride, kept[b], width, channels, stride);
    Windows job = {d, out, mixed, projected, rows, kept, width, stride, channels};
    share(run_heads, &job, batch * d->heads, 1);
    free(mixed);
}

/* states [B, heads, key_dim, value_dim] are those of these rows; waiting is every row's. */
void delta_fold(float *states, const float *waiting, const int64_t *rows, const int64_t *kept, long batch, long heads,
                long key_dim, long value_dim, long max_width) {
    long entry = key_dim + value_dim + 1;
    for (long b = 0; b < batch; b++)
        for (long h = 0; h < heads; h++)
            fold(states + (b * heads + h) * key_dim * value_dim, waiting + (rows[b] * max_width * heads + h) * entry,
                 kept[b], heads, key_dim, value_dim);
}
