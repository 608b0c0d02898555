/* Norms and gates, row by row. */
#define SMALL 4096  /* elements in one chunk of smaller work */

static void share_rows(Work work, const void *job, long rows, long size) { share(work, job, rows, SMALL / size); }

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
void add_norm(const AddNorm *a) { share_rows(add_norm_rows, a, a->n, a->size); }

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
        MAP(out, a->size, silus(load_some(gate + i, a->size - i)) * load_some(up + i, a->size - i));
    }
}

/* gate_up [N, 2 size], gate first -> y [N, size] = silu(gate) up. */
void swiglu(const Swiglu *a) { share_rows(swiglu_rows, a, a->n, a->size); }

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
        MAP(out, a->size, load_some(in + i, a->size - i) * sigmoids(load_some(by + i, a->size - i)));
    }
}

/* y [N, size] = x sigmoid(gate); gate rows are `stride` apart. */
void gate(const Gate *a) { share_rows(gate_rows, a, a->n, a->size); }

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
void norm_rope(const NormRope *a) { share_rows(norm_rope_rows, a, a->n, a->heads * a->dim); }
