/* Attention over keys and values in pages.
 *
 * A query's scores, its softmax and its sum over values are fixed sequences of their own, so it has the same bits
 * whether it goes over the keys alone or together with others of its row.
 */
typedef struct {
    float *keys, *values;  /* [pages, kv_heads, page, dim] */
    long kv_heads, heads, dim, page;
} Pages;

/* scores[t] = q . key t, four keys at a time. There is room behind q for a whole vector. */
static void score_keys(float *scores, const float *q, const float *keys, long count, long dim, float scale) {
    for (long t = 0; t < count; t += 4) {
        long some = count - t < 4 ? count - t : 4;
        floats sums[PIECES][4];
        for (long part = 0; part < PIECES; part++) {
            floats sum[4] = {0}, last[4];
            long i = part * WIDTH;
            const float *key[4];
            for (int n = 0; n < 4; n++) key[n] = keys + (t + (n < some ? n : 0)) * dim;
            for (; i + WIDTH <= dim; i += LANES)
                for (int n = 0; n < 4; n++) sum[n] += load(q + i) * load(key[n] + i);
            for (int n = 0; n < 4; n++) last[n] = load_some(key[n] + i, dim - i);
            if (i < dim)
                for (int n = 0; n < 4; n++) sum[n] += load(q + i) * last[n];
            memcpy(sums[part], sum, sizeof sum);
        }
        four each = add_lanes4(sums[0], 4) * scale;
        memcpy(scores + t, &each, sizeof(float) * some);
    }
}

/* Log weights to weights that add up to 1; there is room for whole vectors. */
static void soften(float *row, long keys) {
    long padded = whole(keys, LANES);
    for (long t = keys; t < padded; t++) row[t] = -INFINITY;
    floats most = load(row), sum[PIECES] = {0};
    for (long t = WIDTH; t < padded; t += WIDTH) most = pick(load(row + t) > most, load(row + t), most);
    float top = most[0];
    for (int lane = 1; lane < WIDTH; lane++) top = most[lane] > top ? most[lane] : top;
    for (long t = 0; t < padded; t += WIDTH) store(row + t, exps(load(row + t) - top));
    for (long t = keys; t < padded; t++) row[t] = 0.0f;
    for (long t = 0; t < padded; t += LANES)
        for (long part = 0; part < PIECES; part++) sum[part] += load(row + t + part * WIDTH);
    float share = 1.0f / add_lanes(sum);
    for (long t = 0; t < padded; t += WIDTH) store(row + t, load(row + t) * share);
}

/* out += the values, each by its weight, first to last. */
static void mix_values(float *out, const float *weights, const float *values, long count, long dim) {
    long i = 0;
    for (; i + 4 * WIDTH <= dim; i += 4 * WIDTH) {
        floats sum[4];
        for (int n = 0; n < 4; n++) sum[n] = load(out + i + n * WIDTH);
        for (long t = 0; t < count; t++)
            for (int n = 0; n < 4; n++) sum[n] += weights[t] * load(values + t * dim + i + n * WIDTH);
        for (int n = 0; n < 4; n++) store(out + i + n * WIDTH, sum[n]);
    }
    for (; i < dim; i += WIDTH) {
        floats sum = load_some(out + i, dim - i);
        for (long t = 0; t < count; t++) sum += weights[t] * load_some(values + t * dim + i, dim - i);
        store_some(out + i, sum, dim - i);
    }
}

#if WIDTH == 8
#define SIDE 3  /* queries that share a pass over keys: their sums fill the registers */
#else
#define SIDE 6
#endif
#define MOST 24  /* in a block: their scores stay near */

/* Tokens of one row and one key/value head with a group of queries each: q and mixed [count, padded], scores
 * [count, room]. There is room for whole sides. */
typedef struct {
    const Pages *pages;
    const int64_t *table, *positions;
    long kv, group, count, padded, room, limit;
    float *q, *mixed, *scores, *turned;
} Queries;

/* The first query sees the fewest keys, the last the most. Padding may stand past its row's pages; it attends to what
 * is there and is thrown away. */
static long keys_seen(const Queries *s, long query) {
    long keys = s->positions[query / s->group] + 1;
    return keys < s->limit ? keys : s->limit;
}

static const float *at_key(const Queries *s, const float *all, long key) {
    const Pages *p = s->pages;
    return all + ((s->table[key / p->page] * p->kv_heads + s->kv) * p->page + key % p->page) * p->dim;
}

