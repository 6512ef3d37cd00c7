/* Exact float32 scores in one fixed order of summation, and keys that sort like (score, -ordinal).
 *
 * `exact_dot` adds in the order of numpy's einsum on x86-64 (four lanes, sixteen numbers per iteration, last lane
 * group first); the caller compares the bits before it relies on them. Compiled without any extensions of the
 * instruction set, so no multiply-add can be fused.
 */
#ifndef LARDER_EXACT_H
#define LARDER_EXACT_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <emmintrin.h>
typedef __m128 four;
static inline four four_load(const float *at) { return _mm_loadu_ps(at); }
static inline four four_add_product(four a, four b, four sum) { return _mm_add_ps(_mm_mul_ps(a, b), sum); }
static inline four four_zero(void) { return _mm_setzero_ps(); }
static inline void four_store(float *at, four value) { _mm_storeu_ps(at, value); }
#else
typedef struct { float lane[4]; } four;
static inline four four_load(const float *at) { four out; memcpy(out.lane, at, sizeof out.lane); return out; }
static inline four four_add_product(four a, four b, four sum) {
    for (int i = 0; i < 4; i++) sum.lane[i] = a.lane[i] * b.lane[i] + sum.lane[i];
    return sum;
}
static inline four four_zero(void) { four out = {{0, 0, 0, 0}}; return out; }
static inline void four_store(float *at, four value) { memcpy(at, value.lane, sizeof value.lane); }
#endif

static float exact_dot(const float *a, const float *b, size_t dims) {
    four sum = four_zero();
    size_t i = 0;
    for (; i + 16 <= dims; i += 16)
        for (int part = 12; part >= 0; part -= 4)
            sum = four_add_product(four_load(a + i + part), four_load(b + i + part), sum);
    for (; i + 4 <= dims; i += 4) sum = four_add_product(four_load(a + i), four_load(b + i), sum);
    if (i < dims) {
        float left[4] = {0, 0, 0, 0}, right[4] = {0, 0, 0, 0};
        memcpy(left, a + i, (dims - i) * sizeof(float));
        memcpy(right, b + i, (dims - i) * sizeof(float));
        sum = four_add_product(four_load(left), four_load(right), sum);
    }
    float lanes[4];
    four_store(lanes, sum);
    return (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
}

static inline uint64_t key_of(float score, uint32_t ordinal) {
    uint32_t bits;
    score += 0.0f; /* -0.0 + 0.0 is 0.0 */
    memcpy(&bits, &score, sizeof bits);
    bits = bits >> 31 ? ~bits : bits | 0x80000000u;
    return (uint64_t)bits << 32 | (UINT32_MAX - ordinal);
}

static inline float score_of(uint64_t key) {
    uint32_t bits = (uint32_t)(key >> 32);
    float score;
    bits = bits >> 31 ? bits & 0x7fffffffu : ~bits;
    memcpy(&score, &bits, sizeof score);
    return score;
}

static inline uint32_t ordinal_of(uint64_t key) { return UINT32_MAX - (uint32_t)key; }

/* Sort in place, descending; `spare` has room for as many keys. Merges runs of 16: no quadratic worst case. */
static void sort_down(uint64_t *keys, uint64_t *spare, size_t count) {
    for (size_t start = 0; start < count; start += 16) {
        size_t end = start + 16 < count ? start + 16 : count;
        for (size_t i = start + 1; i < end; i++) {
            uint64_t key = keys[i];
            size_t j = i;
            for (; j > start && keys[j - 1] < key; j--) keys[j] = keys[j - 1];
            keys[j] = key;
        }
    }
    uint64_t *from = keys, *to = spare;
    for (size_t run = 16; run < count; run *= 2) {
        for (size_t start = 0; start < count; start += 2 * run) {
            size_t middle = start + run < count ? start + run : count;
            size_t end = start + 2 * run < count ? start + 2 * run : count;
            size_t left = start, right = middle;
            for (size_t i = start; i < end; i++) {
                int first = right >= end || (left < middle && from[left] >= from[right]);
                to[i] = first ? from[left] : from[right];
                left += (size_t)first;
                right += (size_t)!first;
            }
        }
        uint64_t *swap = from;
        from = to;
        to = swap;
    }
    if (from != keys) memcpy(keys, from, count * sizeof *keys);
}

#endif
