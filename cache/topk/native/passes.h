/* The first pass: sums of products of 8-bit codes for a chunk of users and a tile of items.
 *
 * Each variant is compiled for the instructions in its name and chosen at run time. All add integers, so
 * all compute the same sums.
 */
#ifndef LARDER_PASSES_H
#define LARDER_PASSES_H

#include "candidates.h"

typedef void scan_function(const work_space *, user_chunk *, int64_t first, int64_t end);
typedef void shrink_function(const void *, user_state *, int);

static void shrink_plain(const void *work, user_state *user, int final) { shrink_body(work, user, final); }

static void scan_plain(const work_space *work, user_chunk *chunk, int64_t first, int64_t end) {
    const larder_items *items = work->items;
    int32_t least[CHUNK];
    for (int64_t group = first; group < end; group++) {
        const uint8_t *codes = items->codes + group * LANES * items->width;
        limits(items, chunk, group, least);
        for (int u = 0; u < CHUNK && chunk->user[u]; u++) {
            int32_t sums[LANES] = {0};
            uint32_t bits = 0;
            for (int64_t i = 0; i < items->width; i++) {
                int32_t code = chunk->codes[i / 4 * CHUNK * 4 + u * 4 + i % 4];
                for (int lane = 0; lane < LANES; lane++)
                    sums[lane] += code * codes[i / 4 * LANES * 4 + lane * 4 + i % 4];
            }
            for (int lane = 0; lane < LANES; lane++) bits |= (uint32_t)(sums[lane] >= least[u]) << lane;
            if (bits && chunk->threshold[u] < INFINITY) offer(work, chunk, u, group, bits, sums);
        }
    }
}

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

#define FOR_AVX2 __attribute__((target("avx2")))
#if defined(__clang__)
#define WIDE "" /* clang ignores the whole attribute if it names a width */
#else
#define WIDE ",prefer-vector-width=512"
#endif
#define FOR_VNNI __attribute__((target("avx2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni" WIDE)))
#define FOR_AMX __attribute__((target("avx2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,amx-tile,amx-int8")))

FOR_AVX2 static void shrink_avx2(const void *work, user_state *user, int final) {
    shrink_body(work, user, final);
}

/* Item codes must be below 128 here, so that the sum of two products fits 16 bits. */
FOR_AVX2 static void scan_avx2(const work_space *work, user_chunk *chunk, int64_t first, int64_t end) {
    const larder_items *items = work->items;
    const __m256i ones = _mm256_set1_epi16(1);
    int32_t least[CHUNK], sums[LANES];
    for (int64_t group = first; group < end; group++) {
        const uint8_t *codes = items->codes + group * LANES * items->width;
        limits(items, chunk, group, least);
        for (int u = 0; u < CHUNK && chunk->user[u]; u += 4) {
            __m256i sum[4][2];
            for (int i = 0; i < 4; i++) sum[i][0] = sum[i][1] = _mm256_setzero_si256();
            const int8_t *user = chunk->codes + u * 4;
            for (int64_t at = 0; at < items->width; at += 4, user += CHUNK * 4) {
                __m256i one = _mm256_loadu_si256((const __m256i *)(codes + at * LANES));
                __m256i two = _mm256_loadu_si256((const __m256i *)(codes + at * LANES + 32));
                for (int i = 0; i < 4; i++) {
                    int32_t four_codes;
                    memcpy(&four_codes, user + i * 4, 4);
                    __m256i all = _mm256_set1_epi32(four_codes);
                    __m256i left = _mm256_madd_epi16(_mm256_maddubs_epi16(one, all), ones);
                    __m256i right = _mm256_madd_epi16(_mm256_maddubs_epi16(two, all), ones);
                    sum[i][0] = _mm256_add_epi32(sum[i][0], left);
                    sum[i][1] = _mm256_add_epi32(sum[i][1], right);
                }
            }
            for (int i = 0; i < 4 && chunk->user[u + i]; i++) {
                __m256i limit = _mm256_set1_epi32(least[u + i] - 1);
                __m256i left = _mm256_cmpgt_epi32(sum[i][0], limit);
                __m256i right = _mm256_cmpgt_epi32(sum[i][1], limit);
                uint32_t bits = (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(left)) |
                                (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(right)) << 8;
                if (!bits || !(chunk->threshold[u + i] < INFINITY)) continue;
                _mm256_storeu_si256((__m256i *)sums, sum[i][0]);
                _mm256_storeu_si256((__m256i *)(sums + 8), sum[i][1]);
                offer(work, chunk, u + i, group, bits, sums);
            }
        }
    }
}

FOR_VNNI static void shrink_vnni(const void *work, user_state *user, int final) {
    shrink_body(work, user, final);
}