/* Keys from this one on that stand in its page, of so many. */
static long in_page(const Pages *p, long key, long keys) {
    long room = p->page - key % p->page;
    return keys - key < room ? keys - key : room;
}

/* WIDTH keys side by side in each of `padded` vectors, zeros past the last key and dimension. */
static void turn_keys(float *to, const float *keys, long count, long dim, long padded) {
    for (long i = 0; i < padded; i += WIDTH) {
        floats square[WIDTH];
        for (long t = 0; t < WIDTH; t++) square[t] = t < count ? load_some(keys + t * dim + i, dim - i) : (floats){0};
        transpose(square);
        memcpy(to + i * WIDTH, square, sizeof square);
    }
}

/* Scores of SIDE queries with WIDTH keys: the lanes of `score_keys` one after the other, added as it adds them. */
static void score_side(float *scores, const float *q, const float *turned, long padded, long room, float scale) {
    floats total[4][SIDE];
    for (int lane = 0; lane < 4; lane++) {
        floats sum[4][SIDE] = {0};
        for (long i = lane; i < padded; i += LANES)
            for (int n = 0; n < 4; n++) {
                floats keys = load(turned + (i + 4 * n) * WIDTH);
                for (int m = 0; m < SIDE; m++) sum[n][m] += q[m * padded + i + 4 * n] * keys;
            }
        for (int m = 0; m < SIDE; m++) total[lane][m] = (sum[0][m] + sum[2][m]) + (sum[1][m] + sum[3][m]);
    }
    for (int m = 0; m < SIDE; m++)
        store(scores + m * room, ((total[0][m] + total[2][m]) + (total[1][m] + total[3][m])) * scale);
}

/* mixed += the values, each by its weight, first to last, for SIDE queries and 4 vectors of each. */
static void mix_side(float *mixed, const float *weights, const float *values, long count, long dim, long padded, long room) {
    floats sum[SIDE][4];
    for (int m = 0; m < SIDE; m++)
        for (int n = 0; n < 4; n++) sum[m][n] = load(mixed + m * padded + n * WIDTH);
    for (long t = 0; t < count; t++)
        for (int m = 0; m < SIDE; m++)
            for (int n = 0; n < 4; n++) sum[m][n] += weights[m * room + t] * load(values + t * dim + n * WIDTH);
    for (int m = 0; m < SIDE; m++)
        for (int n = 0; n < 4; n++) store(mixed + m * padded + n * WIDTH, sum[m][n]);
}

/* Keys are read once for all queries; what stands past a query's own is thrown away by `soften`. */
static void score_block(const Queries *s) {
    const Pages *p = s->pages;
    float scale = 1.0f / sqrtf(p->dim);
    long most = keys_seen(s, s->count - 1);
    for (long t = 0; t < most; t += p->page) {
        const float *keys = at_key(s, p->keys, t);
        long end = in_page(p, t, most);
        if (s->count < SIDE) {
            for (long m = 0; m < s->count; m++)
                score_keys(s->scores + m * s->room + t, s->q + m * s->padded, keys, end, p->dim, scale);
            continue;
        }
        for (long at = 0; at < end; at += WIDTH) {
            turn_keys(s->turned, keys + at * p->dim, end - at, p->dim, s->padded);
            for (long m = 0; m < s->count; m += SIDE)
                score_side(s->scores + m * s->room + t + at, s->q + m * s->padded, s->turned, s->padded, s->room, scale);
        }
    }
}

/* Values are read once for all queries up to where the first of them ends; each then goes on by itself. */
static void mix_block(const Queries *s) {
    const Pages *p = s->pages;
    long together = s->count < SIDE || p->dim % (4 * WIDTH) ? 0 : keys_seen(s, 0);
    for (long t = 0; t < together; t += p->page)
        for (long i = 0; i < p->dim; i += 4 * WIDTH)
            for (long m = 0; m < s->count; m += SIDE)
                mix_side(s->mixed + m * s->padded + i, s->scores + m * s->room + t, at_key(s, p->values, t) + i,
                         in_page(p, t, together), p->dim, s->padded, s->room);
    for (long m = 0; m < s->count; m++) {
        long keys = keys_seen(s, m);
        for (long t = together, some; t < keys; t += some) {
            some = in_page(p, t, keys);
            mix_values(s->mixed + m * s->padded, s->scores + m * s->room + t, at_key(s, p->values, t), some, p->dim);
        }
    }
}

