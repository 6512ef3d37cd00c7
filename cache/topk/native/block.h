/* Memory for one block of users: their candidates, codes and exclusions. */
#ifndef LARDER_BLOCK_H
#define LARDER_BLOCK_H

#include <stdlib.h>

#include "passes.h"

typedef struct {
    work_space work;
    scan_function *scan;
    int rows; /* whether a chunk's codes are stored in rows */
    user_state *users;
    user_state **active;
    user_chunk *chunks;
    int8_t *codes, *chunk_codes;
    float *bounds;
    uint32_t *places;
    uint64_t *gone;
} block_space;

static int reserve(block_space *space, const larder_items *items, int64_t block, int64_t gone) {
    size_t room = space->work.room, width = (size_t)items->width, users = (size_t)block;
    size_t chunks = (users + CHUNK - 1) / CHUNK;
    space->users = calloc(users, sizeof *space->users);
    space->active = malloc(users * sizeof *space->active);
    space->chunks = calloc(chunks, sizeof *space->chunks);
    space->codes = malloc(users * width);
    space->chunk_codes = malloc(chunks * CHUNK * width);
    space->bounds = malloc(users * room * 2 * sizeof *space->bounds);
    space->places = malloc(users * room * sizeof *space->places);
    space->gone = malloc(((size_t)gone + 1) * sizeof *space->gone);
    size_t keys = room > (size_t)gone ? room : (size_t)gone;
    space->work.keys = malloc(keys * sizeof *space->work.keys);
    space->work.spare = malloc(keys * sizeof *space->work.spare);
    if (!space->users || !space->active || !space->chunks || !space->codes || !space->chunk_codes ||
        !space->bounds || !space->places || !space->gone || !space->work.keys || !space->work.spare)
        return 0;
    for (size_t c = 0; c < chunks; c++) space->chunks[c].codes = space->chunk_codes + c * CHUNK * width;
    for (size_t u = 0; u < users; u++) {
        user_state *user = &space->users[u];
        user->lower = space->bounds + u * room * 2;
        user->upper = user->lower + room;
        user->place = space->places + u * room;
        user->codes = space->codes + u * width;
    }
    return 1;
}

static void release(block_space *space) {
    free(space->users);
    free(space->active);
    free(space->chunks);
    free(space->codes);
    free(space->chunk_codes);
    free(space->bounds);
    free(space->places);
    free(space->gone);
    free(space->work.keys);
    free(space->work.spare);
}

#endif
