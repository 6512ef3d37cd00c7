// Users as the other kernels want them, on a Hopper GPU: as `DeviceItems.queries` has it, in one pass.
//
// A warp has one user. NUMBERS (of a user that a thread has), ROUND_UP and LEAST (of a length) are given to the compiler.

constexpr int WARPS = 8;
constexpr int POWER_MOST = 126;
constexpr float NORMAL = 0x1p-14f;  // smaller codes are left to the residual

__device__ __forceinline__ double sum_of(double number) {
#pragma unroll
    for (int step = 16; step; step /= 2) number += __shfl_xor_sync(0xFFFFFFFFu, number, step);
    return number;
}

// `ours` are scored and `theirs` compared: the same, or unit vectors of them, float [count, dims].
extern "C" __global__ void __launch_bounds__(WARPS * 32) encode(
    const float* ours, const float* theirs, float* __restrict__ exact, unsigned short* __restrict__ codes,
    float* __restrict__ lengths, float* __restrict__ residuals, float* __restrict__ scales,
    double* __restrict__ sizes, int count, int dims, int width) {
    const int lane = threadIdx.x % 32, user = blockIdx.x * WARPS + threadIdx.x / 32;
    if (user >= count) return;
    const int padded = (dims + 3) / 4 * 4, turned = dims / 16 * 16;
    float compared[NUMBERS];
    double size = 0, length = 0;
#pragma unroll
    for (int turn = 0; turn < NUMBERS; ++turn) {
        const int at = turn * 32 + lane;
        const float number = at < dims ? ours[static_cast<long long>(user) * dims + at] : 0.f;
        compared[turn] = theirs == ours || at >= dims ? number : theirs[static_cast<long long>(user) * dims + at];
        size += static_cast<double>(number) * number;
        length += static_cast<double>(compared[turn]) * compared[turn];
        // Of each sixteen numbers the last four come first: see `items.arrange_in_sum_order`.
        const int place = at < turned ? at / 16 * 16 + (3 - at % 16 / 4) * 4 + at % 4 : at;
        if (at < padded) exact[static_cast<long long>(user) * padded + place] = number;
    }
    size = sqrt(sum_of(size));
    length = sqrt(sum_of(length));
    int exponent = 0;
    frexp(length, &exponent);
    const float scale = static_cast<float>(ldexp(1.0, min(-exponent, POWER_MOST)));
    double scaled_length = 0, residual = 0;
#pragma unroll
    for (int turn = 0; turn < NUMBERS; ++turn) {
        const int at = turn * 32 + lane;
        const float scaled = __fmul_rn(compared[turn], scale);
        unsigned short bits;
        float code;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(scaled));
        asm("cvt.f32.f16 %0, %1;" : "=f"(code) : "h"(bits));
        if (fabsf(code) < NORMAL) bits = 0, code = 0.f;
        const double rest = __fsub_rn(scaled, code);
        scaled_length += static_cast<double>(scaled) * scaled;
        residual += rest * rest;
        if (at < width) codes[static_cast<long long>(user) * width + at] = bits;
    }
    scaled_length = sqrt(sum_of(scaled_length));
    residual = sqrt(sum_of(residual));
    if (lane == 0) {
        lengths[user] = static_cast<float>(scaled_length * ROUND_UP + LEAST);
        residuals[user] = static_cast<float>(residual * ROUND_UP + LEAST);
        scales[user] = scale;
        sizes[user] = size;
    }
}
