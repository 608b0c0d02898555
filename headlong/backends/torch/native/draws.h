/* Tokens drawn by scores: the noise of kernels/noise.py, the rules of accept.py.
 *
 * Scores are the chain's, or logits over a temperature, of rows that ask for nothing else.
 *
 * A token whose score is further below the best than noise can lift it is passed over: mostly that is nearly all of them.
 */
#define MOST_NOISE 23.0f /* Gumbel noise is never above it */
#define TOGETHER 8       /* vectors that are passed over, or not, at once */

enum { BEST, COUPLED, REJECTION };             /* how a row's tokens are chosen, as in draws.py */
enum { TARGET = 1, DRAFT, ACCEPT, RESIDUAL };  /* streams of noise */

/* How the rows of an engine draw. */
typedef struct {
    const int64_t *rules, *seeds;
    const float *temperatures;
    float *probs; /* [rows, depth, size], that drafts were drawn from */
} Drawing;

typedef struct {
    Tops tops;
    float least; /* what a token must have to be the best so far */
} Found;

static inline float most_lane(floats v) {
    float most = v[0];
    for (int lane = 1; lane < WIDTH; lane++) most = v[lane] > most ? v[lane] : most;
    return most;
}

static inline floats load_score(const float *x, long left, float temperature) {
    floats v = (floats){0} - INFINITY;
    if (left >= WIDTH) v = load(x);
    else if (left > 0) memcpy(&v, x, sizeof(float) * left);
    return v / temperature;
}

/* TOGETHER vectors of scores; the most of them. */
static inline float load_scores(floats *v, const float *x, long left, float temperature) {
    floats top = (floats){0} - INFINITY;
    for (int k = 0; k < TOGETHER; k++) {
        v[k] = load_score(x + k * WIDTH, left - k * WIDTH, temperature);
        top = pick(v[k] > top, v[k], top);
    }
    return most_lane(top);
}

static inline Found nothing_found(void) {
    return (Found){no_tops(), -INFINITY};
}

/* Noise on TOGETHER vectors of scores, the first of them of token `at`. */
static inline void find_best(Found *found, const floats *v, long at, Keys keys) {
    words lanes;
    for (int i = 0; i < WIDTH; i++) lanes[i] = i;
    for (int k = 0; k < TOGETHER; k++) {
        long first = at + k * WIDTH;
        climb(&found->tops, v[k] + noise_of(lanes + (uint32_t)first, keys), first);
    }
    found->least = most_lane(found->tops.most);
}

/* Where a row's scores are largest with noise on them, the first of equals, and by how much that leads those that were
 * looked at. */
static long draw(const float *x, long size, float temperature, Keys keys, float *lead) {
    Found found = nothing_found();
    for (long at = 0; at < size; at += TOGETHER * WIDTH) {
        floats v[TOGETHER];
        if (load_scores(v, x + at, size - at, temperature) + MOST_NOISE > found.least) find_best(&found, v, at, keys);
    }
    return top(&found.tops, lead);
}

typedef struct {
    float most;   /* score */
    double total; /* of all weights e^(score - most) */
} Weights;

static inline floats weigh(floats scores, float most) {
    scores -= most;
    return pick(scores > -87.0f, exps(scores), (floats){0});
}

static Weights weights_of(const float *x, long size, float temperature) {
    floats v[TOGETHER];
    Weights found = {-INFINITY, 0};
    for (long at = 0; at < size; at += TOGETHER * WIDTH) {
        float top = load_scores(v, x + at, size - at, temperature);
        found.most = top > found.most ? top : found.most;
    }
    for (long at = 0; at < size; at += TOGETHER * WIDTH) {
        floats sum = {0};
        load_scores(v, x + at, size - at, temperature);
        for (int k = 0; k < TOGETHER; k++) sum += weigh(v[k], found.most);
        for (int lane = 0; lane < WIDTH; lane++) found.total += sum[lane];
    }
    return found;
}

/* A draw from what a row's distribution has above another, q; -1 where that is nothing. */
static long draw_above(const float *x, long size, float temperature, Weights w, const float *q, Keys keys) {
    Found found = nothing_found();
    float share = (float)(1.0 / w.total), lead;
    for (long at = 0; at < size; at += TOGETHER * WIDTH) {
        floats v[TOGETHER];
        load_scores(v, x + at, size - at, temperature);
        for (int k = 0; k < TOGETHER; k++) {
            long first = at + k * WIDTH;
            floats above = weigh(v[k], w.most) * share - load_some(q + first, size - first);
            v[k] = pick(above >= 0x1p-126f, logs(above), (floats){0} - INFINITY);
        }
        find_best(&found, v, at, keys);
    }
    return found.least > -INFINITY ? top(&found.tops, &lead) : -1;
}

typedef struct {
    int64_t *chosen; /* [N] */
    const float *x;  /* [N, size] */
    const int64_t *rows, *starts, *offsets;
    Drawing how;
    long batch, tokens, size;
} DrawCoupled;

