// The product on a Hopper GPU: as `above.py`, of which it writes the same entries.
//
// A program has 256 users, who stay in shared memory, and passes over tiles of 128 items. One warp brings the items by
// the tensor copy engine, in chunks of 64 numbers, into a ring of stages. Two warpgroups have 128 users each and take
// turns with the tensor cores: while one multiplies a tile, the other looks for what reaches its users' limits.
//
// The compiler is given CHUNKS (of 64 numbers in a vector), STAGES (of the ring), SPLITS (programs that share the items
// of the same users) and LANES (groups of a block).

constexpr int USERS = 256;
constexpr int OURS = 128;  // users of a warpgroup
constexpr int TILE = 128;  // items
constexpr int GROUP = 4;  // items of a group
constexpr int BLOCK_TILES = LANES * GROUP / TILE;
constexpr int TILE_GROUPS = TILE / GROUP;
constexpr int ROW_BYTES = 128;  // of a chunk: what a swizzle of 128 bytes takes
constexpr int USER_CHUNK_BYTES = USERS * ROW_BYTES;
constexpr int STAGE_BYTES = TILE * ROW_BYTES;
constexpr int WARPS = 8;  // that read a stage

struct alignas(64) TensorMap {
    unsigned long long words[16];
};

__device__ __forceinline__ unsigned address_of(const void* shared) {
    return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}

__device__ __forceinline__ void wait(unsigned barrier, unsigned parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(barrier), "r"(parity) : "memory");
}

__device__ __forceinline__ void expect(unsigned barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void copy(unsigned to, const TensorMap* map, int number, int row, unsigned barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];\n"
        ::"r"(to), "l"(map), "r"(number), "r"(row), "r"(barrier) : "memory");
}

// Descriptor of rows of 128 swizzled bytes: eight rows are 1,024 bytes.
__device__ __forceinline__ unsigned long long operand(unsigned address) {
    return (static_cast<unsigned long long>((address & 0x3FFFF) >> 4)) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

// acc [64 users, 128 items] += users by items, 16 numbers of each; `more` 0 starts at zero.
__device__ __forceinline__ void multiply(float (&acc)[64], unsigned long long users, unsigned long long items, int more) {
    asm volatile(
        "{\n"
        ".reg .pred add;\n"
        "setp.ne.b32 add, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "%64, %65, add, 1, 1, 0, 0;\n"
        "}\n"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]), "+f"(acc[4]), "+f"(acc[5]), "+f"(acc[6]), "+f"(acc[7]),
          "+f"(acc[8]), "+f"(acc[9]), "+f"(acc[10]), "+f"(acc[11]), "+f"(acc[12]), "+f"(acc[13]), "+f"(acc[14]), "+f"(acc[15]),
          "+f"(acc[16]), "+f"(acc[17]), "+f"(acc[18]), "+f"(acc[19]), "+f"(acc[20]), "+f"(acc[21]), "+f"(acc[22]), "+f"(acc[23]),
          "+f"(acc[24]), "+f"(acc[25]), "+f"(acc[26]), "+f"(acc[27]), "+f"(acc[28]), "+f"(acc[29]), "+f"(acc[30]), "+f"(acc[31]),
          "+f"(acc[32]), "+f"(acc[33]), "+f"(acc[34]), "+f"(acc[35]), "+f"(acc[36]), "+f"(acc[37]), "+f"(acc[38]), "+f"(acc[39]),
          "+f"(acc[40]), "+f"(acc[41]), "+f"(acc[42]), "+f"(acc[43]), "+f"(acc[44]), "+f"(acc[45]), "+f"(acc[46]), "+f"(acc[47]),
          "+f"(acc[48]), "+f"(acc[49]), "+f"(acc[50]), "+f"(acc[51]), "+f"(acc[52]), "+f"(acc[53]), "+f"(acc[54]), "+f"(acc[55]),
          "+f"(acc[56]), "+f"(acc[57]), "+f"(acc[58]), "+f"(acc[59]), "+f"(acc[60]), "+f"(acc[61]), "+f"(acc[62]), "+f"(acc[63])
        : "l"(users), "l"(items), "r"(more));
}

