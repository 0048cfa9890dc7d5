// What: scale = min(1, clip_norm / norm) / loss scale, norm = sqrt(sum of x^2 over the elements of
//   all arrays) / loss scale in float64; NaN where the norm or the loss is not finite. A
//   `clip_norm` of inf clips nothing, nor is a norm of 0 clipped. Without `state` the loss scale
//   is 1; else `state` and `factors` make the step that cupyrec/ops/loss_scaling.py defines.
// Who does what: blocks of 256 threads; those from end of array k - 1 to end of array k take its
//   tiles of 2,048 elements, as many apart as they are. Of a tile a thread takes twice 4
//   consecutive elements, 1,024 apart. Within a block sums are added by shuffles, then over its
//   warps in order. The last block to finish adds the parts of all blocks, each thread every 256th,
//   and writes the scale.
// Assumes: arrays are aligned to 4 * VECTOR bytes; VECTOR divides 4. The grid follows from sizes
//   alone. Without `counter` there is another launch to come, whose last block adds the parts of
//   this one too. clip_norm > 0.
// Moves: 4 bytes an element read, 8 a block written and read again (0.2 %).
// Tried: one float4 a thread has 32 KB an SM in flight, two have 64. One part a tile without
//   limit leaves 106,000 parts of the row gradients of batch 65,536 to one block; hence at most
//   2,048 an array. A launch an array, one for the parts and one for the scale do the same in 4 or
//   more launches.
#include "block_sum.cuh"
#include "last_block.cuh"

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

// An array, the number of its first block and that of the first behind it.
struct Array {
    const float* x;
    int64_t n;
    int begin, end;
};

__device__ __forceinline__ double sum_of(const Array& array) {
    double sum = 0;
    const int blocks = array.end - array.begin;
    for (int64_t tile = blockIdx.x - array.begin; tile * TILE < array.n; tile += blocks) {
        const int64_t i = tile * TILE + 4 * threadIdx.x;
        const Floats<4> low = four(array.x, i, array.n), high = four(array.x, i + HALF, array.n);
#pragma unroll
        for (int j = 0; j < 4; ++j) sum += square(low.at[j]) + square(high.at[j]);
    }
    return block_sum<THREADS>(sum);
}

// The loss scale, what else `state` and `factors` hold, and the rules, as in loss_scaling.py.
struct LossScaling {
    double* state;
    float* factors;
    double growth, backoff;
    int interval;
    double beta1, beta2;
};

__device__ __forceinline__ void advance(const LossScaling& by, bool finite) {
    double scale = by.state[0], good = by.state[1];
    if (finite) {
        const double power1 = by.state[4] * by.beta1, power2 = by.state[5] * by.beta2;
        by.state[4] = power1;
        by.state[5] = power2;
        by.factors[1] = static_cast<float>(__ddiv_rn(1.0, __dsub_rn(1.0, power1)));
        by.factors[2] = static_cast<float>(__ddiv_rn(1.0, __dsqrt_rn(__dsub_rn(1.0, power2))));
        good += 1;
        if (good >= by.interval) {
            scale = fmin(scale * by.growth, 0x1p24);
            good = 0;
        }
    } else {
        by.state[2] += 1;
        by.state[3] += scale == 1;
        good = 0;
        scale = fmax(scale * by.backoff, 1.0);
    }
    by.factors[0] = static_cast<float>(scale);
    by.state[0] = static_cast<float>(scale);
    by.state[1] = good;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(256)
    clip_scale(const float* x0, int64_t n0, int end0, const float* x1, int64_t n1, int end1,
               const float* x2, int64_t n2, int end2, const float* x3, int64_t n3, int end3,
               double* parts, int first, int count, uint32_t* counter, double clip_norm,
               const float* loss, float* scale, double* state, float* factors, double growth,
               double backoff, int interval, double beta1, double beta2) {
    const int block = blockIdx.x;
    Array array{x0, n0, 0, end0};
    if (block >= end0) array = {x1, n1, end0, end1};
    if (block >= end1) array = {x2, n2, end1, end2};
    if (block >= end2) array = {x3, n3, end2, end3};
    double sum = sum_of(array);
    if (threadIdx.x == 0) parts[first + block] = sum;
    if (!counter || !last_block(counter, gridDim.x)) return;
    sum = 0;
    for (int i = threadIdx.x; i < count; i += THREADS) sum += parts[i];
    sum = block_sum<THREADS>(sum);
    if (threadIdx.x > 0) return;
    const double loss_scale = state ? state[0] : 1.0;
    const double norm = sqrt(sum) / loss_scale;
    const double factor = fmin(1.0, clip_norm / norm) / loss_scale;
    const bool finite = isfinite(norm) && (!loss || isfinite(*loss));
    *scale = finite ? static_cast<float>(factor) : __int_as_float(0x7FFFFFFF);
    if (state) advance({state, factors, growth, backoff, interval, beta1, beta2}, finite);
}
