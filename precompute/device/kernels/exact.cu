// Exact keys of the items of kept groups, as `keys.exact`, on a Hopper GPU.
//
// A program has one user. It lists the items that may be better than what was left out, one behind the other, and then
// each warp scores 32 of them at a time: it brings 128 bytes of every vector at once by cooperative copies, swizzled so
// that threads that read one vector each meet no bank twice.

constexpr int THREADS = 128;
constexpr int WARPS = THREADS / 32;
constexpr int SIZE = 4;           // items of a group
constexpr int STEPS = 8;          // of four numbers, that one copy of a vector has
constexpr int PART_BYTES = 4096;  // such parts of 32 vectors
constexpr long long WORST = -0x7FFFFFFFFFFFFFFFll - 1;

__device__ __forceinline__ unsigned address_of(const void* shared) {
    return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}

__device__ __forceinline__ float half_at(int halves, int high) {
    float number;
    const unsigned short bits = static_cast<unsigned short>(high ? static_cast<unsigned>(halves) >> 16 : halves & 0xFFFF);
    asm("cvt.f32.f16 %0, %1;" : "=f"(number) : "h"(bits));
    return number;
}

// Copies one part of 32 vectors; a row that is negative, and what is behind a vector's last step, become zeros.
__device__ __forceinline__ void bring(unsigned to, const float4* vectors, int row, int part, int steps) {
    const int lane = threadIdx.x % 32, piece = lane % STEPS, step = part * STEPS + piece;
#pragma unroll
    for (int turn = 0; turn < 8; ++turn) {
        const int which = turn * 4 + lane / STEPS;
        const int theirs = __shfl_sync(0xFFFFFFFFu, row, which);
        const bool is_there = theirs >= 0 && step < steps;
        const float4* from = is_there ? vectors + static_cast<long long>(theirs) * steps + step : vectors;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(
                         to + which * STEPS * 16 + (piece ^ which % STEPS) * 16),
                     "l"(from), "r"(is_there ? 16 : 0)
                     : "memory");
    }
    asm volatile("cp.async.commit_group;\n" ::: "memory");
}

extern "C" __global__ void __launch_bounds__(THREADS) exact(
    const float4* __restrict__ users, const float* __restrict__ own, const float4* __restrict__ vectors,
    const float* __restrict__ lengths, const int4* __restrict__ kept, const float* __restrict__ left_out,
    const long long* __restrict__ ordinals, const long long* __restrict__ starts, const long long* __restrict__ gone,
    long long* __restrict__ keys, int items, int steps, int capacity, int cosine) {
    extern __shared__ float4 storage[];
    __shared__ int counts[WARPS];
    float4* const ours = storage + WARPS * 2 * PART_BYTES / 16;
    int* const columns = reinterpret_cast<int*>(ours + steps);
    const int user = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int step = threadIdx.x; step < steps; step += THREADS)
        ours[step] = users[static_cast<long long>(user) * steps + step];
    const float left = left_out[user];

    int listed = 0;
    for (int slot = threadIdx.x; slot - static_cast<int>(threadIdx.x) < capacity; slot += THREADS) {
        int marks = 0, group = 0;
        if (slot < capacity) {
            const int4 entry = kept[static_cast<long long>(user) * capacity + slot];
            if (entry.y >= 0) {
                group = entry.y;
                float scores[SIZE], highest = half_at(entry.z, 0);
#pragma unroll
                for (int member = 0; member < SIZE; ++member) {
                    scores[member] = half_at(member < 2 ? entry.z : entry.w, member % 2);
                    highest = fmaxf(highest, scores[member]);
                }
                // An item's bound is as much below its group's as its product is below the highest, but for rounding.
                const float limit =
                    left - __int_as_float(entry.x) + highest - fabsf(highest) * 0x1p-9f - 0x1p-20f;
#pragma unroll
                for (int member = 0; member < SIZE; ++member)
                    marks |= (scores[member] + fabsf(scores[member]) * 0x1p-10f >= limit) << member;
            }
        }
        const int count = __popc(marks);
        int behind = count;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int others = __shfl_up_sync(0xFFFFFFFFu, behind, step);
            if (lane >= step) behind += others;
        }
        if (lane == 31) counts[warp] = behind;
        __syncthreads();
        int to = listed + behind - count;
#pragma unroll
        for (int each = 0; each < WARPS; ++each) {
            if (each < warp) to += counts[each];
            listed += counts[each];
        }
        __syncthreads();
        for (; marks; marks &= marks - 1) {
            const int member = __ffs(marks) - 1;
            columns[to++] = group / 4 * (4 * SIZE) + member / 2 * 8 + group % 4 * 2 + member % 2;
        }
    }
    __syncthreads();

    long long* const out = keys + static_cast<long long>(user) * SIZE * capacity;
    const unsigned ring = address_of(storage) + warp * 2 * PART_BYTES;
    const int parts = (steps + STEPS - 1) / STEPS;
    const long long start = starts[user], end = starts[user + 1];
    for (int first = warp * 32; first < listed; first += THREADS) {
        const int at = first + lane;
        const long long ordinal = at < listed ? ordinals[columns[at]] : items;
        const int row = ordinal < items ? static_cast<int>(ordinal) : -1;
        bring(ring, vectors, row, 0, steps);
        float sums[4] = {0.f, 0.f, 0.f, 0.f};
        for (int part = 0; part < parts; ++part) {
            if (part + 1 < parts) {
                bring(ring + (part + 1) % 2 * PART_BYTES, vectors, row, part + 1, steps);
                asm volatile("cp.async.wait_group 1;\n" ::: "memory");
            } else {
                asm volatile("cp.async.wait_group 0;\n" ::: "memory");
            }
            __syncwarp();
            const float4* const here = storage + (warp * 2 + part % 2) * (PART_BYTES / 16) + lane * STEPS;
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                if (part * STEPS + step < steps) {
                    const float4 theirs = here[step ^ lane % STEPS], mine = ours[part * STEPS + step];
                    sums[0] = __fadd_rn(sums[0], __fmul_rn(theirs.x, mine.x));
                    sums[1] = __fadd_rn(sums[1], __fmul_rn(theirs.y, mine.y));
                    sums[2] = __fadd_rn(sums[2], __fmul_rn(theirs.z, mine.z));
                    sums[3] = __fadd_rn(sums[3], __fmul_rn(theirs.w, mine.w));
                }
            }
            __syncwarp();
        }
        float score = __fadd_rn(__fadd_rn(sums[0], sums[1]), __fadd_rn(sums[2], sums[3]));
        long long key = WORST;
        if (row >= 0) {
            if (cosine) {
                const float length = __fmul_rn(lengths[row], own[user]);
                score = length > 0.f ? __fdiv_rn(score, length) : 0.f;
            }
            long long low = start, high = end;
            while (low < high) {
                const long long middle = (low + high) / 2;
                if (gone[middle] < ordinal)
                    low = middle + 1;
                else
                    high = middle;
            }
            if (low == end || gone[low] != ordinal) {
                const int bits = __float_as_int(__fadd_rn(score, 0.f));
                const long long ordered = bits ^ (bits >> 31 & 0x7FFFFFFF);
                key = (ordered << 32) | (0xFFFFFFFFll - ordinal);
            }
        }
        if (at < listed) out[at] = key;
    }
    for (int at = listed + threadIdx.x; at < SIZE * capacity; at += THREADS) out[at] = WORST;
}
