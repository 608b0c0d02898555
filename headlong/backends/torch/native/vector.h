/* As many floats at a time as the machine's vectors hold: where a compiler has to split wider ones it keeps them in memory.
 *
 * Sums are over LANES lanes on every machine, in PIECES vectors, so that all that fuse products and sums give the same
 * bits. The last few elements of an array go through the same code as the others, padded.
 */
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define WIDTH 16
#elif defined(__AVX__)
#define WIDTH 8
#else
#define WIDTH 4
#endif
#define LANES 16
#define PIECES (LANES / WIDTH)

typedef float floats __attribute__((vector_size(4 * WIDTH)));
typedef int32_t ints __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t words __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t shorts __attribute__((vector_size(4 * WIDTH)));
typedef float eight __attribute__((vector_size(32)));
typedef float four __attribute__((vector_size(16)));
typedef int32_t four_ints __attribute__((vector_size(16)));

static inline floats load(const float *p) { floats v; memcpy(&v, p, sizeof v); return v; }
static inline void store(float *p, floats v) { memcpy(p, &v, sizeof v); }

/* What is left of an array, zeros past its end. */
static inline floats load_some(const float *p, long left) {
    if (left >= WIDTH) return load(p);
    floats v = {0};
    if (left > 0) memcpy(&v, p, sizeof(float) * left);
    return v;
}

static inline void store_some(float *p, floats v, long left) {
    if (left >= WIDTH) store(p, v);
    else memcpy(p, &v, sizeof(float) * left);
}

/* Keep a vector in a register, not in the memory it came from. */
#if defined(__x86_64__)
#define HOLD(v) __asm__("" : "+v"(v))
#elif defined(__aarch64__)
#define HOLD(v) __asm__("" : "+w"(v))
#else
#define HOLD(v) (void)(v)
#endif

#if defined(__clang__)
#define SHUFFLE(TYPE, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(TYPE, a, b, ...) __builtin_shuffle(a, b, (TYPE){__VA_ARGS__})
#endif

/* Sixteen lanes to four, in pieces that stand `apart`. */
static inline four fold_lanes(const floats *v, long apart) {
#if WIDTH == 4
    return (v[0] + v[2 * apart]) + (v[apart] + v[3 * apart]);
#else
    eight low, high;
    memcpy(&low, &v[0], sizeof low);
    memcpy(&high, PIECES == 1 ? (const char *)v + sizeof low : (const char *)&v[apart], sizeof high);
    low += high;
    four a, b;
    memcpy(&a, &low, sizeof a);
    memcpy(&b, (char *)&low + sizeof a, sizeof b);
    return a + b;
#endif
}

/* The sum of all lanes. */
static inline float add_lanes(const floats v[PIECES]) {
    four a = fold_lanes(v, 1);
    return (a[0] + a[2]) + (a[1] + a[3]);
}

/* The same of four at once. */
static inline four add_lanes4(const floats v[4], long apart) {
    four a = fold_lanes(v, apart), b = fold_lanes(v + 1, apart), c = fold_lanes(v + 2, apart), d = fold_lanes(v + 3, apart);
    four ab = SHUFFLE(four_ints, a, b, 0, 4, 1, 5) + SHUFFLE(four_ints, a, b, 2, 6, 3, 7);
    four cd = SHUFFLE(four_ints, c, d, 0, 4, 1, 5) + SHUFFLE(four_ints, c, d, 2, 6, 3, 7);
    return SHUFFLE(four_ints, ab, cd, 0, 1, 4, 5) + SHUFFLE(four_ints, ab, cd, 2, 3, 6, 7);
}

/* f of every lane, one after the other. */
#if WIDTH == 16
#define EACH(f, size)                                                                                               \
    f(0, size), f(1, size), f(2, size), f(3, size), f(4, size), f(5, size), f(6, size), f(7, size), f(8, size),     \
        f(9, size), f(10, size), f(11, size), f(12, size), f(13, size), f(14, size), f(15, size)