/* In place: for the intrinsic, gcc 12 copies each sum. */
#define ADD_PRODUCTS(sum, items, user) __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(items), "v"(user))
#define USERS 8
#define GROUPS 2
FOR_VNNI static void scan_vnni(const work_space *work, user_chunk *chunk, int64_t first, int64_t end) {
    const larder_items *items = work->items;
    int64_t size = LANES * items->width;
    int32_t least[GROUPS][CHUNK], sums[LANES];
    for (int64_t group = first; group < end; group += GROUPS) {
        const uint8_t *codes = items->codes + group * size;
        for (int g = 0; g < GROUPS; g++) limits(items, chunk, group + g, least[g]);
        for (int u = 0; u < CHUNK && chunk->user[u]; u += USERS) {
            __m512i sum[USERS][GROUPS];
#pragma GCC unroll 8
            for (int i = 0; i < USERS; i++)
#pragma GCC unroll 2
                for (int g = 0; g < GROUPS; g++) sum[i][g] = _mm512_setzero_si512();
            const int8_t *user = chunk->codes + u * 4;
            for (int64_t at = 0; at < size; at += 64, user += CHUNK * 4) {
                __m512i one = _mm512_loadu_si512(codes + at), two = _mm512_loadu_si512(codes + at + size);
#pragma GCC unroll 8
                for (int i = 0; i < USERS; i++) {
                    int32_t four_codes;
                    memcpy(&four_codes, user + i * 4, 4);
                    __m512i all = _mm512_set1_epi32(four_codes);
                    ADD_PRODUCTS(sum[i][0], one, all);
                    ADD_PRODUCTS(sum[i][1], two, all);
                }
            }
#pragma GCC unroll 8
            for (int i = 0; i < USERS; i++)
#pragma GCC unroll 2
                for (int g = 0; g < GROUPS; g++) {
                    __m512i limit = _mm512_set1_epi32(least[g][u + i]);
                    uint32_t bits = _mm512_cmpge_epi32_mask(sum[i][g], limit);
                    if (__builtin_expect(!bits, 1)) continue;
                    _mm512_storeu_si512(sums, sum[i][g]);
                    if (chunk->threshold[u + i] < INFINITY) offer(work, chunk, u + i, group + g, bits, sums);
                }
        }
    }
}

#if defined(__linux__) && __GNUC__ >= 11
#define WITH_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Whether the processor has tile instructions and the operating system lets this process use their registers. */
static int amx_usable(void) {
    unsigned a, b, c, d, tiles = 1u << 24, codes = 1u << 25;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & tiles) || !(d & codes)) return 0;
    return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */) == 0;
}

/* Configure eight tiles of 16 rows and 64 bytes for the calling thread. */
FOR_AMX static void amx_begin(void) {
    uint8_t shape[64] __attribute__((aligned(64))) = {1};
    for (int tile = 0; tile < 8; tile++) shape[16 + 2 * tile] = 64, shape[48 + tile] = 16;
    __asm__ volatile("" : : "r"(shape) : "memory"); /* gcc assumes that the configuration has 8 bytes */
    _tile_loadconfig(shape);
}

FOR_AMX static void amx_end(void) { _tile_release(); }

#define MULTIPLY(g)                                          \
    do {                                                     \
        _tile_loadd(5, codes + (g) * size + at * LANES, 64); \
        _tile_dpbsud(g, 4, 5);                               \
    } while (0)
FOR_AMX static void scan_amx(const work_space *work, user_chunk *chunk, int64_t first, int64_t end) {
    const larder_items *items = work->items;
    int64_t size = LANES * items->width;
    int32_t least[4][CHUNK], sums[4][CHUNK][LANES] __attribute__((aligned(64)));
    for (int64_t group = first; group < end; group += 4) {
        const uint8_t *codes = items->codes + group * size;
        for (int g = 0; g < 4; g++) limits(items, chunk, group + g, least[g]);
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t at = 0; at < items->width; at += 64) {
            _tile_loadd(4, chunk->codes + at, items->width);
            MULTIPLY(0);
            MULTIPLY(1);
            MULTIPLY(2);
            MULTIPLY(3);
        }
        _tile_stored(0, sums[0], 64);
        _tile_stored(1, sums[1], 64);
        _tile_stored(2, sums[2], 64);
        _tile_stored(3, sums[3], 64);
        for (int u = 0; u < CHUNK && chunk->user[u]; u++)
            for (int g = 0; g < 4; g++) {
                __m512i limit = _mm512_set1_epi32(least[g][u]);
                uint32_t bits = _mm512_cmpge_epi32_mask(_mm512_load_si512(sums[g][u]), limit);
                if (__builtin_expect(!bits, 1)) continue;
                if (chunk->threshold[u] < INFINITY) offer(work, chunk, u, group + g, bits, sums[g][u]);
            }
    }
}
#endif
#endif

#endif
