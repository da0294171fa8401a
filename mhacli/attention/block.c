/* Softmax and every head statistic of a block of query rows whose scores lie in cache. It does the
   same as `statistics.py` does with torch.

   Each row is read for its largest score and made powers of two, with the sums of the row. Then the
   powers become weights, with the sums of keys, distances and equal tokens: some columns at a time,
   so that what rows share stays in the first cache. Compilers vectorise it; sums are float32. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__) && !defined(MHA_NO_CLONES)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif

#ifdef __GNUC__ /* into each clone, for its processor */
#define INLINE static inline __attribute__((always_inline))
#else
#define INLINE static inline
#endif

#define HIDDEN -1e30f /* the score of a masked cell; its weight is 0 */
#define NO_KEY -1e29f /* a row whose largest score is below this sees no key */
#define LN2 0.69314718056f
#define COLUMNS 2048
#define LANES 16 /* cells beside each other that are made together, hidden ones among them */

/* One head of a sequence, and where its statistics are. Positions are those in the sequence. */
typedef struct {
    int64_t low, high;                     /* query i sees the keys i + low to i + high */
    int64_t is_self, map_block, map_keys;  /* queries and keys per map cell, cells per map row */
    int64_t zero;                          /* the index of distance 0 in the profile */
    int64_t n_first, n_leading;            /* counts of the first and the leading keys of texts */
    const int64_t *first_keys, *leading_keys;
    const int32_t *q_tokens, *k_tokens, *before_k;
    float *mass, *entropy, *squares, *peak, *distance, *first, *leading; /* by query */
    double *lse;                           /* by query, to base 2: added to the scores' offset */
    float *received, *map, *profile;       /* by key, map cell, signed distance: added to */
    double *duplicate, *induction;         /* added to */
    float sink;                            /* the score of the sink logit, -INFINITY for none */
} Head;

typedef struct {
    float *scores;
    const uint8_t *hidden;                 /* 1 where a cell is masked, also in the band, or NULL */
    int64_t hidden_row;                    /* the cells from one row of it to the next */
    int64_t n_rows, n_keys, query, key;    /* its size, and positions of its first row and column */
    float limit;                           /* the largest size of a query's largest score */
} Block;

/* 2^x for x up to 127, and 0 below -126.5: relative error below 2e-7. */
INLINE float power_of_2(float x) {
    /* 1.5 * 2^23 + 127: a sum with it has no room for a fraction, and ends in an exponent's bits */
    const float whole = 12583039.f;
    x = x < -127.f ? -127.f : x; /* NaN stays */
    float shifted = x + whole, f = x - (shifted - whole);
    float p = 1.5353352839e-4f;
    p = p * f + 1.3398874526e-3f;
    p = p * f + 9.6184373897e-3f;
    p = p * f + 5.5503324708e-2f;
    p = p * f + 2.4022647913e-1f;
    p = p * f + 6.9314720286e-1f;
    p = p * f + 1.0f;
    uint32_t exponent;
    memcpy(&exponent, &shifted, 4);
    exponent <<= 23;
    float power;
    memcpy(&power, &exponent, 4);
    return p * power;
}

INLINE int64_t within(int64_t x, int64_t low, int64_t high) {
    return x < low ? low : x > high ? high : x;
}

/* The first key of the block that a row sees, and the one after the last. */
INLINE void keys_of(const Block *b, const Head *h, int64_t row, int64_t *from, int64_t *to) {
    int64_t diagonal = b->query + row - b->key;
    *from = within(diagonal + h->low, 0, b->n_keys);
    *to = within(diagonal + h->high + 1, *from, b->n_keys);
}

INLINE void hide(float *restrict x, int64_t from, int64_t to) {
    for (int64_t j = from; j < to; j++) x[j] = HIDDEN;
}

