// What: products p[r, i * M + j] = x[r, i] * x0[r, j], rounded to value_t; and of dp, shaped alike,
//   dx[r, i] = sum over j of dp * x0[r, j] and dx0[r, j] = sum over i of dp * x[r, i].
// Who does what: products: a thread has VECTOR of a row's FILLED columns, of which those from H M
// on
//   are 0. Sums: a warp has a row, SPAN of its M columns j at a time, each lane COLUMNS of them;
//   over i it keeps its sums of dx0 in registers, while sums of dx go over the lanes by shuffles,
//   and from one span to the next lie in dx.
// Assumes: VECTOR divides FILLED, p is aligned to VECTOR numbers; SPAN = 32 COLUMNS.
// Moves: products: H + M numbers are read a row, from L1 but for the first time, and H M written.
//   Sums: H M are read a row, H + M twice, and written.
// Tried: p is as much as a batch's outer products; ops/compressed_interaction.py makes it for so
// many
//   rows at a time that the matmul finds it in L2.
#include "halves.cuh"

constexpr int AT_ONCE = 8;  // sums of dx whose shuffles are shared

// Add up each of 8 numbers over the lanes: lanes 4 k to 4 k + 3 get the sum of the k-th.
__device__ __forceinline__ float sum_of_each(float (&x)[AT_ONCE], int lane) {
#pragma unroll
    for (int half = AT_ONCE / 2, step = WARP / 2; half; half /= 2, step /= 2) {
        const bool upper = lane & step;
#pragma unroll
        for (int k = 0; k < half; ++k) {
            const float kept = upper ? x[k + half] : x[k], given = upper ? x[k] : x[k + half];
            x[k] = kept + __shfl_xor_sync(FULL, given, step);
        }
    }
#pragma unroll
    for (int step = WARP / AT_ONCE / 2; step; step /= 2) x[0] += __shfl_xor_sync(FULL, x[0], step);
    return x[0];
}

extern "C" __global__ void __launch_bounds__(256)
    compressed_products(const float* x, const float* x0, value_t* p, int64_t count) {
    const int64_t at = thread_number() * VECTOR;
    if (at >= count) return;
    const int64_t row = at / FILLED;
    const int first = static_cast<int>(at % FILLED);
    int i = first / M, j = first % M;
    Floats<VECTOR> values;
#pragma unroll
    for (int l = 0; l < VECTOR; ++l) {
        values.at[l] = FILLED == H * M || i < H ? x[row * H + i] * x0[row * M + j] : 0.0f;
        if (++j == M) {
            j = 0;
            ++i;
        }
    }
    store(p + at, values);
}

extern "C" __global__ void __launch_bounds__(256)
    compressed_sums(const float* dp, const float* x, const float* x0, float* dx, float* dx0,
                    int64_t rows) {
    const int lane = threadIdx.x % WARP;
    const int64_t row = thread_number() / WARP;
    if (row >= rows) return;
    dp += row * (H * M);
    x += row * H;
    x0 += row * M;
    dx += row * H;
    dx0 += row * M;
    for (int start = 0; start < M; start += SPAN) {
        float factors[COLUMNS], sums[COLUMNS] = {};
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
            const int j = start + c * WARP + lane;
            factors[c] = j < M ? x0[j] : 0.0f;
        }
        for (int first = 0; first < H; first += AT_ONCE) {
            float parts[AT_ONCE] = {};
#pragma unroll
            for (int k = 0; k < AT_ONCE; ++k) {
                const int i = first + k;
                const float factor = i < H ? x[i] : 0.0f;
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c) {
                    const int j = start + c * WARP + lane;
                    const float value = i < H && j < M ? dp[i * M + j] : 0.0f;
                    sums[c] = fmaf(value, factor, sums[c]);
                    parts[k] = fmaf(value, factors[c], parts[k]);
                }
            }
            const float sum = sum_of_each(parts, lane);
            const int i = first + lane / (WARP / AT_ONCE);
            if (lane % (WARP / AT_ONCE) == 0 && i < H) dx[i] = start ? dx[i] + sum : sum;
        }
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
            const int j = start + c * WARP + lane;
            if (j < M) dx0[j] = sums[c];
        }
    }
}