typedef struct {
    const Pages *pages;
    float *out;
    const float *q, *k, *v;
    long q_stride, k_stride, v_stride;
    const int64_t *write_pages;  /* [N], or none where every token's page is that of the table */
    const int64_t *positions;
    const int64_t *offsets;      /* [B + 1], or none where all tokens are one row's */
    const int64_t *table;
    long table_width, n;
} Attend;

typedef struct {
    const Attend *a;
    long block;  /* tokens of one row in a block */
} Blocks;

/* `count` tokens from n on, of row b, with their queries of one key/value head. */
static void attend_block(const Attend *a, long b, long n, long count, long kv) {
    const Pages *p = a->pages;
    long dim = p->dim, group = p->heads / p->kv_heads, queries = count * group, sides = whole(queries, SIDE);
    Queries s = {.pages = p, .table = a->table + b * a->table_width, .positions = a->positions + n, .kv = kv,
                 .group = group, .count = queries, .padded = whole(dim, LANES), .limit = a->table_width * p->page};
    s.room = whole(keys_seen(&s, queries - 1) + LANES, LANES);
    s.q = malloc(sizeof(float) * (sides * (2 * s.padded + s.room) + s.padded * LANES));
    s.mixed = s.q + sides * s.padded, s.scores = s.mixed + sides * s.padded, s.turned = s.scores + sides * s.room;
    memset(s.q, 0, sizeof(float) * sides * 2 * s.padded);
    for (long m = 0; m < queries; m++)
        memcpy(s.q + m * s.padded, a->q + (n + m / group) * a->q_stride + (kv * group + m % group) * dim,
               sizeof(float) * dim);
    score_block(&s);
    for (long m = 0; m < queries; m++) soften(s.scores + m * s.room, keys_seen(&s, m));
    mix_block(&s);
    for (long m = 0; m < queries; m++)
        memcpy(a->out + ((n + m / group) * p->heads + kv * group + m % group) * dim, s.mixed + m * s.padded,
               sizeof(float) * dim);
    free(s.q);
}

/* Items are pairs of a block and a key/value head. */
static void attend_some(const void *job, long first, long last) {
    const Blocks *j = job;
    const Attend *a = j->a;
    for (long b = 0, item = 0; item < last; b++) {
        long end = a->offsets[b + 1], heads = a->pages->kv_heads;
        for (long n = a->offsets[b]; n < end; n += j->block, item += heads)
            for (long kv = 0; kv < heads; kv++)
                if (item + kv >= first && item + kv < last)
                    attend_block(a, b, n, end - n < j->block ? end - n : j->block, kv);
    }
}

static void write_keys(const Attend *a) {
    const Pages *p = a->pages;
    for (long n = 0, b = 0; n < a->n; n++) {
        while (n >= a->offsets[b + 1]) b++;
        long position = a->positions[n];
        long page = a->write_pages ? a->write_pages[n] : a->table[b * a->table_width + position / p->page];
        for (long h = 0; h < p->kv_heads; h++) {
            long slot = ((page * p->kv_heads + h) * p->page + position % p->page) * p->dim;
            memcpy(p->keys + slot, a->k + n * a->k_stride + h * p->dim, sizeof(float) * p->dim);
            memcpy(p->values + slot, a->v + n * a->v_stride + h * p->dim, sizeof(float) * p->dim);
        }
    }
}

/* Write k and v [N, kv_heads, dim] alone, for tokens whose own attention nobody asks for. */
void remember(const Attend *a) {
    const int64_t one_row[2] = {0, a->n};
    Attend all = *a;
    if (!all.offsets) all.offsets = one_row;
    write_keys(&all);
}

/* Write k [N, kv_heads, dim] (rows `k_stride` apart, v likewise) to its pages, then attend with q [N, heads, dim];
 * a token of row b sees the keys up to its own position through row b of the table [B, table_width]. */
void attend(const Attend *a) {
    const int64_t one_row[2] = {0, a->n};
    Attend all = *a;
    if (!all.offsets) all.offsets = one_row;
    write_keys(&all);
    /* Blocks as large as leave work for every thread. */
    long kv_heads = a->pages->kv_heads, even = a->n * kv_heads / (4 * (pool.threads > 1 ? pool.threads : 1));
    long most = MOST * kv_heads / a->pages->heads, block = even < most ? even : most, items = 0;
    Blocks job = {&all, block > 1 ? block : 1};
    for (long b = 0, n = 0; n < a->n; n = all.offsets[++b])
        items += (all.offsets[b + 1] - n + job.block - 1) / job.block * kv_heads;
    share(attend_some, &job, items, 1);
}
