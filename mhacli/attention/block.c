/* Softmax and every head statistic of a block of query rows whose scores lie in cache: see `statistics.py`, which does the same with torch.

   Three sweeps over a row: its largest score, the powers of two with their sums, and the weights with the sums of keys, distances and
   equal tokens. Plain C that compilers vectorise; sums are float32, as in torch. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__) && !defined(MHA_NO_CLONES)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif

#define HIDDEN -1e30f /* the score of a masked cell; its weight is 0 */
#define NO_KEY -1e29f /* a row whose largest score is below this sees no key */
#define LN2 0.69314718056f

typedef struct {
    int64_t n_rows, n_keys, stride;        /* of the block of scores */
    int64_t query, key;                    /* the position of its first row and column */
    int64_t low, high;                     /* row i sees the keys i + low to i + high */
    const uint8_t *cells;                  /* 1 = may attend, or NULL */
    int64_t cell_row, cell_key;            /* its strides */
    float sink;                            /* the score of the sink logit, -INFINITY for none */
    float limit;                           /* the largest size of a query's largest score */
    int64_t first, leading;                /* the first key of the text, and the number of its leading keys */
    const int32_t *q_tokens, *k_tokens, *before_k; /* by position */
    int64_t is_self;
    int64_t map_block, map_keys, zero;     /* queries and keys in a cell of the map, its row length, the index of distance 0 */
} Block;

typedef struct {
    float *mass, *entropy, *squares, *peak, *distance, *first, *leading, *lse; /* by query; lse to base 2 */
    float *received, *map, *profile;       /* by key, by cell of the map, by signed distance */
    double *duplicate, *induction;
    float *columns;                        /* zeros, one for each key of the block */
} Sums;

/* 2^x for x in [-126, 127]: relative error below 2e-7. */
static inline float power_of_2(float x) {
    float n = (x + 12582912.f) - 12582912.f; /* the nearest whole number: 1.5 * 2^23 leaves no room for a fraction */
    float f = x - n;
    float p = 1.5403530394e-4f;
    p = p * f + 1.3333558146e-3f;
    p = p * f + 9.6181291077e-3f;
    p = p * f + 5.5504108665e-2f;
    p = p * f + 2.4022650696e-1f;
    p = p * f + 6.9314718056e-1f;
    p = p * f + 1.0f;
    int32_t exponent = ((int32_t)n + 127) << 23;
    float power;
    memcpy(&power, &exponent, 4);
    return p * power;
}

/* Adds the sums of columns since the last call to what keys receive and to a row of the map. */
static inline void fold(const Block *b, const Sums *s, int64_t query, int64_t from, int64_t to) {
    float *map_row = s->map + query / b->map_block * b->map_keys;
    for (int64_t start = from; start < to;) {
        int64_t cell = (b->key + start) / b->map_block, stop = (cell + 1) * b->map_block - b->key;
        if (stop > to) stop = to;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t j = start; j < stop; j++) {
            sum += s->columns[j];
            s->received[b->key + j] += s->columns[j];
            s->columns[j] = 0;
        }
        map_row[cell] += sum;
        start = stop;
    }
}

/* The first key of the block that query i sees, and the one after the last. */
static inline void keys_of(const Block *b, int64_t i, int64_t *from, int64_t *to) {
    int64_t low = i + b->low - b->key, high = i + b->high + 1 - b->key;
    *from = low < 0 ? 0 : low > b->n_keys ? b->n_keys : low;
    *to = high > b->n_keys ? b->n_keys : high < *from ? *from : high;
}

/* Hides masked cells and writes the largest score of each query to `peak`. Whether all of them are finite and none is beyond the limit. */
static inline int find_tops(float *restrict scores, const Block *b, const Sums *s) {
    float most = 0, difference = 0;
    for (int64_t r = 0; r < b->n_rows; r++) {
        int64_t from, to;
        keys_of(b, b->query + r, &from, &to);
        float *restrict x = scores + r * b->stride + from;
        const int32_t n = (int32_t)(to - from);
        if (b->cells) {
            const uint8_t *cells = b->cells + r * b->cell_row + from * b->cell_key;
            if (b->cell_key == 1)
#pragma omp simd
                for (int32_t j = 0; j < n; j++) x[j] = cells[j] ? x[j] : HIDDEN;
            else if (!*cells)
                for (int32_t j = 0; j < n; j++) x[j] = HIDDEN;
        }
        float top = HIDDEN;
#pragma omp simd reduction(max : top) reduction(+ : difference)
        for (int32_t j = 0; j < n; j++) {
            top = x[j] > top ? x[j] : top;
            difference += x[j] - x[j]; /* 0 of a finite number alone */
        }
        s->peak[b->query + r] = top;
        float size = top < NO_KEY ? 0 : fabsf(top);
        most = size > most ? size : most;
    }
    return difference == 0 && most <= b->limit;
}

