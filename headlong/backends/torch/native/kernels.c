/* CPU kernels for rounds: float32 arithmetic, weights in float32 or bfloat16 (widened exactly).
 *
 * A row never sees its neighbours: every output is one fixed sequence of operations on that row's own data, whatever
 * the number of rows, threads or pages. Each function here has a reference in PyTorch beside its caller. Each takes the
 * address of its arguments, so that calls can be kept and run again.
 *
 * N tokens, B rows of W tokens.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "pool.h"
#include "vector.h"
#include "linear.h"
#include "rounds.h"
#include "noise.h"

#define ROWS 32  /* rows in one chunk of smaller work */

/* ---- norms and gates ------------------------------------------------------------------------------------------ */

static inline void scale_norm(float *y, const float *x, const float *weight, long size, float eps) {
    float scale = 1.0f / sqrtf(dot(x, x, size) / size + eps);
    MAP(y, size, load_some(x + i, size - i) * scale * load_some(weight + i, size - i));
}

typedef struct {
    float *y, *x;
    const float *add, *weight;
    long n, size;
    float eps;
} AddNorm;

static void add_norm_rows(const void *job, long first, long last) {
    const AddNorm *a = job;
    for (long row = first; row < last; row++) {
        float *in = a->x + row * a->size;
        const float *add = a->add + row * a->size;
        if (a->add) MAP(in, a->size, load_some(in + i, a->size - i) + load_some(add + i, a->size - i));
        scale_norm(a->y + row * a->size, in, a->weight, a->size, a->eps);
    }
}

/* x [N, size] += add (when there is one); y = norm of x. */
void add_norm(const AddNorm *a) { share(add_norm_rows, a, a->n, ROWS); }

typedef struct {
    float *y;
    const float *first, *second, *weight;
    long n, size;
    float eps;
} PairNorm;

/* y [N, 2 size]: the norms of first and second [N, size] side by side; weight [2, size]. */
void pair_norm(const PairNorm *a) {
    for (long row = 0; row < a->n; row++) {
        float *y = a->y + row * 2 * a->size;
        scale_norm(y, a->first + row * a->size, a->weight, a->size, a->eps);
        scale_norm(y + a->size, a->second + row * a->size, a->weight + a->size, a->size, a->eps);
    }
}

typedef struct {
    float *y;
    const float *gate_up;
    long n, size;
} Swiglu;

static void swiglu_rows(const void *job, long first, long last) {
    const Swiglu *a = job;
    for (long row = first; row < last; row++) {
        const float *gate = a->gate_up + row * 2 * a->size, *up = gate + a->size;
        float *out = a->y + row * a->size;
        MAP(out, a->size, silu16(load_some(gate + i, a->size - i)) * load_some(up + i, a->size - i));
    }
}

/* gate_up [N, 2 size], gate first -> y [N, size] = silu(gate) up. */
void swiglu(const Swiglu *a) { share(swiglu_rows, a, a->n, ROWS); }

typedef struct {
    float *y;
    const float *x, *gates;
    long n, size, stride;
} Gate;

static void gate_rows(const void *job, long first, long last) {
    const Gate *a = job;
    for (long row = first; row < last; row++) {
        const float *in = a->x + row * a->size, *by = a->gates + row * a->stride;
        float *out = a->y + row * a->size;
        MAP(out, a->size, load_some(in + i, a->size - i) * sigmoid16(load_some(by + i, a->size - i)));
    }
}

/* y [N, size] = x sigmoid(gate); gate rows are `stride` apart. */
void gate(const Gate *a) { share(gate_rows, a, a->n, ROWS); }

typedef struct {
    float *y;
    const float *x, *weight, *cos, *sin;
    const int64_t *positions;
    long n, heads, dim, rotary, stride;
    float eps;
} NormRope;

static void norm_rope_rows(const void *job, long first, long last) {
    const NormRope *a = job;
    long dim = a->dim, half = a->rotary / 2;
    for (long row = first; row < last; row++) {
        const float *c = a->cos + a->positions[row] * half, *s = a->sin + a->positions[row] * half;
        for (long h = 0; h < a->heads; h++) {
            float *out = a->y + (row * a->heads + h) * dim;
            scale_norm(out, a->x + row * a->stride + h * dim, a->weight + h * dim, dim, a->eps);
            for (long j = 0; j < half; j++) {
                float x = out[j], y = out[j + half];
                out[j] = x * c[j] - y * s[j];
                out[j + half] = y * c[j] + x * s[j];
            }
        }
    }
}

