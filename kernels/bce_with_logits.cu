// What: loss = 1/total * sum over n of  w * (max(z, 0) - z * y + log(1 + exp(-|z|))), and, unless
//   it is null, dz = w * (sigmoid(z) - y) / total, times `scale` unless that is null. Without
//   weights, which are null then, w is 1.
// Who does what: blocks of 128 threads, two consecutive logits a thread, loaded VECTOR at a
//   time. Terms are float32, their sums float64: within a block by shuffles, then over its warps in
//   order. A grid of one block writes the loss; others a part each, which the last block to come
//   there adds up, each thread every 128th.
// Assumes: z, y, w and dz are aligned to 4 * VECTOR bytes; VECTOR divides 2. total > 0. The
//   counter is 0.
// Moves: 8 n bytes read, 12 n with weights, 4 n written with dz; 8 a block written and read again
//   (0.5 to 0.8 %).
// Tried: terms in float64: 371 instructions a warp instead of 215, most in double precision, and
//   36 registers instead of 25, for a loss that is rounded to float32 in the end; with terms in
//   float32 it is within an ulp. At B = 65,536 an SM has 4 KB of input and 496 samples, so that
//   no cut fills a wave of 2,048 threads: 256 blocks give each of 132 SMs one or two, all their
//   loads in flight at once. Larger batches have 32 KB an SM in flight (one sample a thread: 16).
#include "block_sum.cuh"
#include "last_block.cuh"

namespace {

constexpr int THREADS = 128, SAMPLES = 2;

// The numbers of one thread from number i on, those from n on being 0.
__device__ __forceinline__ Floats<SAMPLES> some(const float* x, int64_t i, int64_t n) {
    if (VECTOR == SAMPLES && i + SAMPLES <= n) return load<SAMPLES>(x + i);
    Floats<SAMPLES> values{};
#pragma unroll
    for (int j = 0; j < SAMPLES; ++j) {
        if (i + j < n) values.at[j] = x[i + j];
    }
    return values;
}

__device__ __forceinline__ float term(float z, float y) {
    return fmaxf(z, 0.0f) - z * y + log1pf(expf(-fabsf(z)));
}

// sigmoid(z) - y; sigmoid(z) is 1 - e / (1 + e) or e / (1 + e), whichever loses no digits.
__device__ __forceinline__ float slope(float z, float y) {
    const float e = expf(-fabsf(z));
    const float small = e / (1.0f + e);
    return z >= 0.0f ? (1.0f - y) - small : small - y;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(128)
    bce_with_logits(const float* z, const float* y, const float* w, int64_t n, double total,
                    double* parts, uint32_t* counter, float* loss, float* dz, const float* scale) {
    const int64_t i = thread_number() * SAMPLES;
    const Floats<SAMPLES> logit = some(z, i, n), label = some(y, i, n);
    Floats<SAMPLES> weight{{1.0f, 1.0f}};
    if (w) weight = some(w, i, n);
    double sum = 0;
#pragma unroll
    for (int j = 0; j < SAMPLES; ++j) {
        if (i + j < n) sum += weight.at[j] * term(logit.at[j], label.at[j]);
    }
    if (dz) {
        const float factor = (scale ? *scale : 1.0f) / static_cast<float>(total);
        Floats<SAMPLES> gradient;
#pragma unroll
        for (int j = 0; j < SAMPLES; ++j) {
            gradient.at[j] = weight.at[j] * slope(logit.at[j], label.at[j]) * factor;
        }
        if (VECTOR == SAMPLES && i + SAMPLES <= n) {
            store(dz + i, gradient);
        } else {
#pragma unroll
            for (int j = 0; j < SAMPLES; ++j) {
                if (i + j < n) dz[i + j] = gradient.at[j];
            }
        }
    }
    sum = block_sum<THREADS>(sum);
    if (gridDim.x > 1) {
        if (threadIdx.x == 0) parts[blockIdx.x] = sum;
        if (!last_block(counter, gridDim.x)) return;
        sum = 0;
        for (int64_t part = threadIdx.x; part < gridDim.x; part += THREADS) sum += parts[part];
        sum = block_sum<THREADS>(sum);
    }
    if (threadIdx.x == 0) *loss = static_cast<float>(sum / total);
}
