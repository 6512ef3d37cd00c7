/* Exact top-k of all items for many users; `cache.topk.compiled` describes and checks the arguments. */
#include "block.h"

#define BLOCK 256 /* number of users whose candidates are in memory at once */
#define STEP 32   /* number of new candidates after which the threshold is improved */

enum { PLAIN, AVX2, VNNI, AMX };

/* Best variant that this processor can run. */
int larder_level(void) {
#if defined(__x86_64__) && defined(__GNUC__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
#if defined(WITH_AMX)
        if (amx_usable()) return AMX;
#endif
        return VNNI;
    }
    if (__builtin_cpu_supports("avx2")) return AVX2;
#endif
    return PLAIN;
}

/* Exact scores in the kernel's order of summation, for comparison: out[i] of a[dims] and row i of b[count, dims]. */
void larder_dots(const float *a, const float *b, int64_t count, int64_t dims, float *out) {
    for (int64_t i = 0; i < count; i++) out[i] = exact_dot(a, b + i * dims, (size_t)dims);
}

static void quantise(const larder_items *items, user_state *user, float rounding) {
    double squares = 0, left = 0, coded = 0;
    float most = 0;
    int32_t sum = 0;
    for (int64_t i = 0; i < items->dims; i++) {
        float size = fabsf(user->vector[i]);
        squares += (double)size * size;
        most = size > most ? size : most;
    }
    double length = sqrt(squares);
    double step = most / 127.0;
    for (int64_t i = 0; i < items->dims; i++) {
        double code = rint(user->vector[i] / step);
        double rest = user->vector[i] - code * step;
        user->codes[i] = (int8_t)code;
        sum += (int32_t)code;
        left += rest * rest;
        coded += code * code;
    }
    for (int64_t i = items->dims; i < items->width; i++) user->codes[i] = 0;
    user->per_score = items->lengths ? 1.0 : 1.0 / (length * items->unit);
    user->own_length = items->lengths ? sqrtf(exact_dot(user->vector, user->vector, (size_t)items->dims)) : 0;
    user->scale = (float)(step / length);
    user->length = (float)(step * sqrt(coded) / length) * 1.00001f;
    user->error = (float)(sqrt(left) / length) * 1.00001f + rounding;
    user->shift = sum * (int32_t)items->offset;
    user->threshold = -INFINITY;
    user->count = user->kept = user->refined = 0;
    user->least = 0;
}

static int is_zero(const float *vector, int64_t dims) {
    for (int64_t i = 0; i < dims; i++)
        if (vector[i] != 0) return 0;
    return 1;
}

/* For a user of length 0 every score is zero: take the first k remaining ordinals. */
static void first_ordinals(const block_space *space, user_state *user, uint32_t *ordinals, float *scores) {
    const larder_items *items = space->work.items;
    uint32_t found = 0, left = user->gone_count;
    for (uint32_t i = 0; i < left; i++) user->gone[i] = items->ordinals[user->gone[i]];
    uint64_t *spare = malloc((left + 1) * sizeof *spare);
    if (spare) sort_down(user->gone, spare, left);
    for (int64_t ordinal = 0; ordinal < items->items && found < space->work.k; ordinal++) {
        uint32_t place = items->places[ordinal];
        int gone = 0;
        if (spare)
            while (left && user->gone[left - 1] <= (uint64_t)ordinal) gone |= user->gone[--left] == (uint64_t)ordinal;
        else
            for (uint32_t i = 0; i < left; i++) gone |= user->gone[i] == (uint64_t)ordinal;
        if (gone || !(items->allowed[place / LANES] >> place % LANES & 1)) continue;
        ordinals[found] = (uint32_t)ordinal;
        scores[found++] = 0;
    }
    for (; found < space->work.k; found++) ordinals[found] = UINT32_MAX, scores[found] = 0;
    free(spare);
}

static void exclude(const larder_items *items, user_state *user, const int64_t *from, const int64_t *to) {
    user->gone_count = 0;
    for (; from < to; from++)
        if (*from >= 0 && *from < items->items) user->gone[user->gone_count++] = items->places[*from];
}

/* Sort excluded places by tile, the first tile last: radix sort by one byte of the tile number per pass. */
static void order_by_tile(user_state *user, uint64_t *spare, int64_t items) {
    uint64_t *from = user->gone, *to = spare;
    for (int shift = TILE_BITS; items >> shift; shift += 8) {
        uint32_t at[256], digits = items >> shift > 255 ? 256 : (uint32_t)(items >> shift) + 1, before = 0;
        memset(at, 0, digits * sizeof *at);
        for (uint32_t i = 0; i < user->gone_count; i++) at[from[i] >> shift & 255]++;
        for (uint32_t digit = digits; digit--;) {
            uint32_t here = at[digit];
            at[digit] = before;
            before += here;
        }
        for (uint32_t i = 0; i < user->gone_count; i++) to[at[from[i] >> shift & 255]++] = from[i];
        uint64_t *swap = from;
        from = to;
        to = swap;
    }
    if (from != user->gone) memcpy(user->gone, from, user->gone_count * sizeof *from);
}

static void ban(const larder_items *items, user_state *user, int64_t first, int64_t end) {
    for (int64_t group = first; group < end; group++)
        user->banned[group % TILE_GROUPS] = (uint16_t)~items->allowed[group];
    while (user->gone_count && user->gone[user->gone_count - 1] < (uint64_t)end * LANES) {
        uint64_t place = user->gone[--user->gone_count];
        user->banned[place / LANES % TILE_GROUPS] |= (uint16_t)(1u << place % LANES);
    }
}

