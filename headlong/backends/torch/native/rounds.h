/* What a round does around its passes: windows, places of tokens, embeddings, best tokens, acceptance, rows one step on,
 * pairs set aside.
 *
 * Rows of an engine are numbered; the B rows of a call name theirs in `rows`.
 */
typedef struct {
    int64_t *starts, *window;  /* [B], [N] */
    const int64_t *rows, *offsets;
    const int64_t *length, *windows;  /* of every row: [rows], [rows, width] */
    long batch, width;
} ReadWindows;

/* Where the windows of B rows start, and what they hold. */
void read_windows(const ReadWindows *a) {
    for (long b = 0; b < a->batch; b++) {
        long row = a->rows[b], first = a->offsets[b];
        a->starts[b] = a->length[row];
        memcpy(a->window + first, a->windows + row * a->width, sizeof(int64_t) * (a->offsets[b + 1] - first));
    }
}

typedef struct {
    int64_t *positions, *write_pages;  /* [N] */
    int64_t *read_pages;               /* [B, table_width] */
    int64_t *kept;                     /* [B] */
    const int64_t *rows, *starts, *offsets;
    const int64_t *counts;             /* [B], or none where every token counts */
    const int64_t *table, *all_kept;   /* of every row */
    long batch, page, table_width, spare;
} Place;

/* Where B windows stand: a row's token j at its start + j; padding past a row's count writes to the spare page. */
void place(const Place *a) {
    for (long b = 0; b < a->batch; b++) {
        const int64_t *table = a->table + a->rows[b] * a->table_width;
        long first = a->offsets[b], width = a->offsets[b + 1] - first, count = a->counts ? a->counts[b] : width;
        memcpy(a->read_pages + b * a->table_width, table, sizeof(int64_t) * a->table_width);
        a->kept[b] = a->all_kept[a->rows[b]];
        for (long j = 0; j < width; j++) {
            int64_t position = a->starts[b] + j, at = position / a->page;
            a->positions[first + j] = position;
            a->write_pages[first + j] = j >= count ? a->spare : table[at < a->table_width ? at : a->table_width - 1];
        }
    }
}

typedef struct {
    float *y;
    const void *table;  /* [V, size], or as `pack_linear` leaves it */
    long packed, half;  /* the table is bfloat16, else float32 */
    const int64_t *tokens;
    long n, size;
} Embed;

static inline float widened(const void *table, long half, long at) {
    uint32_t word = half ? (uint32_t)((const uint16_t *)table)[at] << 16 : ((const uint32_t *)table)[at];
    float value;
    memcpy(&value, &word, sizeof value);
    return value;
}

/* One row of a packed table, which stands in as many places: all are fetched before the first is read. */
static void unpack_row(const Embed *a, float *y, long row) {
    long steps = whole(a->size, BLOCK) / LANES;
    for (long k = 0; k < a->size; k++)
        __builtin_prefetch((const char *)a->table + packed_place(row, k, steps, a->half) * (a->half ? 2 : 4));
    for (long k = 0; k < a->size; k++) y[k] = widened(a->table, a->half, packed_place(row, k, steps, a->half));
}

static void embed_rows(const void *job, long first, long last) {
    const Embed *a = job;
    for (long n = first; n < last; n++) {
        float *y = a->y + n * a->size;
        long row = a->tokens[n];
        if (a->packed) unpack_row(a, y, row);
        else for (long i = 0; i < a->size; i++) y[i] = widened(a->table, a->half, row * a->size + i);
    }
}

/* Rows of a table, widened: y [N, size]. */
void embed(const Embed *a) { share(embed_rows, a, a->n, a->packed ? 1 : SMALL / a->size); }

typedef struct {
    float *y;
    const float *x;
    const int64_t *offsets, *kept;
    long batch, size;
} LastKept;

/* x [N, size] -> y [B, size]: the last kept of each row, of which at least one is. */
void last_kept(const LastKept *a) {
    for (long b = 0; b < a->batch; b++)
        memcpy(a->y + b * a->size, a->x + (a->offsets[b] + a->kept[b] - 1) * a->size, sizeof(float) * a->size);
}

