// Sums of the columns of a (rows, columns) matrix, in an order that is always the same.
#pragma once
#include "common.cuh"

constexpr int SUM_WARPS = 32;  // a block of 32 warps has 32 columns

// Warp w adds up rows w, w + 32, ... of the block's columns; then the sums of column w.
__device__ __forceinline__ void column_sum(const float* x, int64_t rows, int64_t columns,
                                           float* out) {
    __shared__ float sums[SUM_WARPS][WARP + 1];  // a column of padding, against bank conflicts
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int64_t first = int64_t(blockIdx.x) * WARP;
    float sum = 0.0f;
    if (first + lane < columns) {
#pragma unroll 8
        for (int64_t row = warp; row < rows; row += SUM_WARPS) {
            sum += x[row * columns + first + lane];
        }
    }
    sums[warp][lane] = sum;
    __syncthreads();
    sum = sums[lane][warp];
#pragma unroll
    for (int step = WARP / 2; step; step /= 2) sum += __shfl_down_sync(FULL, sum, step);
    if (lane == 0 && first + warp < columns) out[first + warp] = sum;
}
