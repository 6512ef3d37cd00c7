/* A user's candidates: the threshold is the k-th best lower bound; exact scores are computed only where bounds overlap.
   */
#ifndef LARDER_CANDIDATES_H
#define LARDER_CANDIDATES_H

#include "../../native/products.h"
#include "exact.h"
#include "state.h"

ALWAYS uint32_t reaching(const float *values, uint32_t count, float least) {
    uint32_t found = 0;
    for (uint32_t i = 0; i < count; i++) found += values[i] >= least;
    return found;
}

/* A number that at least k lower bounds reach, close to the largest such number. */
ALWAYS float raised(const user_state *user, uint32_t k) {
    float low = INFINITY, high = -INFINITY;
    for (uint32_t i = 0; i < user->count; i++) {
        low = user->lower[i] < low ? user->lower[i] : low;
        high = user->lower[i] > high ? user->lower[i] : high;
    }
    if (user->threshold > low) low = user->threshold;
    for (int turn = 0; turn < 16 && low < high; turn++) {
        float middle = low + (high - low) * 0.5f;
        uint32_t found = reaching(user->lower, user->count, middle);
        if (found >= k) low = middle;
        else high = middle;
        if (found >= k && found <= k + k / 32) break;
    }
    return low;
}

ALWAYS void drop_below(user_state *user, float least) {
    uint32_t kept = 0, refined = 0;
    for (uint32_t i = 0; i < user->count; i++) {
        float upper = user->upper[i];
        user->lower[kept] = user->lower[i];
        user->place[kept] = user->place[i];
        user->upper[kept] = upper;
        if (i == user->refined) refined = kept;
        kept += upper >= least;
    }
    user->refined = user->refined < user->count ? refined : kept;
    user->count = kept;
}

ALWAYS void tighten(user_state *user, uint32_t k) {
    if (user->count < k) return;
    float least = raised(user, k);
    if (least > user->threshold) user->threshold = least;
    drop_below(user, user->threshold);
}

static inline float divided(const larder_items *items, const user_state *user, uint32_t ordinal, float dot) {
    if (!items->lengths) return dot;
    float length = items->lengths[ordinal] * user->own_length;
    return length > 0 ? dot / length : 0.0f;
}

static inline void prefetch_vector(const larder_items *items, uint32_t place) {
    const char *at = (const char *)(items->vectors + items->ordinals[place] * (size_t)items->dims);
    for (int64_t byte = 0; byte < items->dims * 4 && byte < 2048; byte += 64) __builtin_prefetch(at + byte);
}

/* Replace bounds from codes by bounds from vectors, which differ only by the rounding error. */
ALWAYS void refine(const work_space *work, user_state *user) {
    const larder_items *items = work->items;
    size_t dims = (size_t)items->dims;
    for (uint32_t i = user->refined; i < user->count; i++) {
        uint32_t ordinal = items->ordinals[user->place[i]];
        if (i + 3 < user->count) prefetch_vector(items, user->place[i + 3]);
        float dot = near_dot(user->vector, items->vectors + ordinal * dims, dims);
        float bound = (float)(divided(items, user, ordinal, dot) * user->per_score);
        float slack = work->rounding * items->longest[user->place[i] / LANES];
        user->lower[i] = bound - slack;
        user->upper[i] = bound + slack;
    }
    user->refined = user->count;
}

/* Compute keys of all candidates that `least` does not exclude, best first; return the number of relevant ones. */
static uint32_t sorted_keys(const work_space *work, user_state *user) {
    const larder_items *items = work->items;
    uint32_t found = 0;
    for (uint32_t i = 0; i < user->count; i++) {
        uint32_t ordinal = items->ordinals[user->place[i]];
        if (i + 3 < user->count) prefetch_vector(items, user->place[i + 3]);
        float dot = exact_dot(user->vector, items->vectors + ordinal * (size_t)items->dims, (size_t)items->dims);
        work->keys[found] = key_of(divided(items, user, ordinal, dot), ordinal);
        found += work->keys[found] >= user->least;
    }
    sort_down(work->keys, work->spare, found);
    return found < work->k ? found : work->k;
}

/* Many ties: keep only the best k by key. */
static void keep_best(const work_space *work, user_state *user) {
    uint32_t kept = sorted_keys(work, user);
    for (uint32_t i = 0; i < kept; i++) {
        uint32_t place = work->items->places[ordinal_of(work->keys[i])];
        float bound = (float)(score_of(work->keys[i]) * user->per_score);
        float slack = work->rounding * work->items->longest[place / LANES];
        user->place[i] = place;
        user->lower[i] = bound - slack;
        user->upper[i] = bound + slack;
    }
    if (kept == work->k) user->least = work->keys[kept - 1];
    user->count = user->refined = kept;
}

/* Free at least a quarter of the capacity. */
ALWAYS void shrink_body(const work_space *work, user_state *user, int final) {
    if (user->count > 2 * work->k) tighten(user, work->k);
    refine(work, user);
    tighten(user, work->k);
    if (!final && user->count > work->room - work->room / 4) keep_best(work, user);
    user->kept = user->count;
}

static void write_best(const work_space *work, user_state *user, uint32_t *ordinals, float *scores) {
    uint32_t found = sorted_keys(work, user);
    for (uint32_t i = 0; i < work->k; i++) {
        ordinals[i] = i < found ? ordinal_of(work->keys[i]) : UINT32_MAX;
        scores[i] = i < found ? score_of(work->keys[i]) : 0.0f;
    }
}

#endif