// The block that a stage looks at as the `at`-th (see BlockStage in sizes.py).
__device__ __forceinline__ int block_of(int at, int stride, int offset, int skip, int hole) {
    if (skip) at = at / skip * (skip + 1) + at % skip + (at % skip >= hole);
    return at * stride + offset;
}

// Writes an entry for a group that reaches a user's limit while there is room, and counts it; `left` groups from the
// thread's first one on have items. In PTX, because compiled from C++ each of its conditions is a branch of its own,
// which takes longer than what it leaves out.
__device__ __forceinline__ void write(int& taken, int4*& to, int room, float low, float margin, float highest,
                                      int group, int further, int left, float zero, float one, float two, float three) {
    asm volatile(
        "{\n"
        ".reg .pred hit, fits;\n"
        ".reg .f32 bound;\n"
        ".reg .b32 first, second, bits, number;\n"
        "setp.ge.f32 hit, %5, %3;\n"
        "setp.gt.and.s32 hit, %8, %7, hit;\n"
        "setp.lt.and.s32 fits, %0, %2, hit;\n"
        "add.f32 bound, %5, %4;\n"
        "mov.b32 bits, bound;\n"
        "cvt.rn.f16x2.f32 first, %10, %9;\n"
        "cvt.rn.f16x2.f32 second, %12, %11;\n"
        "add.s32 number, %6, %7;\n"
        "@fits st.global.v4.b32 [%1], {bits, number, first, second};\n"
        "@hit add.s32 %0, %0, 1;\n"
        "@hit add.s64 %1, %1, 16;\n"
        "}\n"
        : "+r"(taken), "+l"(to)
        : "r"(room), "f"(low), "f"(margin), "f"(highest), "r"(group), "r"(further), "r"(left), "f"(zero), "f"(one),
          "f"(two), "f"(three)
        : "memory");
}