/* Norm and rotate heads [N, heads, dim], rows `stride` apart; weight [heads, dim], cos and sin [positions, rotary / 2]. */
void norm_rope(const NormRope *a) { share(norm_rope_rows, a, a->n, ROWS); }

/* ---- attention over pages ------------------------------------------------------------------------------------- */

typedef struct {
    float *keys, *values;  /* [pages, kv_heads, page, dim] */
    long kv_heads, heads, dim, page;
} Pages;

/* scores[t] = q . key t, four keys at a time. */
static void score_keys(float *scores, const float *q, const float *keys, long count, long dim, float scale) {
    for (long t = 0; t < count; t += 4) {
        long some = count - t < 4 ? count - t : 4;
        floats sum[4] = {0};
        for (long i = 0; i < dim; i += LANES) {
            floats part = load_some(q + i, dim - i);
            for (int n = 0; n < 4; n++) sum[n] += part * load_some(keys + (t + (n < some ? n : 0)) * dim + i, dim - i);
        }
        four sums = add_lanes4(sum) * scale;
        memcpy(scores + t, &sums, sizeof(float) * some);
    }
}

/* Log weights to weights that add up to 1; there is room for whole vectors. */
static void soften(float *row, long keys) {
    long padded = whole(keys, LANES);
    for (long t = keys; t < padded; t++) row[t] = -INFINITY;
    floats most = load(row), sum = {0};
    for (long t = LANES; t < padded; t += LANES) most = pick(load(row + t) > most, load(row + t), most);
    float top = most[0];
    for (int lane = 1; lane < LANES; lane++) top = most[lane] > top ? most[lane] : top;
    for (long t = 0; t < padded; t += LANES) {
        store(row + t, exp16(load(row + t) - top));
        if (t + LANES > keys) for (long i = keys; i < padded; i++) row[i] = 0.0f;
        sum += load(row + t);
    }
    float share = 1.0f / add_lanes(sum);
    for (long t = 0; t < padded; t += LANES) store(row + t, load(row + t) * share);
}

/* out += the values, each by its weight, first to last. */
static void mix_values(float *out, const float *weights, const float *values, long count, long dim) {
    long i = 0;
    for (; i + 4 * LANES <= dim; i += 4 * LANES) {
        floats sum[4];
        for (int n = 0; n < 4; n++) sum[n] = load(out + i + n * LANES);
        for (long t = 0; t < count; t++)
            for (int n = 0; n < 4; n++) sum[n] += weights[t] * load(values + t * dim + i + n * LANES);
        for (int n = 0; n < 4; n++) store(out + i + n * LANES, sum[n]);
    }
    for (; i < dim; i += LANES) {
        floats sum = load_some(out + i, dim - i);
        for (long t = 0; t < count; t++) sum += weights[t] * load_some(values + t * dim + i, dim - i);
        memcpy(out + i, &sum, sizeof(float) * (dim - i < LANES ? dim - i : LANES));
    }
}

/* One token and one key/value head: the queries of the group over the keys of the row, page by page. */
static void attend_one(const Pages *p, float *out, const float *q, const int64_t *table, long kv, long keys, float *scores) {
    long group = p->heads / p->kv_heads, dim = p->dim;
    for (long g = 0; g < group; g++) {
        memset(out + g * dim, 0, sizeof(float) * dim);
        for (long t = 0; t < keys; t += p->page)
            score_keys(scores + t, q + g * dim, p->keys + (table[t / p->page] * p->kv_heads + kv) * p->page * dim,
                       keys - t < p->page ? keys - t : p->page, dim, 1.0f / sqrtf(dim));
        soften(scores, keys);
        for (long t = 0; t < keys; t += p->page)
            mix_values(out + g * dim, scores + t, p->values + (table[t / p->page] * p->kv_heads + kv) * p->page * dim,
                       keys - t < p->page ? keys - t : p->page, dim);
    }
}

typedef struct {
    const Pages *pages;
    float *out;
    const float *q, *k, *v;
    long q_stride, k_stride, v_stride;
    const int64_t *write_pages, *positions, *table;
    long table_width, batch, width;
} Attend;