/* Hides what a row does not see; widens what it sees to whole lanes, so that no rest is left. */
INLINE void hide_masked(float *restrict x, const Block *b, int64_t row, int64_t *from,
                        int64_t *to) {
    if (b->hidden) {
        const uint8_t *restrict hidden = b->hidden + row * b->hidden_row;
#pragma omp simd
        for (int64_t j = 0; j < b->n_keys; j++) x[j] = hidden[j] ? HIDDEN : x[j];
    }
    int64_t start = *from / LANES * LANES;
    int64_t stop = within((*to + LANES - 1) / LANES * LANES, 0, b->n_keys);
    hide(x, start, *from);
    hide(x, *to, stop);
    *from = start, *to = stop;
}

INLINE float largest(const float *restrict x, int64_t n) {
    float tops[4 * LANES], top = HIDDEN;
    int64_t j = 0;
    for (int l = 0; l < 4 * LANES; l++) tops[l] = HIDDEN;
    for (; j + 4 * LANES <= n; j += 4 * LANES)
#pragma omp simd
        for (int l = 0; l < 4 * LANES; l++) tops[l] = x[j + l] > tops[l] ? x[j + l] : tops[l];
    for (int l = 0; l < 4 * LANES; l++) top = tops[l] > top ? tops[l] : top;
    for (; j < n; j++) top = x[j] > top ? x[j] : top;
    return top;
}

typedef struct {
    float total, bits, squares, distance;
} PowerSums;

/* Makes scores powers of two. `step` is the signed distance of the first key. */
INLINE PowerSums make_powers(float *restrict x, int32_t n, float reference, float step) {
    float total = 0, bits = 0, squares = 0, distance = 0;
#pragma omp simd reduction(+ : total, bits, squares, distance)
    for (int32_t j = 0; j < n; j++) {
        float y = x[j] - reference, p = power_of_2(y);
        x[j] = p;
        total += p;
        bits += p * y;
        squares += p * p;
        distance += p * fabsf((float)j + step);
    }
    return (PowerSums){total, bits, squares, distance};
}

INLINE float sum_of_keys(const float *restrict x, const Block *b, const int64_t *keys, int64_t n) {
    float sum = 0;
    for (int64_t a = 0; a < n; a++)
        sum += keys[a] >= b->key && keys[a] < b->key + b->n_keys ? x[keys[a] - b->key] : 0.f;
    return sum;
}

/* Makes a row powers of two and writes its statistics. Returns what they are to be multiplied with,
   0 of a row without keys, and NaN where scores are not finite or beyond the limit. */
INLINE float make_row(float *restrict x, const Block *b, const Head *h, int64_t row) {
    int64_t i = b->query + row, from, to;
    keys_of(b, h, row, &from, &to);
    hide_masked(x, b, row, &from, &to);
    const float top = largest(x + from, to - from);
    h->mass[i] = h->entropy[i] = h->squares[i] = h->distance[i] = h->first[i] = h->leading[i] = 0;
    h->peak[i] = -INFINITY;
    if (top < NO_KEY) {
        for (int64_t j = from; j < to; j++)
            if (x[j] != HIDDEN) return NAN;
        from = to = 0;
    }
    memset(x, 0, (size_t)from * sizeof *x);
    memset(x + to, 0, (size_t)(b->n_keys - to) * sizeof *x);
    const float reference = top > h->sink ? top : h->sink;
    const float step = (float)(b->key + from - i);
    const PowerSums sums = make_powers(x + from, (int32_t)(to - from), reference, step);
    if (top < NO_KEY) return 0;
    if (!(fabsf(top) <= b->limit && fabsf(sums.total + sums.bits) < INFINITY)) return NAN;
    const float of_all = sums.total + exp2f(h->sink - reference);
    const float scale = 1.f / of_all, log_all = log2f(of_all);
    h->entropy[i] = fmaxf(0.f, (log_all * sums.total - sums.bits) * scale * LN2);
    h->squares[i] = sums.squares * scale * scale;
    h->distance[i] = sums.distance * scale;
    h->peak[i] = (top - reference - log_all) * LN2;
    h->lse[i] += reference + log2f(sums.total);
    h->first[i] = sum_of_keys(x, b, h->first_keys, h->n_first) * scale;
    h->leading[i] = sum_of_keys(x, b, h->leading_keys, h->n_leading) * scale;
    return scale;
}

