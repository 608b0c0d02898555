/* The gated delta rule, over windows whose tokens wait for their commit and over chunks of a prompt. */
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

static long channels_of(const Delta *d) { return 2 * d->key_heads * d->key_dim + d->heads * d->value_dim; }

static long inputs_of(const Delta *d) { return (d->taps - 1 + d->max_width) * channels_of(d); }

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
static void take_inputs(const Delta *d, float *inputs, const float *projected, long kept, long width, long stride) {
    long past = d->taps - 1, channels = channels_of(d);
    memmove(inputs, inputs + kept * channels, sizeof(float) * past * channels);
    for (long t = 0; t < width; t++) memcpy(inputs + (past + t) * channels, projected + t * stride, sizeof(float) * channels);
}

/* silu of the convolution at one token, for some of the channels; its inputs are `apart`, the oldest first. */
static void convolve(const Delta *d, float *out, const float *inputs, long apart, long first, long count) {
    long channels = channels_of(d);
    for (long c = 0; c < count; c += WIDTH) {
        floats sum = load_some(inputs + first + c, count - c) * load_some(d->conv + first + c, count - c);
        for (long tap = 1; tap < d->taps; tap++)
            sum += load_some(inputs + tap * apart + first + c, count - c) *
                   load_some(d->conv + tap * channels + first + c, count - c);
        store_some(out + c, silus(sum), count - c);
    }
}

/* S'k and S'q, rows of S first to last. */
static void look_up(float *seen_k, float *seen_q, const float *state, const float *k, const float *q, long key_dim,
                    long value_dim) {
    long j = 0;
    for (; j + 4 * WIDTH <= value_dim; j += 4 * WIDTH) {
        floats by_k[4] = {0}, by_q[4] = {0};
        for (long i = 0; i < key_dim; i++)
            for (int n = 0; n < 4; n++) {
                floats part = load(state + i * value_dim + j + n * WIDTH);
                by_k[n] += k[i] * part;
                by_q[n] += q[i] * part;
            }
        for (int n = 0; n < 4; n++) store(seen_k + j + n * WIDTH, by_k[n]), store(seen_q + j + n * WIDTH, by_q[n]);
    }
    for (; j < value_dim; j += WIDTH) {
        floats by_k = {0}, by_q = {0};
        for (long i = 0; i < key_dim; i++) {
            floats part = load_some(state + i * value_dim + j, value_dim - j);
            by_k += k[i] * part;
            by_q += q[i] * part;
        }
        store_some(seen_k + j, by_k, value_dim - j);
        store_some(seen_q + j, by_q, value_dim - j);
    }
}

/* One token of one head after this state. Leaves its key, correction and decay in w. */
static void run_token(const Delta *d, float *out, float *w, const float *state, const float *projected,
                      const float *inputs, long apart, long head, float *scratch) {
    long kd = d->key_dim, vd = d->value_dim, keys = d->key_heads * kd, values = d->heads * vd;
    long channels = channels_of(d), key_head = head / (d->heads / d->key_heads);
    float *q = scratch, *v = q + kd, *seen_k = v + vd, *seen_q = seen_k + vd, *k = w, *correction = w + kd;
    convolve(d, q, inputs, apart, key_head * kd, kd);
    convolve(d, k, inputs, apart, keys + key_head * kd, kd);
    convolve(d, v, inputs, apart, 2 * keys + head * vd, vd);
    unit(q, q, kd, 1.0f / sqrtf(kd));
    unit(k, k, kd, 1.0f);
    float step = projected[channels + values + d->heads + head] + d->dt_bias[head];
    float decay = expf(d->decay[head] * (fmaxf(step, 0.0f) + log1pf(expf(-fabsf(step)))));
    float strength = 1.0f / (1.0f + expf(-projected[channels + values + head]));
    w[kd + vd] = decay;
    look_up(seen_k, seen_q, state, k, q, kd, vd);
    float overlap = dot(q, k, kd);
    for (long j = 0; j < vd; j++) {
        correction[j] = (v[j] - decay * seen_k[j]) * strength;
        seen_q[j] = decay * seen_q[j] + overlap * correction[j];
    }
    const float *z = projected + channels + head * vd;
    scale_norm(out, seen_q, d->norm, vd, d->eps);
    MAP(out, vd, load_some(out + i, vd - i) * silus(load_some(z + i, vd - i)));
}

static float *token_scratch(const Delta *d, long more) {
    return aligned_alloc(64, sizeof(float) * whole(d->key_dim + 3 * d->value_dim + more, LANES));
}

