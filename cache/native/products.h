/* Product of two float vectors; other implementations' sums are equal except for rounding. */
#ifndef LARDER_PRODUCTS_H
#define LARDER_PRODUCTS_H

#include <stddef.h>

typedef float sixteen __attribute__((vector_size(64), aligned(4), may_alias));
#if defined(__clang__)
#define TURNED(vector, ...) __builtin_shufflevector(vector, vector, __VA_ARGS__)
#else
typedef int sixteen_places __attribute__((vector_size(64)));
#define TURNED(vector, ...) __builtin_shuffle(vector, (sixteen_places){__VA_ARGS__})
#endif

/* The order of summation suits vector instructions; the sums stay in registers. */
static inline __attribute__((always_inline)) float near_dot(const float *a, const float *b, size_t dims) {
    sixteen one = {0}, two = {0};
    float rest = 0;
    size_t i = 0;
    for (; i + 32 <= dims; i += 32) {
        one += *(const sixteen *)(a + i) * *(const sixteen *)(b + i);
        two += *(const sixteen *)(a + i + 16) * *(const sixteen *)(b + i + 16);
    }
    for (; i < dims; i++) rest += a[i] * b[i];
    one += two;
    one += TURNED(one, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    one += TURNED(one, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    return ((one[0] + one[1]) + (one[2] + one[3])) + rest;
}

#endif