#elif WIDTH == 8
#define EACH(f, size) f(0, size), f(1, size), f(2, size), f(3, size), f(4, size), f(5, size), f(6, size), f(7, size)
#else
#define EACH(f, size) f(0, size), f(1, size), f(2, size), f(3, size)
#endif
#define UPPER(i, size) ((i) & (size) ? (i) - (size) + WIDTH : (i))
#define LOWER(i, size) ((i) & (size) ? (i) + WIDTH : (i) + (size))

/* Swap the off-diagonal blocks of `size` lanes in every square of twice as many. */
#define SWAP_BLOCKS(v, size)                                                       \
    for (int i_ = 0; i_ < WIDTH; i_++)                                             \
        if (!(i_ & (size))) {                                                      \
            floats a_ = (v)[i_], b_ = (v)[i_ + (size)];                            \
            (v)[i_] = SHUFFLE(ints, a_, b_, EACH(UPPER, size));                    \
            (v)[i_ + (size)] = SHUFFLE(ints, a_, b_, EACH(LOWER, size));           \
        }

/* Vectors as the rows of a square, which become its columns. */
static inline void transpose(floats v[WIDTH]) {
#if WIDTH > 8
    SWAP_BLOCKS(v, 8)
#endif
#if WIDTH > 4
    SWAP_BLOCKS(v, 4)
#endif
    SWAP_BLOCKS(v, 2)
    SWAP_BLOCKS(v, 1)
}

/* Products of bytes: each lane of a sum plus those of four weights, 0 .. 255, and four codes, -127 .. 127, which are CODE
 * words: all four, or two pairs in 16 bits each, the even ones first. */
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || !defined(__AVX2__)
#define CODE 1
typedef words weights;
static inline weights ready_weights(words w) { return w; }
#else
#define CODE 2
typedef struct {
    words even, odd;
} weights;
static inline weights ready_weights(words w) { return (weights){w & 0x00FF00FFu, (words)((shorts)w >> 8)}; }
#endif

static inline ints add_products(ints sum, weights w, const int32_t *code) {
    ints first = (ints){0} + code[0];
#if defined(__AVX512VNNI__)
    return (ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)first);
#elif defined(__AVXVNNI__)
    return (ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)w, (__m256i)first);
#elif defined(__AVX512BW__)
    ints second = (ints){0} + code[1];
    sum += (ints)_mm512_madd_epi16((__m512i)w.even, (__m512i)first);
    return sum + (ints)_mm512_madd_epi16((__m512i)w.odd, (__m512i)second);
#elif defined(__AVX2__)
    ints second = (ints){0} + code[1];
    sum += (ints)_mm256_madd_epi16((__m256i)w.even, (__m256i)first);
    return sum + (ints)_mm256_madd_epi16((__m256i)w.odd, (__m256i)second);
#else
    for (int shift = 0; shift < 32; shift += 8)
        sum += (ints)(w << (24 - shift) >> 24) * (first << (24 - shift) >> 24);
    return sum;
#endif
}

/* One vector where the mask is set, the other elsewhere. */
static inline floats pick(ints mask, floats yes, floats no) { return (floats)((mask & (ints)yes) | (~mask & (ints)no)); }

/* e^x, to about one unit in the last place; x is clamped to where the result is a normal number. */
static inline floats exps(floats x) {
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

static inline floats sigmoids(floats x) { return 1.0f / (1.0f + exps(-x)); }
static inline floats silus(floats x) { return x * sigmoids(x); }

/* out[i] = f(in[i]) through the same code for the last few elements too. */
#define MAP(out, n, expression) \
    for (long i = 0; i < (n); i += WIDTH) store_some((out) + i, expression, (n) - i)

static inline float dot(const float *a, const float *b, long n) {
    floats sum[PIECES] = {0};
    for (long i = 0; i < n; i += LANES)
        for (long part = 0, at = i; part < PIECES; part++, at += WIDTH)
            sum[part] += load_some(a + at, n - at) * load_some(b + at, n - at);
    return add_lanes(sum);
}