/* Makes the weights of a block and adds its statistics. Returns 0, and does neither, where scores are not finite or beyond the limit. */
CLONES int mha_block(float *restrict scores, const Block *b, const Sums *s) {
    double duplicate = 0, induction = 0;
    int64_t folded_from = b->n_keys, folded_to = 0;
    if (!find_tops(scores, b, s)) {
        memset(s->peak + b->query, 0, (size_t)b->n_rows * 4);
        return 0;
    }
    for (int64_t r = 0; r < b->n_rows; r++) {
        int64_t i = b->query + r, from, to;
        keys_of(b, i, &from, &to);
        float *restrict row = scores + r * b->stride, *restrict x = row + from;
        const int32_t n = (int32_t)(to - from);
        const float top = s->peak[i];
        memset(row, 0, (size_t)from * 4);
        memset(row + to, 0, (size_t)(b->n_keys - to) * 4);
        if (top < NO_KEY) {
            memset(x, 0, (size_t)n * 4);
            s->mass[i] = s->entropy[i] = s->squares[i] = s->distance[i] = s->first[i] = s->leading[i] = s->lse[i] = 0;
            s->peak[i] = HIDDEN;
        } else {
            const float reference = top > b->sink ? top : b->sink, of_sink = exp2f(b->sink - reference);
            const float step = (float)(b->key + from - i);
            float total = 0, bits = 0, squares = 0, distance = 0;
#pragma omp simd reduction(+ : total, bits, squares, distance)
            for (int32_t j = 0; j < n; j++) {
                float y = x[j] - reference, p = y > -126.f ? power_of_2(y > -126.f ? y : -126.f) : 0.f;
                x[j] = p;
                total += p;
                bits += p * y;
                squares += p * p;
                distance += p * fabsf((float)j + step);
            }
            const float of_all = total + of_sink, scale = 1.f / of_all, log_all = log2f(of_all);
            float mass = 0, same = 0, after = 0;
            float *restrict columns = s->columns + from, *restrict profile = s->profile + (b->zero + b->key - i) + from;
            const int32_t token = b->q_tokens[i], *restrict k_tokens = b->k_tokens + b->key + from,
                          *restrict before_k = b->before_k + b->key + from;
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
            if (b->is_self) {
                int64_t own = i - b->key;
                if (own >= from && own < to && b->k_tokens[i] == token) same -= row[own];
                if (own + 1 >= from && own + 1 < to && b->before_k[i + 1] == token) after -= row[own + 1];
            }
            s->mass[i] = mass;
            s->entropy[i] = fmaxf(0.f, (log_all * total - bits) * scale * LN2);
            s->squares[i] = squares * scale * scale;
            s->distance[i] = distance * scale;
            s->peak[i] = (top - reference - log_all) * LN2;
            s->lse[i] = reference + log2f(total);
            float leading = 0;
            int64_t at = b->first - b->key;
            for (int64_t j = at; j < at + b->leading; j++) leading += j >= 0 && j < b->n_keys ? row[j] : 0.f;
            s->leading[i] = leading;
            s->first[i] = at >= 0 && at < b->n_keys ? row[at] : 0.f;
            duplicate += same;
            induction += after;
            folded_from = from < folded_from ? from : folded_from;
            folded_to = to > folded_to ? to : folded_to;
        }
        if (r + 1 == b->n_rows || (i + 1) % b->map_block == 0) {
            fold(b, s, i, folded_from, folded_to);
            folded_from = b->n_keys, folded_to = 0;
        }
    }
    *s->duplicate += duplicate;
    *s->induction += induction;
    return 1;
}