extern "C" __global__ void __launch_bounds__(384, 1) above(
    const __grid_constant__ TensorMap users, const __grid_constant__ TensorMap items, const float* __restrict__ reach,
    const float* __restrict__ limits, const float* __restrict__ weight, int4* __restrict__ entries,
    int* __restrict__ counts, int count, int real, int blocks, int stride, int offset, int skip, int hole, int room, float slack) {
    extern __shared__ unsigned char storage[];
    __shared__ alignas(8) unsigned long long barriers[2 * STAGES + 1];
    const unsigned ours = (address_of(storage) + 1023) & ~1023u;
    const unsigned ring = ours + CHUNKS * USER_CHUNK_BYTES;
    const unsigned full = address_of(barriers), empty = full + 8 * STAGES, ready = empty + 8 * STAGES;
    const int first_user = blockIdx.x * USERS, split = blockIdx.y;
    const int tiles = split < blocks ? (blocks - split + SPLITS - 1) / SPLITS * BLOCK_TILES : 0;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\n" ::"r"(full + 8 * stage));
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(empty + 8 * stage), "r"(WARPS));
        }
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\n" ::"r"(ready));
        asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;\n" ::: "memory");
    }
    __syncthreads();

    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;\n");
        if (threadIdx.x == 0) {
            expect(ready, CHUNKS * USER_CHUNK_BYTES);
            for (int chunk = 0; chunk < CHUNKS; ++chunk)
                copy(ours + chunk * USER_CHUNK_BYTES, &users, chunk * 64, first_user, ready);
            int stage = 0;
            unsigned parity = 1;  // the ring is empty
            for (int tile = 0; tile < tiles; ++tile) {
                const int block = block_of(split + tile / BLOCK_TILES * SPLITS, stride, offset, skip, hole);
                const int item = (block * BLOCK_TILES + tile % BLOCK_TILES) * TILE;
                for (int chunk = 0; chunk < CHUNKS; ++chunk) {
                    wait(empty + 8 * stage, parity);
                    expect(full + 8 * stage, STAGE_BYTES);
                    copy(ring + stage * STAGE_BYTES, &items, chunk * 64, item, full + 8 * stage);
                    if (++stage == STAGES) stage = 0, parity ^= 1;
                }
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;\n");
        const int group_of_warps = threadIdx.x / 128 - 1, warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
        const int first = first_user + group_of_warps * OURS + warp * 16 + lane / 4;
        const unsigned mine = ours + group_of_warps * OURS * ROW_BYTES;
        const int segment = split * 4 + lane % 4;
        float far[4], limit[4];
        int taken[4] = {0, 0, 0, 0};
        int4* to[4];
#pragma unroll
        for (int row = 0; row < 4; ++row) {  // 0, 8, 64 and 72 users further on
            const int user = first + row / 2 * 64 + row % 2 * 8;
            far[row] = user < count ? reach[user] : 0.f;
            limit[row] = user < count ? limits[user] : __int_as_float(0x7F800000);
            to[row] = entries + (static_cast<long long>(user) * (SPLITS * 4) + segment) * room;
        }
        if (group_of_warps == 1 && tiles > 0) asm volatile("bar.arrive 1, 256;\n" ::: "memory");
        wait(ready, 0);
        int stage = 0;
        unsigned parity = 0;
        for (int tile = 0; tile < tiles; ++tile) {
            const int block = block_of(split + tile / BLOCK_TILES * SPLITS, stride, offset, skip, hole);
            const float heavy = weight[block];
            float acc[2][64];
            asm volatile("bar.sync %0, 256;\n" ::"r"(1 + group_of_warps) : "memory");
            int before = 0;
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; ++chunk) {
                wait(full + 8 * stage, parity);
                asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
#pragma unroll
                for (int step = 0; step < 4; ++step) {
                    const unsigned long long theirs = operand(ring + stage * STAGE_BYTES + step * 32);
#pragma unroll
                    for (int half = 0; half < 2; ++half)
                        multiply(acc[half], operand(mine + chunk * USER_CHUNK_BYTES + half * 64 * ROW_BYTES + step * 32),
                                 theirs, chunk + step);
                }
                asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
                if (chunk > 0) {
                    asm volatile("wgmma.wait_group.sync.aligned 1;\n" ::: "memory");
                    if (lane == 0) arrive(empty + 8 * before);
                }
                before = stage;
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
            // All that this tile takes of the tensor cores is asked for: the other warpgroup's turn.
            if (group_of_warps == 0 || tile + 1 < tiles)
                asm volatile("bar.arrive %0, 256;\n" ::"r"(2 - group_of_warps) : "memory");
            asm volatile("wgmma.wait_group.sync.aligned 0;\n" ::: "memory");
            if (lane == 0) arrive(empty + 8 * before);
            const int group = block * LANES + tile % BLOCK_TILES * TILE_GROUPS + lane % 4;
            const int left = real - group;
#pragma unroll
            for (int row = 0; row < 4; ++row) {
                const float(&scores)[64] = acc[row / 2];
                const int at = row % 2 * 2;
                float highest[8];
#pragma unroll
                for (int each = 0; each < 8; ++each)
                    highest[each] = fmaxf(fmaxf(scores[8 * each + at], scores[8 * each + at + 1]),
                                          fmaxf(scores[8 * each + at + 4], scores[8 * each + at + 5]));
                const float margin = far[row] * heavy + slack;
                const float low = limit[row] - margin;
#pragma unroll
                for (int part = 0; part < 8; part += 4) {
                    const float best = fmaxf(fmaxf(highest[part], highest[part + 1]),
                                             fmaxf(highest[part + 2], highest[part + 3]));
                    if (__any_sync(0xFFFFFFFFu, best >= low)) {  // of all threads of a warp: none waits for others
#pragma unroll
                        for (int each = part; each < part + 4; ++each)
                            write(taken[row], to[row], room, low, margin, highest[each], group, 4 * each, left,
                                  scores[8 * each + at], scores[8 * each + at + 1], scores[8 * each + at + 4],
                                  scores[8 * each + at + 5]);
                    }
                }
            }
        }
#pragma unroll
        for (int row = 0; row < 4; ++row) {
            const long long user = first + row / 2 * 64 + row % 2 * 8;
            if (user < count) counts[user * (SPLITS * 4) + segment] = taken[row];
        }
    }
}
