/* Sixteen floats at a time, in the compiler's own vector types; it splits them where the machine's are narrower.
 *
 * The last few elements of an array go through the same code as the others, padded, so that an element's bits do not
 * depend on where it stands.
 */
#include <stdint.h>
#include <string.h>

#define LANES 16

typedef float floats __attribute__((vector_size(64)));
typedef float eight __attribute__((vector_size(32)));
typedef float four __attribute__((vector_size(16)));
typedef int32_t ints __attribute__((vector_size(64)));
typedef uint32_t words __attribute__((vector_size(64)));

static inline floats load(const float *p) { floats v; memcpy(&v, p, sizeof v); return v; }
static inline void store(float *p, floats v) { memcpy(p, &v, sizeof v); }
static inline float add_lanes(floats v) {
    eight low, high;
    memcpy(&low, &v, sizeof low);
    memcpy(&high, (char *)&v + sizeof low, sizeof high);
    low += high;
    four a, b;
    memcpy(&a, &low, sizeof a);
    memcpy(&b, (char *)&low + sizeof a, sizeof b);
    a += b;
    return (a[0] + a[2]) + (a[1] + a[3]);
}

/* One vector where the mask is set, the other elsewhere. */
static inline floats pick(ints mask, floats yes, floats no) { return (floats)((mask & (ints)yes) | (~mask & (ints)no)); }

/* e^x for 16 floats, to about one unit in the last place; x is clamped to where the result is a normal number. */
static inline floats exp16(floats x) {
    x = pick(x > 88.0f, (floats){0} + 88.0f, x);
    x = pick(x < -87.0f, (floats){0} - 87.0f, x);
    floats n = x * 1.44269504f + 12582912.0f;  /* rounds to a whole number in the low bits */
    ints whole = (ints)n - 0x4B400000;
    n -= 12582912.0f;
    floats r = x - n * 0.693145752f;
    r = r - n * 1.42860677e-6f;
    floats p = r * 1.9875691e-4f + 1.3981999e-3f;
    p = p * r + 8.3334519e-3f;
    p = p * r + 4.1665796e-2f;
    p = p * r + 1.6666665e-1f;
    p = p * r + 5.0000001e-1f;
    p = p * r * r + r + 1.0f;
    return p * (floats)((whole + 127) << 23);
}

static inline floats sigmoid16(floats x) { return 1.0f / (1.0f + exp16(-x)); }
static inline floats silu16(floats x) { return x * sigmoid16(x); }

/* out[i] = f(in[i]) through the same 16-lane code for the last few elements too. */
#define MAP(out, n, expression)                                    \
    do {                                                           \
        int i = 0;                                                 \
        for (; i + LANES <= (n); i += LANES) {                     \
            store((out) + i, expression);                          \
        }                                                          \
        if (i < (n)) {                                             \
            float tail_[LANES];                                    \
            store(tail_, expression);                              \
            memcpy((out) + i, tail_, sizeof(float) * ((n) - i));   \
        }                                                          \
    } while (0)

/* Up to 16 floats from p, zeros past the end. */
static inline floats load_some(const float *p, int left) {
    if (left >= LANES) return load(p);
    float padded[LANES] = {0};
    memcpy(padded, p, sizeof(float) * left);
    return load(padded);
}

static inline float dot(const float *a, const float *b, int n) {
    floats sum = {0};
    for (int i = 0; i < n; i += LANES) sum += load_some(a + i, n - i) * load_some(b + i, n - i);
    return add_lanes(sum);
}