static int64_t gather(block_space *space, int64_t count) {
    int64_t chunks = (count + CHUNK - 1) / CHUNK, width = space->work.items->width;
    for (int64_t c = 0; c < chunks; c++) {
        user_chunk *chunk = &space->chunks[c];
        memset(chunk->user, 0, sizeof chunk->user);
        for (int u = 0; u < CHUNK; u++) {
            user_state *user = c * CHUNK + u < count ? space->active[c * CHUNK + u] : 0;
            chunk->threshold[u] = user ? user->threshold : INFINITY;
            chunk->length[u] = user ? user->length : 0;
            chunk->error[u] = user ? user->error : 0;
            chunk->per_scale[u] = user ? 1.0f / user->scale : 1;
            chunk->shift[u] = user ? user->shift : 0;
            chunk->user[u] = user;
            if (user) user->slot = (uint32_t)(c * CHUNK + u);
            for (int64_t at = 0; at < width; at += 4) {
                int8_t *to = chunk->codes + (space->rows ? u * width + at : at * CHUNK + u * 4);
                if (user) memcpy(to, user->codes + at, 4);
                else memset(to, 0, 4);
            }
        }
    }
    return chunks;
}

/* Drop users that cannot gain from items of at most this length; return the number of remaining users. */
static int64_t still_active(block_space *space, int64_t count, float longest) {
    int64_t kept = 0;
    float most = longest * (1 + space->work.rounding) + 1e-12f;
    for (int64_t i = 0; i < count; i++) {
        user_state *user = space->active[i];
        space->active[kept] = user;
        if (user->threshold > most) space->chunks[user->slot / CHUNK].threshold[user->slot % CHUNK] = INFINITY;
        else kept++;
    }
    return kept;
}

static void scan_block(block_space *space, int64_t active) {
    const work_space *work = &space->work;
    const larder_items *items = work->items;
    int64_t chunks = gather(space, active);
    for (int64_t first = 0; first < items->groups && active; first += TILE_GROUPS) {
        int64_t end = first + TILE_GROUPS < items->groups ? first + TILE_GROUPS : items->groups;
        active = still_active(space, active, items->reach[first / TILE_GROUPS]);
        if (active <= (chunks - 1) * CHUNK) chunks = gather(space, active);
        for (int64_t i = 0; i < active; i++) ban(items, space->active[i], first, end);
        for (int64_t c = 0; c < chunks; c++) space->scan(work, &space->chunks[c], first, end);
        for (int64_t i = 0; i < active; i++) {
            user_state *user = space->active[i];
            if (user->count < user->kept + work->step) continue;
            work->shrink(work, user, 0);
            space->chunks[user->slot / CHUNK].threshold[user->slot % CHUNK] = user->threshold;
        }
    }
}

/* Return 0, or 1 if memory ran out. Row r excludes gone[starts[r]:starts[r + 1]]. */
int larder_topk(const larder_items *items, const float *users, int64_t count, const int64_t *starts,
                const int64_t *gone, int64_t k, int level, uint32_t *ordinals, float *scores) {
    block_space space = {0};
    work_space *work = &space.work;
    int64_t block = count < BLOCK ? count : BLOCK, most = 0;
    work->items = items;
    work->k = (uint32_t)k;
    work->room = (uint32_t)(4 * k + 64);
    work->step = STEP;
    work->rounding = (float)(items->dims + 64) * 0x1p-23f;
    space.scan = scan_plain;
    work->shrink = shrink_plain;
#if defined(__x86_64__) && defined(__GNUC__)
    if (level == AVX2) space.scan = scan_avx2, work->shrink = shrink_avx2;
    if (level >= VNNI) space.scan = scan_vnni, work->shrink = shrink_vnni;
#endif
#if defined(WITH_AMX)
    if (level == AMX) space.scan = scan_amx, space.rows = 1, amx_begin();
#endif
    for (int64_t start = 0; start < count; start += block) {
        int64_t end = start + block < count ? start + block : count;
        most = starts[end] - starts[start] > most ? starts[end] - starts[start] : most;
    }
    int enough = reserve(&space, items, block, most);
    for (int64_t start = 0; enough && start < count; start += block) {
        int64_t end = start + block < count ? start + block : count, active = 0;
        for (int64_t row = start; row < end; row++) {
            user_state *user = &space.users[row - start];
            user->vector = users + row * items->dims;
            user->gone = space.gone + (starts[row] - starts[start]);
            exclude(items, user, gone + starts[row], gone + starts[row + 1]);
            if (is_zero(user->vector, items->dims)) {
                first_ordinals(&space, user, ordinals + row * k, scores + row * k);
                user->vector = 0;
                continue;
            }
            order_by_tile(user, work->spare, items->items);
            quantise(items, user, work->rounding);
            space.active[active++] = user;
        }
        scan_block(&space, active);
        for (int64_t row = start; row < end; row++) {
            user_state *user = &space.users[row - start];
            if (!user->vector) continue;
            work->shrink(work, user, 1);
            write_best(work, user, ordinals + row * k, scores + row * k);
        }
    }
    release(&space);
#if defined(WITH_AMX)
    if (level == AMX) amx_end();
#endif
    return !enough;
}