/* Padding may stand past its row's pages; it attends to what is there and is thrown away. */
static long keys_seen(const Attend *a, long token) {
    long limit = a->table_width * a->pages->page, keys = a->positions[token] + 1;
    return keys < limit ? keys : limit;
}

/* Items are pairs of a token and a key/value head. */
static void attend_some(const void *job, long first, long last) {
    const Attend *a = job;
    const Pages *p = a->pages;
    long group = p->heads / p->kv_heads, longest = 0;
    for (long n = first / p->kv_heads; n * p->kv_heads < last; n++)
        if (keys_seen(a, n) > longest) longest = keys_seen(a, n);
    float *scores = malloc(sizeof(float) * whole(longest, LANES));
    for (long item = first; item < last; item++) {
        long n = item / p->kv_heads, h = item % p->kv_heads;
        attend_one(p, a->out + (n * p->heads + h * group) * p->dim, a->q + n * a->q_stride + h * group * p->dim,
                   a->table + n / a->width * a->table_width, h, keys_seen(a, n), scores);
    }
    free(scores);
}

/* Write k [N, kv_heads, dim] (rows `k_stride` apart, v likewise) to its pages, then attend with q [N, heads, dim];
 * token (b, w) sees the keys up to its own position through row b of the table [B, table_width]. */
