/* Which drafts are left: while those so far are likely enough to be kept, by how sure the head was of each.
 *
 * How sure it was is a number for each draft, which grows with its chance. What that chance is, is learnt from what
 * windows keep.
 */
#define SURENESSES 10       /* that are told apart */
#define USUAL_CHANCE 0.95f  /* of a draft of which nothing is known: much, or it would never be tried, */
#define USUAL_DRAFTS 2.0f   /* which counts as so many */
#define RULES 2             /* by which drafts are chosen, each with counts of its own: BEST and COUPLED */
#define FADING 0.995f       /* by which every pass that drafts multiplies counts: what was ruled out is tried again */

/* Of the rows of an engine. */
typedef struct {
    const int64_t *most; /* [rows]: drafts that may be left */
    const float *least;  /* [rows]: chance that a draft must have, with those before it; 0: all are left */
    const int64_t *rules;
    float *chances;      /* [rows], that all drafts so far are kept */
    int64_t *left;       /* [rows] */
    int64_t *classes;    /* [rows, depth]: by draft, the counts it belongs to; -1: none */
    float *counts;       /* [RULES, SURENESSES, 2]: drafts, and how many of them were kept */
} Surenesses;

static int64_t class_of(int64_t rule, float sure) {
    static const float edges[SURENESSES - 1] = {0.25f, 0.5f, 1, 1.5f, 2, 3, 4, 6, 8};
    int64_t which = 0;
    while (which < SURENESSES - 1 && sure >= edges[which]) which++;
    return rule * SURENESSES + which;
}

typedef struct {
    int64_t *goes_on;  /* [B]: whether a row is to have a next draft; written at the first step */
    const float *sure; /* [B] */
    const int64_t *rows;
    Surenesses of;
    long batch, step, depth;
} Leave;

/* Take in a step's drafts. If no row goes on, a replay ends here. */
void leave(const Leave *a) {
    long going = 0;
    for (long b = 0; b < a->batch; b++) {
        long row = a->rows[b];
        int64_t *classes = a->of.classes + row * a->depth;
        if (a->step == 0) {
            a->of.chances[row] = 1.0f, a->of.left[row] = 0, a->goes_on[b] = 1;
            for (long j = 0; j < a->depth; j++) classes[j] = -1;
        }
        if (!a->goes_on[b]) continue;
        if (a->of.least[row] > 0.0f) {
            classes[a->step] = class_of(a->of.rules[row], a->sure[b]);
            const float *count = a->of.counts + 2 * classes[a->step];
            a->of.chances[row] *= (count[1] + USUAL_DRAFTS * USUAL_CHANCE) / (count[0] + USUAL_DRAFTS);
        }
        a->goes_on[b] = a->of.chances[row] >= a->of.least[row] && a->step < a->of.most[row];
        if (a->goes_on[b]) a->of.left[row] = a->step + 1;
        a->goes_on[b] = a->goes_on[b] && a->step + 1 < a->of.most[row];
        going += a->goes_on[b];
    }
    if (!going) replay_ends = 1;
}

typedef struct {
    const int64_t *rows, *offsets, *kept;
    Surenesses of;
    long batch, depth;
} Learn;

/* Count what windows kept of drafts that were judged. */
void learn(const Learn *a) {
    for (long i = 0; i < 2 * RULES * SURENESSES; i++) a->of.counts[i] *= FADING;
    for (long b = 0, i; b < a->batch; b++) {
        const int64_t *classes = a->of.classes + a->rows[b] * a->depth;
        for (i = 0; i + 1 < a->offsets[b + 1] - a->offsets[b] && i < a->kept[b] && classes[i] >= 0; i++) {
            float *count = a->of.counts + 2 * classes[i];
            count[0] += 1.0f;
            count[1] += i + 1 < a->kept[b];
        }
    }
}
