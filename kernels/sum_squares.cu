// What: the sum of x^2 over N elements, in float64: of parts first, then of their sums.
// Who does what: sum_squares: a block of 256 threads takes tiles of 2,048 elements, gridDim.x
//   apart; of a tile a thread takes twice 4 consecutive ones, 1,024 apart. add_parts: one block
//   of 256 threads, each adding every 256th part. Within a block by shuffles, then over its warps
//   in order.
// Assumes: x is aligned to 4 * VECTOR bytes; VECTOR divides 4. The grid follows from N alone.
// Moves: 4 N bytes read, 8 a block written and read again (0.2 % of N).
// Tried: one float4 a thread has 32 KB an SM in flight, two have 64. One part a tile without
//   limit leaves 106,000 parts of the row gradients of batch 65,536 to one block; hence at most
//   2,048.
#include "block_sum.cuh"

namespace {

constexpr int THREADS = 256, HALF = 4 * THREADS, TILE = 2 * HALF;

__device__ __forceinline__ double square(float x) {
    return static_cast<double>(x) * static_cast<double>(x);
}

// Four consecutive elements, those from n on being 0.
__device__ __forceinline__ Floats<4> four(const float* x, int64_t i, int64_t n) {
    Floats<4> values{};
    if (i + 4 <= n) {
#pragma unroll
        for (int j = 0; j < 4; j += VECTOR) {
            const Floats<VECTOR> some = load<VECTOR>(x + i + j);
#pragma unroll
            for (int v = 0; v < VECTOR; ++v) values.at[j + v] = some.at[v];
        }
    } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (i + j < n) values.at[j] = x[i + j];
        }
    }
    return values;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(256)
    sum_squares(const float* x, int64_t n, double* sums) {
    double sum = 0;
    for (int64_t tile = blockIdx.x; tile * TILE < n; tile += gridDim.x) {
        const int64_t i = tile * TILE + 4 * threadIdx.x;
        const Floats<4> low = four(x, i, n), high = four(x, i + HALF, n);
#pragma unroll
        for (int j = 0; j < 4; ++j) sum += square(low.at[j]) + square(high.at[j]);
    }
    sum = block_sum<THREADS>(sum);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

extern "C" __global__ void __launch_bounds__(256)
    add_parts(const double* parts, int64_t n, double* total) {
    double sum = 0;
    for (int64_t i = threadIdx.x; i < n; i += THREADS) sum += parts[i];
    sum = block_sum<THREADS>(sum);
    if (threadIdx.x == 0) *total = sum;
}
