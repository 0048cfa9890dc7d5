// The sum of one double of each thread of a block, in an order that is always the same.
#pragma once
#include "common.cuh"

// THREADS is blockDim.x, a multiple of 32. The sum is thread 0's; what others get is a part of it.
template <int THREADS>
__device__ __forceinline__ double block_sum(double x) {
    constexpr int WARPS = THREADS / WARP;
    __shared__ double parts[WARPS];
#pragma unroll
    for (int step = WARP / 2; step; step /= 2) x += __shfl_down_sync(FULL, x, step);
    if (threadIdx.x % WARP == 0) parts[threadIdx.x / WARP] = x;
    __syncthreads();
    if (threadIdx.x == 0) {
#pragma unroll
        for (int warp = 1; warp < WARPS; ++warp) x += parts[warp];
    }
    return x;
}
