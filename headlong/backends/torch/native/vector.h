/* Sixteen floats at a time, in the compiler's own vector types; it splits them where the machine's are narrower.
 *
 * The last few elements of an array go through the same code as the others, padded, so that an element's bits do not
 * depend on where it stands.
 */
#include <stdint.h>
#include <string.h>
#if defined(__AVX512VNNI__)
#include <immintrin.h>
#endif

#define LANES 16

typedef float floats __attribute__((vector_size(64)));
typedef float eight __attribute__((vector_size(32)));
typedef float four __attribute__((vector_size(16)));
typedef int32_t ints __attribute__((vector_size(64)));
typedef uint32_t words __attribute__((vector_size(64)));
typedef uint8_t bytes __attribute__((vector_size(64)));
typedef int8_t narrow __attribute__((vector_size(16)));

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

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (ints){__VA_ARGS__})
#endif

/* add_lanes of four vectors at once: the same sums in the same order. */
static inline four add_lanes4(const floats v[4]) {
    floats a = SHUFFLE(v[0], v[1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               SHUFFLE(v[0], v[1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    floats b = SHUFFLE(v[2], v[3], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               SHUFFLE(v[2], v[3], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    floats c = SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
               SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    c += SHUFFLE(c, c, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    c += SHUFFLE(c, c, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
    return (four){c[0], c[4], c[8], c[12]};
}

/* The even elements of 32, and the odd ones. */
static inline floats evens(floats a, floats b) {
    return SHUFFLE(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
}
static inline floats odds(floats a, floats b) {
    return SHUFFLE(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}

/* Swap the off-diagonal blocks of `size` lanes in every square of twice as many. */
#define SWAP_BLOCKS(v, size, upper, lower)                       \
    for (int i_ = 0; i_ < LANES; i_++)                           \
        if (!(i_ & (size))) {                                    \
            floats a_ = (v)[i_], b_ = (v)[i_ + (size)];          \
            (v)[i_] = SHUFFLE(a_, b_, upper);                    \
            (v)[i_ + (size)] = SHUFFLE(a_, b_, lower);           \
        }
#define LIST(...) __VA_ARGS__

/* Sixteen vectors as the rows of a square, which become its columns. */
static inline void transpose(floats v[LANES]) {
    SWAP_BLOCKS(v, 8, LIST(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
                LIST(8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
    SWAP_BLOCKS(v, 4, LIST(0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27),
                LIST(4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31))
    SWAP_BLOCKS(v, 2, LIST(0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
                LIST(2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31))
    SWAP_BLOCKS(v, 1, LIST(0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30),
                LIST(1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31))
}

/* Each lane of the sum plus four products of an unsigned byte of a and a signed one of b. */
static inline ints add_products(ints sum, bytes a, bytes b) {
#if defined(__AVX512VNNI__)
    return (ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#else
    for (int shift = 0; shift < 32; shift += 8)
        sum += (ints)((words)a << (24 - shift) >> 24) * ((ints)b << (24 - shift) >> 24);
    return sum;
#endif
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
    if (left <= 0) return (floats){0};
    float padded[LANES] = {0};
    memcpy(padded, p, sizeof(float) * left);
    return load(padded);
}

static inline float dot(const float *a, const float *b, int n) {
    floats sum = {0};
    for (int i = 0; i < n; i += LANES) sum += load_some(a + i, n - i) * load_some(b + i, n - i);
    return add_lanes(sum);
}