static void draw_coupled_tokens(const void *job, long first, long last) {
    const DrawCoupled *a = job;
    for (long n = first, b = 0; n < last; n++) {
        while (n >= a->offsets[b + 1]) b++;
        long row = a->rows[b];
        if (a->how.rules[row] != COUPLED) continue;
        Keys keys = keys_of(a->how.seeds[row], TARGET, a->starts[b] + n - a->offsets[b] + 1);
        float lead;
        a->chosen[n] = draw(a->x + n * a->size, a->size, a->how.temperatures[row], keys, &lead);
    }
}

static int anyone(const Drawing *how, const int64_t *rows, long batch, int least) {
    for (long b = 0; b < batch; b++)
        if (how->rules[rows[b]] >= least) return 1;
    return 0;
}

/* What the target has for each place of the windows of coupled rows. */
void draw_coupled(const DrawCoupled *a) {
    if (anyone(&a->how, a->rows, a->batch, COUPLED)) share(draw_coupled_tokens, a, a->tokens, 1);
}

typedef struct {
    int64_t *tokens, *kept; /* [N], [B] */
    const float *x;         /* [N, size] */
    const int64_t *window, *rows, *starts, *offsets;
    const int64_t *counts;  /* [B], or none where every token counts */
    Drawing how;
    long batch, size, depth;
} Reject;

/* Whether a draft is kept, with min(1, p / q). */
static int passes(const Reject *a, long b, long place, Weights w) {
    long row = a->rows[b], at = a->offsets[b] + place, draft = a->window[at + 1];
    floats score = (floats){0} + a->x[at * a->size + draft] / a->how.temperatures[row];
    double p = weigh(score, w.most)[0] / w.total, q = a->how.probs[(row * a->depth + place) * a->size + draft];
    return chance(keys_of(a->how.seeds[row], ACCEPT, a->starts[b] + place + 1)) * q < p;
}

static void reject_rows(const void *job, long first, long last) {
    const Reject *a = job;
    for (long b = first; b < last; b++) {
        long row = a->rows[b], at = a->offsets[b], width = a->offsets[b + 1] - at, kept = 0, next = -1;
        long count = a->counts ? a->counts[b] : width;
        float temperature = a->how.temperatures[row], lead;
        if (a->how.rules[row] != REJECTION) continue;
        for (; kept + 1 < count; kept++) {
            const float *x = a->x + (at + kept) * a->size, *q = a->how.probs + (row * a->depth + kept) * a->size;
            Weights w = weights_of(x, a->size, temperature);
            if (passes(a, b, kept, w)) continue;
            next = draw_above(x, a->size, temperature, w, q, keys_of(a->how.seeds[row], RESIDUAL, a->starts[b] + kept + 1));
            break;
        }
        if (next < 0) {
            Keys keys = keys_of(a->how.seeds[row], RESIDUAL, a->starts[b] + kept + 1);
            next = draw(a->x + (at + kept) * a->size, a->size, temperature, keys, &lead);
        }
        for (long j = 0; j < width; j++) a->tokens[at + j] = j < kept ? a->window[at + 1 + j] : next;
        a->kept[b] = kept + 1;
    }
}

/* The rejection rule: of rows under it the drafts that are kept, and the token after them. */
void reject(const Reject *a) {
    if (anyone(&a->how, a->rows, a->batch, REJECTION)) share(reject_rows, a, a->batch, 1);
}

typedef struct {
    int64_t *tokens; /* [B] */
    float *sure;     /* [B]: how sure each is, or none */
    const float *x;  /* [B, size] */
    const int64_t *rows, *starts, *counts;
    Drawing how;
    long batch, size, step, depth;
} DrawDrafts;

/* What a row's draft was drawn from, for the rejection rule. */
static void leave_distribution(const DrawDrafts *a, long b) {
    long row = a->rows[b];
    const float *x = a->x + b * a->size;
    float temperature = a->how.temperatures[row];
    Weights w = weights_of(x, a->size, temperature);
    float *q = a->how.probs + (row * a->depth + a->step) * a->size, share = (float)(1.0 / w.total);
    MAP(q, a->size, weigh(load_score(x + i, a->size - i, temperature), w.most) * share);
}

static void draw_draft_rows(const void *job, long first, long last) {
    const DrawDrafts *a = job;
    for (long b = first; b < last; b++) {
        long row = a->rows[b], rule = a->how.rules[row];
        if (rule == BEST) continue;
        const float *x = a->x + b * a->size;
        float temperature = a->how.temperatures[row];
        int64_t position = a->starts[b] + a->counts[b] + 1;
        Keys keys = keys_of(a->how.seeds[row], rule == COUPLED ? TARGET : DRAFT, position);
        float lead;
        a->tokens[b] = draw(x, a->size, temperature, keys, &lead);
        if (rule == REJECTION) leave_distribution(a, b);
        if (a->sure) a->sure[b] = lead;
    }
}

/* Drafts of a step of rows that draw, after starts + counts; and of those under the rejection rule what from. */
void draw_drafts(const DrawDrafts *a) {
    if (anyone(&a->how, a->rows, a->batch, COUPLED)) share(draw_draft_rows, a, a->batch, 1);
}