/* The largest in each lane, the block where it first had that, and the second largest. */
typedef struct {
    floats most, second;
    ints where;
} Tops;

static inline Tops no_tops(void) {
    return (Tops){(floats){0} - INFINITY, (floats){0} - INFINITY, (ints){0}};
}

/* A vector of the block that begins at `at`. */
static inline void climb(Tops *tops, floats v, long at) {
    ints more = v > tops->most;
    floats less = pick(more, tops->most, v);
    tops->second = pick(less > tops->second, less, tops->second);
    tops->most = pick(more, v, tops->most);
    tops->where = (more & ((ints){0} + (int32_t)at)) | (~more & tops->where);
}

/* Where the largest of all is, the first of equals, and by how much it leads. */
static inline long top(const Tops *tops, float *lead) {
    long best = 0;
    float value = -INFINITY, second = -INFINITY;
    int leads = -1;
    for (int lane = 0; lane < WIDTH; lane++) {
        long at = tops->where[lane] + lane;
        if (tops->most[lane] > value || (tops->most[lane] == value && at < best))
            value = tops->most[lane], best = at, leads = lane;
    }
    for (int lane = 0; lane < WIDTH; lane++) {
        float other = lane == leads ? tops->second[lane] : tops->most[lane];
        second = other > second ? other : second;
    }
    *lead = value - second;
    return best;
}

typedef struct {
    int64_t *y;
    float *lead; /* [N], or none */
    const float *x;
    long n, size;
} Best;

static void best_rows(const void *job, long first, long last) {
    const Best *a = job;
    for (long row = first; row < last; row++) {
        const float *x = a->x + row * a->size;
        Tops tops = no_tops();
        float lead;
        for (long i = 0; i < a->size; i += WIDTH) {
            floats v = (floats){0} - INFINITY;
            if (i + WIDTH <= a->size) v = load(x + i);
            else memcpy(&v, x + i, sizeof(float) * (a->size - i));
            climb(&tops, v, i);
        }
        a->y[row] = top(&tops, &lead);
        if (a->lead) a->lead[row] = lead;
    }
}

/* x [N, size] -> y [N]: where each row is largest, the first of equals, and by how much it leads. */
void best(const Best *a) { share(best_rows, a, a->n, 1); }

typedef struct {
    int64_t *y;      /* [N], where each is largest of all */
    const float *x;  /* [N, size] */
    const int64_t *rows, *offsets;
    const int64_t *bound;  /* [rows]: whether a row may take some places alone, */
    const uint32_t *bits;  /* [rows, width, words]: a bit for each that it may */
    long batch, size, width, words;
} BestAllowed;

static inline long allowed(const uint32_t *bits, long i) { return bits[i / 32] >> (i % 32) & 1; }

/* Where x is largest among some places, the first of equals; the first place of all where none may be taken. */
static long best_of_allowed(const float *x, const uint32_t *bits, long size, long words) {
    long best = 0;
    float value = -INFINITY;
    for (long word = 0; word < words; word++)
        for (uint32_t left = bits[word]; left; left &= left - 1) {
            long i = word * 32 + __builtin_ctz(left);
            if (i < size && x[i] > value) value = x[i], best = i;
        }
    return best;
}

/* y anew for bound rows, unless it is allowed as it is. */
void best_allowed(const BestAllowed *a) {
    for (long b = 0; b < a->batch; b++) {
        long row = a->rows[b];
        const uint32_t *bits = a->bits + row * a->width * a->words;
        for (long n = a->offsets[b]; a->bound[row] && n < a->offsets[b + 1]; n++, bits += a->words)
            if (!allowed(bits, a->y[n])) a->y[n] = best_of_allowed(a->x + n * a->size, bits, a->size, a->words);
    }
}

