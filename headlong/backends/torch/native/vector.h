/* Sixteen floats at a time, in the compiler's own vector types; it splits them where the machine's are narrower.
 *
 * The last few elements of an array go through the same code as the others, padded, so that an element's bits do not
 * depend on where it stands.
 */
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define LANES 16

typedef float floats __attribute__((vector_size(64)));
typedef float eight __attribute__((vector_size(32)));
typedef float four __attribute__((vector_size(16)));
typedef int32_t four_ints __attribute__((vector_size(16)));
typedef int32_t ints __attribute__((vector_size(64)));
typedef uint32_t words __attribute__((vector_size(64)));

/* Compilers that split vectors keep them in memory. What must stay in registers is written in pieces: vectors of the
 * machine's own width, PIECES of which are one of LANES. */
#if defined(__AVX512F__)
#define PIECE 16
#elif defined(__AVX__)
#define PIECE 8
#else
#define PIECE 4
#endif
#define PIECES (LANES / PIECE)

typedef float piece __attribute__((vector_size(4 * PIECE)));
typedef int32_t piece_ints __attribute__((vector_size(4 * PIECE)));
typedef uint16_t piece_shorts __attribute__((vector_size(4 * PIECE)));
typedef uint32_t piece_words __attribute__((vector_size(4 * PIECE)));

static inline piece load_piece(const float *p) { piece v; memcpy(&v, p, sizeof v); return v; }
static inline void store_piece(float *p, piece v) { memcpy(p, &v, sizeof v); }

/* Keep a piece in a register, not in the memory it came from. */
#if defined(__x86_64__)
#define HOLD(v) __asm__("" : "+v"(v))
#elif defined(__aarch64__)
#define HOLD(v) __asm__("" : "+w"(v))
#else
#define HOLD(v) (void)(v)
#endif

/* Up to a piece, zeros past the end. */
static inline piece load_left(const float *p, long left) {
    if (left >= PIECE) return load_piece(p);
    piece v = {0};
    if (left > 0) memcpy(&v, p, sizeof(float) * left);
    return v;
}

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
#define SHUFFLE(TYPE, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(TYPE, a, b, ...) __builtin_shuffle(a, b, (TYPE){__VA_ARGS__})
#endif

/* The first half of add_lanes, of a vector whose pieces stand `apart`. */
static inline four fold_lanes(const piece *v, long apart) {
#if PIECE == 4
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

/* The second half, of four at once: the same sums in the same order. */
static inline four add_fours(four a, four b, four c, four d) {
    four ab = SHUFFLE(four_ints, a, b, 0, 4, 1, 5), cd = SHUFFLE(four_ints, c, d, 0, 4, 1, 5);
    four up = SHUFFLE(four_ints, a, b, 2, 6, 3, 7), more = SHUFFLE(four_ints, c, d, 2, 6, 3, 7);
    ab += up, cd += more;  /* lanes 0 and 2 of a, of b; lanes 1 and 3 of a, of b */
    return SHUFFLE(four_ints, ab, cd, 0, 1, 4, 5) + SHUFFLE(four_ints, ab, cd, 2, 3, 6, 7);
}

/* add_lanes of four vectors at once, whose pieces stand `apart`. */
static inline four add_lanes4(const piece v[4], long apart) {
    return add_fours(fold_lanes(v, apart), fold_lanes(v + 1, apart), fold_lanes(v + 2, apart), fold_lanes(v + 3, apart));
}

/* Pick from PIECE places each: every lane's, by a macro of the lane and a size. */
#if PIECE == 16
#define EACH(f, size)                                                                                               \
    f(0, size), f(1, size), f(2, size), f(3, size), f(4, size), f(5, size), f(6, size), f(7, size), f(8, size),     \
        f(9, size), f(10, size), f(11, size), f(12, size), f(13, size), f(14, size), f(15, size)
#elif PIECE == 8
#define EACH(f, size) f(0, size), f(1, size), f(2, size), f(3, size), f(4, size), f(5, size), f(6, size), f(7, size)
#else
#define EACH(f, size) f(0, size), f(1, size), f(2, size), f(3, size)
#endif
#define UPPER(i, size) ((i) & (size) ? (i) - (size) + PIECE : (i))
#define LOWER(i, size) ((i) & (size) ? (i) + PIECE : (i) + (size))

/* Swap the off-diagonal blocks of `size` lanes in every square of twice as many. */
#define SWAP_BLOCKS(v, size)                                                       \
    for (int i_ = 0; i_ < PIECE; i_++)                                             \
        if (!(i_ & (size))) {                                                      \
            piece a_ = (v)[i_], b_ = (v)[i_ + (size)];                             \
            (v)[i_] = SHUFFLE(piece_ints, a_, b_, EACH(UPPER, size));              \
            (v)[i_ + (size)] = SHUFFLE(piece_ints, a_, b_, EACH(LOWER, size));     \
        }

/* Pieces as the rows of a square, which become its columns. */
static inline void transpose(piece v[PIECE]) {
#if PIECE > 8
    SWAP_BLOCKS(v, 8)
#endif
#if PIECE > 4
    SWAP_BLOCKS(v, 4)
#endif
    SWAP_BLOCKS(v, 2)
    SWAP_BLOCKS(v, 1)
}

/* Products of bytes: each lane of a sum plus those of four weights, 0 .. 255, and four codes, -127 .. 127, which are CODE
 * words: all four, or two pairs in 16 bits each, the even ones first. */
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || !defined(__AVX2__)
#define CODE 1
typedef piece_words weights;
static inline weights ready_weights(piece_words w) { return w; }
#else
#define CODE 2
typedef struct {
    piece_words even, odd;
} weights;
static inline weights ready_weights(piece_words w) { return (weights){w & 0x00FF00FFu, (piece_words)((piece_shorts)w >> 8)}; }
#endif

static inline piece_ints add_products(piece_ints sum, weights w, const int32_t *code) {
    piece_ints first = (piece_ints){0} + code[0];
#if defined(__AVX512VNNI__)
    return (piece_ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)first);
#elif defined(__AVXVNNI__)
    return (piece_ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)w, (__m256i)first);
#elif defined(__AVX512BW__)
    piece_ints second = (piece_ints){0} + code[1];
    sum += (piece_ints)_mm512_madd_epi16((__m512i)w.even, (__m512i)first);
    return sum + (piece_ints)_mm512_madd_epi16((__m512i)w.odd, (__m512i)second);
#elif defined(__AVX2__)
    piece_ints second = (piece_ints){0} + code[1];
    sum += (piece_ints)_mm256_madd_epi16((__m256i)w.even, (__m256i)first);
    return sum + (piece_ints)_mm256_madd_epi16((__m256i)w.odd, (__m256i)second);
#else
    for (int shift = 0; shift < 32; shift += 8)
        sum += (piece_ints)(w << (24 - shift) >> 24) * (first << (24 - shift) >> 24);
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
