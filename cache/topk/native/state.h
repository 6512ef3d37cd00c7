/* Data shared by the passes: the items in the layout of `cache.topk.compiled.PackedItems`, and the state of each user.
 *
 * All bounds are relative to the product of the user's length and the longest item's. A candidate's score is between
 * its `lower` and `upper`; for the first `refined` candidates these come from vectors, for the others from codes.
 */
#ifndef LARDER_STATE_H
#define LARDER_STATE_H

#include <math.h>
#include <stdint.h>

#define LANES 16       /* items per vector register: one group */
#define CHUNK 16       /* users processed together per tile */
#define TILE_GROUPS 32 /* groups between two checks for users that are done */
#define TILE_BITS 9    /* number of a place's bits within its tile: LANES * TILE_GROUPS == 1 << TILE_BITS */
#define ALWAYS static inline __attribute__((always_inline))

typedef struct {
    const float *vectors;      /* [items, dims], by ordinal */
    const float *lengths;      /* [items] by ordinal for cosine, else null */
    const uint8_t *codes;      /* [groups, width / 4, LANES, 4], each plus `offset` */
    const uint32_t *ordinals;  /* [groups * LANES], by place: longest item first */
    const uint32_t *places;    /* [items], by ordinal */
    const float *scale;        /* [groups] */
    const float *residual;     /* [groups], largest distance of a vector from its codes */
    const float *longest;      /* [groups] */
    const float *reach;        /* [tiles], length of the longest item from this tile on */
    const uint16_t *allowed;   /* [groups], one bit per item */
    int64_t items, groups, dims, width, offset;
    double unit;               /* length of the longest item, 1 for cosine */
} larder_items;

typedef struct {
    const float *vector;
    float *lower, *upper;
    uint32_t *place;
    uint64_t *gone; /* excluded places, by tile; those of the next tile are at the end */
    int8_t *codes;
    double per_score; /* factor from a score to a relative bound */
    uint64_t least;   /* key that at least k candidates reach, 0: unknown */
    uint32_t count, kept, refined, gone_count, slot;
    int32_t shift;
    float threshold, own_length, scale, length, error;
    uint16_t banned[TILE_GROUPS];
} user_state;

/* Up to CHUNK users, transposed for vector instructions; the threshold of an unused lane is infinite. */
typedef struct {
    float threshold[CHUNK], length[CHUNK], error[CHUNK], per_scale[CHUNK];
    int32_t shift[CHUNK];
    user_state *user[CHUNK];
    int8_t *codes; /* rows of `width`, or [width / 4, CHUNK, 4] */
} user_chunk;

typedef struct {
    const larder_items *items;
    uint32_t k, room, step;
    float rounding; /* relative error of an exact score, per unit of length */
    uint64_t *keys, *spare;
    void (*shrink)(const void *work, user_state *user, int final);
} work_space;

ALWAYS int32_t limit_of(float threshold, float length, float error, float per_scale, int32_t shift,
                        float residual, float longest, float per_item) {
    float sum = (threshold - (length * residual + error * longest)) * per_scale * per_item;
    sum = sum < -1e9f ? -1e9f : sum > 1e9f ? 1e9f : sum;
    return (int32_t)(sum - fabsf(sum) * 0x1p-20f) - 3 + shift;
}

/* For each user of a chunk, the smallest sum of code products in a group that may still be relevant. */
ALWAYS void limits(const larder_items *items, const user_chunk *chunk, int64_t group, int32_t *out) {
    float residual = items->residual[group], longest = items->longest[group];
    float per_item = 1.0f / items->scale[group];
    for (int u = 0; u < CHUNK; u++)
        out[u] = limit_of(chunk->threshold[u], chunk->length[u], chunk->error[u], chunk->per_scale[u],
                          chunk->shift[u], residual, longest, per_item);
}

/* Add candidates of one group; `bits` has a bit for each lane that reached the limit. */
ALWAYS void offer(const work_space *work, user_chunk *chunk, int u, int64_t group, uint32_t bits,
                  const int32_t *sums) {
    user_state *user = chunk->user[u];
    const larder_items *items = work->items;
    bits &= (uint32_t)~user->banned[group % TILE_GROUPS] & 0xffffu;
    if (!bits) return;
    if (user->count + LANES > work->room) {
        work->shrink(work, user, 0);
        chunk->threshold[u] = user->threshold;
    }
    float scale = user->scale * items->scale[group];
    float error = user->length * items->residual[group] + user->error * items->longest[group];
    uint32_t at = user->count;
    for (; bits; bits &= bits - 1) {
        int lane = __builtin_ctz(bits);
        float value = (float)(sums[lane] - user->shift) * scale;
        user->lower[at] = value - error;
        user->upper[at] = value + error;
        user->place[at++] = (uint32_t)(group * LANES + lane);
    }
    user->count = at;
}

#endif