typedef struct {
    float mass, same, after;
} WeightSums;

INLINE WeightSums make_weights(float *restrict x, int32_t n, float scale, float *restrict columns,
                               float *restrict profile, const int32_t *restrict k_tokens,
                               const int32_t *restrict before_k, int32_t token) {
    float mass = 0, same = 0, after = 0;
#pragma omp simd reduction(+ : mass, same, after)
    for (int32_t j = 0; j < n; j++) {
        float w = x[j] * scale;
        x[j] = w;
        mass += w;
        columns[j] += w;
        profile[j] += w;
        same += k_tokens[j] == token ? w : 0.f;
        after += before_k[j] == token ? w : 0.f;
    }
    return (WeightSums){mass, same, after};
}

/* Moves sums of columns to what `n` keys from `key` on receive, and to a query's row of the map. */
INLINE void add_columns(float *restrict columns, const Head *h, int64_t query, int64_t key,
                        int64_t n) {
    float *restrict cells = h->map + query / h->map_block * h->map_keys;
    float *restrict received = h->received + key;
    for (int64_t start = 0; start < n;) {
        int64_t cell = (key + start) / h->map_block;
        int64_t stop = within((cell + 1) * h->map_block - key, 0, n);
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t j = start; j < stop; j++) {
            sum += columns[j];
            received[j] += columns[j];
            columns[j] = 0;
        }
        cells[cell] += sum;
        start = stop;
    }
}

/* Makes the powers of some columns weights, and adds what all rows give them. */
INLINE void make_columns(const Block *b, const Head *h, const float *scales, int64_t first,
                         int64_t last) {
    float columns[COLUMNS] = {0};
    for (int64_t r = 0; r < b->n_rows; r++) {
        int64_t i = b->query + r, key = b->key + first, from, to, own = i - key;
        float *x = b->scores + r * b->n_keys + first;
        keys_of(b, h, r, &from, &to);
        from = within(from / LANES * LANES, first, last) - first;
        to = within((to + LANES - 1) / LANES * LANES, first, last) - first;
        if (scales[r] != 0 && from < to) {
            const int32_t token = h->q_tokens[i];
            float *profile = h->profile + (h->zero - own) + from;
            const int32_t *k_tokens = h->k_tokens + key, *before_k = h->before_k + key;
            WeightSums sums =
                make_weights(x + from, (int32_t)(to - from), scales[r], columns + from, profile,
                             k_tokens + from, before_k + from, token);
            if (h->is_self && own >= from && own < to && k_tokens[own] == token)
                sums.same -= x[own];
            if (h->is_self && own + 1 >= from && own + 1 < to && before_k[own + 1] == token)
                sums.after -= x[own + 1];
            h->mass[i] += sums.mass;
            *h->duplicate += sums.same;
            *h->induction += sums.after;
        }
        if (r + 1 == b->n_rows || (i + 1) % h->map_block == 0)
            add_columns(columns, h, i, key, last - first);
    }
}

/* Makes the weights of a block and adds its statistics. Returns 0, and adds none, where scores are
   not finite or beyond the limit. */
CLONES int mha_reduce(const Block *b, const Head *h) {
    float scales[b->n_rows];
    double lse[b->n_rows];
    memcpy(lse, h->lse + b->query, sizeof lse);
    for (int64_t r = 0; r < b->n_rows; r++) {
        scales[r] = make_row(b->scores + r * b->n_keys, b, h, r);
        if (isnan(scales[r])) {
            memcpy(h->lse + b->query, lse, sizeof lse);
            return 0;
        }
    }
    for (int64_t first = 0; first < b->n_keys; first += COLUMNS)
        make_columns(b, h, scales, first, within(first + COLUMNS, 0, b->n_keys));
    return 1;
}