typedef struct {
    int64_t *tokens, *kept;  /* [N], [B] */
    const int64_t *chosen, *window, *offsets;
    const int64_t *counts;   /* [B], or none where every token counts */
    long batch;
} Accept;

/* The coupled rule: drafts window[1 ..] are kept while they are what the target chose; then its own token. */
void accept_coupled(const Accept *a) {
    for (long b = 0; b < a->batch; b++) {
        long first = a->offsets[b], width = a->offsets[b + 1] - first, count = a->counts ? a->counts[b] : width, kept = 0;
        const int64_t *chosen = a->chosen + first, *drafts = a->window + first + 1;
        while (kept + 1 < count && drafts[kept] == chosen[kept]) kept++;
        for (long j = 0; j < width; j++) a->tokens[first + j] = j < kept ? drafts[j] : chosen[kept];
        a->kept[b] = kept + 1;
    }
}

typedef struct {
    int64_t *length, *windows, *all_kept;  /* of every row: [rows], [rows, width], [rows] */
    const int64_t *rows, *starts, *offsets, *tokens, *kept;
    long batch, width;
    int64_t *late;         /* [rows, room]: tokens of pairs set aside, each row's last before it was known; or none */
    const int64_t *waits;  /* [rows]: how many there are */
    long room;
} Commit;

/* Rows go on behind what they keep: the last token of it is their newest. */
void commit(const Commit *a) {
    for (long b = 0; b < a->batch; b++) {
        long row = a->rows[b], kept = a->kept[b];
        a->length[row] = a->starts[b] + kept;
        a->windows[row * a->width] = a->tokens[a->offsets[b] + kept - 1];
        a->all_kept[row] = kept;
        if (a->late && a->waits[row]) a->late[row * a->room + a->waits[row] - 1] = a->windows[row * a->width];
    }
}

typedef struct {
    int64_t *windows;  /* [rows, width], of every row */
    const int64_t *rows, *drafts;
    long batch, depth, apart, step, width;  /* row b's draft j is drafts[b * apart + j * step] */
} LeaveDrafts;

/* Drafts for the next windows. */
void leave_drafts(const LeaveDrafts *a) {
    for (long b = 0; b < a->batch; b++)
        for (long j = 0; j < a->depth; j++)
            a->windows[a->rows[b] * a->width + 1 + j] = a->drafts[b * a->apart + j * a->step];
}

typedef struct {
    int64_t *next_starts, *ones, *offsets;  /* [B], [B], [B + 1] */
    const int64_t *starts, *counts, *goes_on;
    long batch;
} GoOn;

/* One token of each row behind `counts` others; that of a row which does not go on does not count. */
void go_on(const GoOn *a) {
    for (long b = 0; b < a->batch; b++) {
        a->next_starts[b] = a->starts[b] + a->counts[b];
        a->ones[b] = a->goes_on[b];
        a->offsets[b] = b;
    }
    a->offsets[a->batch] = a->batch;
}

typedef struct {
    float *hidden;                    /* [rows, room, size], as the next three of every row */
    int64_t *tokens, *counts, *ends;  /* [rows, room], [rows], [rows] */
    const int64_t *wanted;            /* [rows]: whether pairs of a row are set aside at all */
    const float *new_hidden;          /* [N, size] */
    const int64_t *new_tokens, *rows, *starts, *offsets, *kept;
    long batch, size, room;
} SetAside;

/* Put the kept pairs of each row behind those that wait already. */
void set_aside(const SetAside *a) {
    for (long b = 0; b < a->batch; b++) {
        long row = a->rows[b], first = a->offsets[b], kept = a->kept[b], at = row * a->room + a->counts[row];
        if (!a->wanted[row]) continue;
        memcpy(a->hidden + at * a->size, a->new_hidden + first * a->size, sizeof(float) * kept * a->size);
        memcpy(a->tokens + at, a->new_tokens + first, sizeof(int64_t) * kept);
        a->counts[row] += kept;
        a->ends[row] = a->starts[b] + kept;
    }
}