/* One head of one row: fold what was kept, write the state, run the window on a copy. */
static void run_window(const Delta *d, float *out, const float *projected, long row, long head, long kept, long width,
                       long stride, float *scratch) {
    long kd = d->key_dim, vd = d->value_dim, channels = channels_of(d), entry = kd + vd + 1;
    const float *inputs = d->inputs + row * inputs_of(d);
    float *state = d->states + (row * d->heads + head) * kd * vd, *local = scratch;
    float *waiting = d->waiting + (row * d->max_width * d->heads + head) * entry;
    fold(state, waiting, kept, d->heads, kd, vd);
    if (width > 1) memcpy(local, state, sizeof(float) * kd * vd);
    for (long t = 0; t < width; t++) {
        float *w = waiting + t * d->heads * entry;
        run_token(d, out + (t * d->heads + head) * vd, w, width > 1 ? local : state, projected + t * stride,
                  inputs + t * channels, channels, head, scratch + kd * vd);
        if (t + 1 < width) advance(local, w, w + kd, w[kd + vd], kd, vd);
    }
}

typedef struct {
    const Delta *delta;
    float *out;
    const float *projected;
    const int64_t *rows, *kept, *offsets;
    long batch, stride;
} DeltaWindow;

/* Items are pairs of a row and a head. */
static void run_windows(const void *job, long first, long last) {
    const DeltaWindow *a = job;
    const Delta *d = a->delta;
    float *scratch = token_scratch(d, d->key_dim * d->value_dim);
    for (long item = first; item < last; item++) {
        long b = item / d->heads, token = a->offsets[b];
        run_window(d, a->out + token * d->heads * d->value_dim, a->projected + token * a->stride, a->rows[b],
                   item % d->heads, a->kept[b], a->offsets[b + 1] - token, a->stride, scratch);
    }
    free(scratch);
}

/* projected [N, stride]: qkv, z, b, a -> out [N, heads value_dim], convolved, recurred, normed and gated. */
void delta_window(const DeltaWindow *a) {
    const Delta *d = a->delta;
    for (long b = 0; b < a->batch; b++)
        take_inputs(d, d->inputs + a->rows[b] * inputs_of(d), a->projected + a->offsets[b] * a->stride, a->kept[b],
                    a->offsets[b + 1] - a->offsets[b], a->stride);
    share(run_windows, a, a->batch * d->heads, 1);
}

typedef struct {
    const Delta *delta;
    float *out;
    const float *projected;
    const int64_t *row;
    long tokens, stride;
} DeltaChunk;

typedef struct {
    const DeltaChunk *a;
    const float *early;  /* [2 (taps - 1), channels]: the convolution's inputs before the chunk, then its first */
} Chunk;

/* Heads of the row, each token's state in the place of the last. */
static void run_chunk(const void *job, long first, long last) {
    const Chunk *chunk = job;
    const DeltaChunk *a = chunk->a;
    const Delta *d = a->delta;
    long kd = d->key_dim, vd = d->value_dim, channels = channels_of(d), past = d->taps - 1;
    float *w = token_scratch(d, kd + vd + 1), *scratch = w + kd + vd + 1;
    for (long head = first; head < last; head++) {
        float *state = d->states + (*a->row * d->heads + head) * kd * vd;
        for (long t = 0; t < a->tokens; t++) {
            const float *inputs = t < past ? chunk->early + t * channels : a->projected + (t - past) * a->stride;
            run_token(d, a->out + (t * d->heads + head) * vd, w, state, a->projected + t * a->stride, inputs,
                      t < past ? channels : a->stride, head, scratch);
            advance(state, w, w + kd, w[kd + vd], kd, vd);
        }
    }
    free(w);
}

/* A settled row's next tokens, [tokens, stride] as those of a window; they are committed at once. */
void delta_chunk(const DeltaChunk *a) {
    const Delta *d = a->delta;
    long channels = channels_of(d), past = d->taps - 1, some = a->tokens < past ? a->tokens : past;
    float *inputs = d->inputs + *a->row * inputs_of(d), *early = malloc(sizeof(float) * (past + some) * channels);
    memcpy(early, inputs, sizeof(float) * past * channels);
    for (long t = 0; t < some; t++)
        memcpy(early + (past + t) * channels, a->projected + t * a->stride, sizeof(float) * channels);
    Chunk job = {a, early};
    share(run_chunk, &job, d->heads, 1);
    for (long t = a->tokens - past; t < a->tokens; t++, inputs += channels)
        memcpy(inputs, t < 0 ? early + (past + t) * channels : a->projected + t * a->stride, sizeof(float) * channels);
    free(early);
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
