// The rows X of `dot_interaction.cu` on their way to shared memory and back: FEATURES of WIDTH
// floats a sample, the first one `dense` where DENSE, the others side by side, or with the macro
// GATHERED in tables.
#pragma once
#include "common.cuh"
#if GATHERED
#include "row_memory.cuh"
#endif

namespace {

constexpr int SOURCES = GATHERED ? (FEATURES + 1) / 2 * 4 : 0;  // floats a sample, of addresses

constexpr uint32_t NOT_0(int n) { return n > 0 ? n : 1; }

// How many moves of N floats the address lies past a multiple of 128 bytes: a warp that starts
// that much earlier asks for whole lines.
template <int N>
__device__ __forceinline__ int skew(const float* from) {
    return N == 4 ? 0 : static_cast<int>(reinterpret_cast<uint64_t>(from) / (4 * N) % WARP);
}

template <int N>
__device__ __forceinline__ void copy_async(uint32_t to, const float* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(4 * N)
                 : "memory");
}

__device__ __forceinline__ uint32_t shared_address(const float* x) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(x));
}

__device__ __forceinline__ void copies_done() {
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
}

// Columns [start, start + CHUNK) of PER_SAMPLE rows a sample -> shared memory, where they lie
// behind SKIP other rows of the sample.
template <int PER_SAMPLE, int SKIP>
__device__ __forceinline__ void stage(float* x, const float* from, uint32_t samples, int start) {
    constexpr int PIECES = PER_SAMPLE * CHUNK / VECTOR;
    if (PIECES == 0) return;
    const uint32_t to = shared_address(x + SKIP * CHUNK);
    const uint32_t before = skew<VECTOR>(from), total = samples * PIECES;
    for (uint32_t q = threadIdx.x; q < total + before; q += THREADS) {
        const uint32_t p = q - before;
        if (VECTOR < 4 && p >= total) continue;
        if (CHUNK == WIDTH) {
            const uint32_t gap =
                p / NOT_0(PIECES) * static_cast<uint32_t>(STRIDE - PIECES * VECTOR);
            copy_async<VECTOR>(to + 4 * (p * VECTOR + gap), from + uint64_t(p) * VECTOR);
        } else {  // of one sample
            const uint32_t row = p / (CHUNK / VECTOR),
                           column = p % (CHUNK / VECTOR) * VECTOR + start;
            if (WIDTH % CHUNK == 0 || column < WIDTH)
                copy_async<VECTOR>(to + 4 * p * VECTOR,
                                   from + static_cast<int64_t>(row) * WIDTH + column);
        }
    }
}

#if GATHERED
// Where the rows of samples from number `first` on lie, as ValueVectors says -> shared memory.
__device__ __forceinline__ void find_rows(uint64_t* at, const float* dense,
                                          const ValueVectors& vectors, int64_t first,
                                          uint32_t samples) {
    for (uint32_t q = threadIdx.x; q < samples * FEATURES; q += THREADS) {
        const uint32_t sample = q / FEATURES;
        const int row = static_cast<int>(q % FEATURES) - DENSE;
        const uint64_t top = reinterpret_cast<uint64_t>(dense + sample * WIDTH);
        at[q] = row < 0 ? top + (VALUE != FLOAT32)
                        : vectors.address<WIDTH>((first + sample) * (FEATURES - DENSE) + row);
    }
    __syncthreads();
}

// `stage`, of all rows.
__device__ __forceinline__ void stage_rows(float* x, const uint64_t* at, uint32_t samples,
                                           int start) {
    constexpr uint32_t PIECES = CHUNK / VECTOR;
    for (uint32_t q = threadIdx.x; q < samples * FEATURES * PIECES; q += THREADS) {
        const int row = q / PIECES, column = q % PIECES * VECTOR;
        if (WIDTH % CHUNK != 0 && start + column >= WIDTH) continue;
        float* to = x + row * CHUNK + row / FEATURES * (STRIDE - FEATURES * CHUNK) + column;
#if VALUE == FLOAT32
        copy_async<VECTOR>(shared_address(to),
                           reinterpret_cast<const float*>(at[row]) + start + column);
#else
        store(to, columns_at<VECTOR>(at[row], start + column));
#endif
    }
}
#endif

// The rows that `stage` put into x -> global memory.
template <int PER_SAMPLE, int SKIP>
__device__ __forceinline__ void unstage(float* to, const float* x, uint32_t samples) {
    constexpr int PIECES = PER_SAMPLE * WIDTH / VECTOR;
    if (PIECES == 0) return;
    x += SKIP * WIDTH;
    const uint32_t before = skew<VECTOR>(to), total = samples * PIECES;
    for (uint32_t q = threadIdx.x; q < total + before; q += THREADS) {
        const uint32_t p = q - before;
        if (VECTOR < 4 && p >= total) continue;
        const uint32_t gap = p / NOT_0(PIECES) * static_cast<uint32_t>(STRIDE - PIECES * VECTOR);
        store(to + uint64_t(p) * VECTOR, load<VECTOR>(x + p * VECTOR + gap));
    }
}

}  // namespace
