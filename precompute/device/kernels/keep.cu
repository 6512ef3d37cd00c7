// The best of what `above` wrote, as `keep.keep`, on a Hopper GPU: a warp has one user, and all bounds in registers.
//
// SEGMENTS, ROOM (of a segment, one entry for each thread), CAPACITY and HALVINGS are given to the compiler.

constexpr int WARPS = 8;
constexpr int OLD = (CAPACITY + 31) / 32;
static_assert(ROOM == 32, "a thread has one entry of each segment");

__device__ __forceinline__ int count_of(const float (&fresh)[SEGMENTS], const float (&old)[OLD], float limit) {
    int count = 0;
#pragma unroll
    for (int at = 0; at < SEGMENTS; ++at) count += fresh[at] >= limit;
#pragma unroll
    for (int at = 0; at < OLD; ++at) count += old[at] >= limit;
    return __reduce_add_sync(0xFFFFFFFFu, count);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32) keep(
    const int4* __restrict__ entries, const int* __restrict__ counts, const int* __restrict__ wanted,
    int4* __restrict__ kept, float* __restrict__ limits, float* __restrict__ left_out, int users) {
    const int lane = threadIdx.x % 32, user = blockIdx.x * WARPS + threadIdx.x / 32;
    if (user >= users) return;
    const float none = __int_as_float(-1);  // not a number: it reaches no limit
    const int4* const theirs = entries + static_cast<long long>(user) * SEGMENTS * ROOM + lane;
    int4* const ours = kept + static_cast<long long>(user) * CAPACITY;
    const int there = lane < SEGMENTS ? counts[user * SEGMENTS + lane] : 0;
    float fresh[SEGMENTS], old[OLD];
    float least = __int_as_float(0x7F800000), most = -least;
#pragma unroll
    for (int at = 0; at < SEGMENTS; ++at)
        fresh[at] = lane < __shfl_sync(0xFFFFFFFFu, there, at) ? __int_as_float(theirs[at * ROOM].x) : none;
    int4 held[OLD];
    int olds = 0;
#pragma unroll
    for (int at = 0; at < OLD; ++at) {
        held[at] = at * 32 + lane < CAPACITY ? ours[at * 32 + lane] : make_int4(-1, -1, 0, 0);
        old[at] = held[at].y < 0 ? none : __int_as_float(held[at].x);
        olds += __popc(__ballot_sync(0xFFFFFFFFu, held[at].y >= 0));
        least = fminf(least, old[at]), most = fmaxf(most, old[at]);
    }
#pragma unroll
    for (int at = 0; at < SEGMENTS; ++at) least = fminf(least, fresh[at]), most = fmaxf(most, fresh[at]);
#pragma unroll
    for (int step = 16; step; step /= 2) {
        least = fminf(least, __shfl_xor_sync(0xFFFFFFFFu, least, step));
        most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, step));
    }
    // At least `needed` reach the lower limit, or all there are; fewer reach the upper one.
    const int needed = wanted[user];
    float low = least, high = most;
    const bool enough = count_of(fresh, old, low) >= needed;
    high += (fabsf(high) + fabsf(low)) * 0x1p-20f + 0x1p-100f;
    for (int turn = 0; turn < HALVINGS; ++turn) {
        const float middle = low + (high - low) * 0.5f;
        if (count_of(fresh, old, middle) >= needed)
            low = middle;
        else
            high = middle;
    }
    if (!enough) low = limits[user];
    const float limit = count_of(fresh, old, low) <= CAPACITY ? low : high;

    int places = 0;
    const unsigned before = (1u << lane) - 1;
    __syncwarp();  // all is read before any is written
#pragma unroll
    for (int at = 0; at < OLD; ++at) {
        const unsigned stay = __ballot_sync(0xFFFFFFFFu, old[at] >= limit);
        if (old[at] >= limit) ours[places + __popc(stay & before)] = held[at];
        places += __popc(stay);
    }
#pragma unroll
    for (int at = 0; at < SEGMENTS; ++at) {
        const unsigned come = __ballot_sync(0xFFFFFFFFu, fresh[at] >= limit);
        if (fresh[at] >= limit) ours[places + __popc(come & before)] = theirs[at * ROOM];
        places += __popc(come);
    }
    for (int at = places + lane; at < olds; at += 32) ours[at] = make_int4(-1, -1, -1, -1);
    const bool is_full = __any_sync(0xFFFFFFFFu, there > ROOM);
    if (lane == 0) {
        limits[user] = limit;
        left_out[user] = is_full ? __int_as_float(0x7F800000) : fmaxf(left_out[user], limit);
    }
}