void attend(const Attend *a) {
    const Pages *p = a->pages;
    for (long n = 0; n < a->batch * a->width; n++)
        for (long h = 0; h < p->kv_heads; h++) {
            long slot = ((a->write_pages[n] * p->kv_heads + h) * p->page + a->positions[n] % p->page) * p->dim;
            memcpy(p->keys + slot, a->k + n * a->k_stride + h * p->dim, sizeof(float) * p->dim);
            memcpy(p->values + slot, a->v + n * a->v_stride + h * p->dim, sizeof(float) * p->dim);
        }
    share(attend_some, a, a->batch * a->width * p->kv_heads, 1);
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

/* The convolution's inputs of one row: those before the window, then the window's. */
static void take_inputs(const Delta *d, float *inputs, const float *projected, long kept, long width, long channels,
                        long stride) {
    long past = d->taps - 1;
    memmove(inputs, inputs + kept * channels, sizeof(float) * past * channels);
    for (long t = 0; t < width; t++) memcpy(inputs + (past + t) * channels, projected + t * stride, sizeof(float) * channels);
}

/* silu of the convolution at one token, for some of the channels. */
static void convolve(const Delta *d, float *out, const float *inputs, long first, long count, long channels) {
    for (long c = 0; c < count; c += LANES) {
        floats sum = load_some(inputs + first + c, count - c) * load_some(d->conv + first + c, count - c);
        for (long tap = 1; tap < d->taps; tap++) {
            long at = tap * channels + first + c;
            sum += load_some(inputs + at, count - c) * load_some(d->conv + at, count - c);
        }
        sum = silu16(sum);
        memcpy(out + c, &sum, sizeof(float) * (count - c < LANES ? count - c : LANES));
    }
}

/* S'k and S'q, rows of S first to last. */
static void look_up(float *seen_k, float *seen_q, const float *state, const float *k, const float *q, long key_dim,
                    long value_dim) {
    long j = 0;
    for (; j + 4 * LANES <= value_dim; j += 4 * LANES) {
        floats by_k[4] = {0}, by_q[4] = {0};
        for (long i = 0; i < key_dim; i++)
            for (int n = 0; n < 4; n++) {
                floats part = load(state + i * value_dim + j + n * LANES);
                by_k[n] += k[i] * part;
                by_q[n] += q[i] * part;
            }
        for (int n = 0; n < 4; n++) store(seen_k + j + n * LANES, by_k[n]), store(seen_q + j + n * LANES, by_q[n]);
    }
    for (; j < value_dim; j++) {
        seen_k[j] = seen_q[j] = 0.0f;
        for (long i = 0; i < key_dim; i++) {
            seen_k[j] += k[i] * state[i * value_dim + j];
            seen_q[j] += q[i] * state[i * value_dim + j];
        }
    }
}

/* One head of one row: fold what was kept, write the state, run the window on a copy. */
static void run_head(const Delta *d, float *out, const float *inputs, const float *projected, long row, long head,
                     long kept, long width, long stride, float *scratch) {
    long kd = d->key_dim, vd = d->value_dim, keys = d->key_heads * kd, values = d->heads * vd;
    long channels = 2 * keys + values, key_head = head / (d->heads / d->key_heads), entry = kd + vd + 1;
    float *state = d->states + (row * d->heads + head) * kd * vd;
    float *waiting = d->waiting + (row * d->max_width * d->heads + head) * entry;
    fold(state, waiting, kept, d->heads, kd, vd);
    float *local = scratch, *q = local + kd * vd, *v = q + kd, *seen_k = v + vd, *seen_q = seen_k + vd;
    if (width > 1) memcpy(local, state, sizeof(float) * kd * vd);
    for (long t = 0; t < width; t++) {
        const float *p = projected + t * stride, *in = inputs + t * channels, *current = width > 1 ? local : state;
        float *w = waiting + t * d->heads * entry, *k = w, *correction = w + kd;
        convolve(d, q, in, key_head * kd, kd, channels);
        convolve(d, k, in, keys + key_head * kd, kd, channels);
        convolve(d, v, in, 2 * keys + head * vd, vd, channels);
        unit(q, q, kd, 1.0f / sqrtf(kd));
        unit(k, k, kd, 1.0f);
        float step = p[channels + values + d->heads + head] + d->dt_bias[head];
        float decay = expf(d->decay[head] * (fmaxf(step, 0.0f) + log1pf(expf(-fabsf(step)))));
        float strength = 1.0f / (1.0f + expf(-p[channels + values + head]));
        w[kd + vd] = decay;
        look_up(seen_k, seen_q, current, k, q, kd, vd);
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
    const float *projected;
    const int64_t *rows, *kept;
    long batch, width, stride;
} DeltaWindow;

/* Items are pairs of a row and a head. */
static void run_heads(const void *job, long first, long last) {
    const DeltaWindow *a = job;
    const Delta *d = a->delta;
    long channels = 2 * d->key_heads * d->key_dim + d->heads * d->value_dim;
    float *scratch = aligned_alloc(64, sizeof(float) * whole(d->key_dim * (d->value_dim + 1) + 3 * d->value_dim, LANES));
    for (long item = first; item < last; item++) {
        long b = item / d->heads, token = b * a->width;
        run_head(d, a->out + token * d->heads * d->value_dim,
                 d->inputs + a->rows[b] * (d->taps - 1 + d->max_width) * channels, a->projected + token * a->stride,
                 a->rows[b], item % d->heads, a->kept[b], a->width, a->stride, scratch);
    }
    free(scratch);
}

/* projected [B W, stride]: qkv, z, b, a -> out [B W, heads value_dim], convolved, recurred, normed and gated. */
void delta_window(const DeltaWindow *a) {
    const Delta *d = a->delta;
    long channels = 2 * d->key_heads * d->key_dim + d->heads * d->value_dim;
    for (long b = 0; b < a->batch; b++)
        take_inputs(d, d->inputs + a->rows[b] * (d->taps - 1 + d->max_width) * channels,
                    a->projected + b * a->width * a->stride, a->kept[b], a->width, channels, a->stride);
    share(run_heads, a, a->batch * d->heads, 1);
}

typedef struct {
    float *states;  /* [B, heads, key_dim, value_dim], of these rows */
    const float *waiting;  /* of every row */
    const int64_t *rows, *kept;
    long batch, heads, key_dim, value_dim, max_width;
} DeltaFold;

void delta_fold(const DeltaFold *a) {
    long state = a->key_dim * a->value_dim, entry = a->key_dim + a->value_dim + 1;
    for (long b = 0; b < a->batch; b++)
        for (long h = 0; h < a->heads; h++)
            fold(a->states + (b * a->heads + h) * state,
                 a->waiting + (a->rows[b] * a->max_width * a->heads + h) * entry, a->kept[b], a->heads, a->key_dim,
                 a->value_dim);
}

/* ---- calls one after another ----------------------------------------------------------------------------------- */

typedef struct {
    void (*kernel)(const void *arguments);
    const void *arguments;
} Call;

typedef struct {
    const Call *calls;
    long count;
} Replay;

void replay(const Replay *a) {
    for (long i = 0; i < a->count; i++) a->calls[i].kernel(a->calls[i].arguments);
}
