// Rows of COLUMNS numbers, in pieces of VECTOR, that LANES lanes of a block of 256 hold together:
// HELD pieces a lane at a time. LANES is a power of two up to 32, or 256; VECTOR divides COLUMNS,
// and rows are aligned to it.
#pragma once
#include "column_sum.cuh"

namespace {

constexpr int THREADS = 256, GROUPS = THREADS / LANES, WARPS = THREADS / WARP;
constexpr int SPAN = LANES * VECTOR, CAPACITY = HELD * SPAN;  // columns
constexpr bool LOOPS = COLUMNS > CAPACITY;

using Piece = Floats<VECTOR>;

// Sums of several numbers over the lanes of a row, in all of them.
template <int K>
__device__ __forceinline__ void row_sums(float (&x)[K]) {
#pragma unroll
    for (int step = (LANES < WARP ? LANES : WARP) / 2; step; step /= 2) {
#pragma unroll
        for (int k = 0; k < K; ++k) x[k] += __shfl_xor_sync(FULL, x[k], step);
    }
    if constexpr (LANES > WARP) {
        __shared__ float parts[K][WARPS];
        __syncthreads();  // the sums before have been read
        if (threadIdx.x % WARP == 0) {
#pragma unroll
            for (int k = 0; k < K; ++k) parts[k][threadIdx.x / WARP] = x[k];
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < K; ++k) {
            x[k] = parts[k][0];
#pragma unroll
            for (int warp = 1; warp < WARPS; ++warp) x[k] += parts[k][warp];
        }
    }
}

// This lane's pieces of a chunk of a row; 0 beyond its end.
__device__ __forceinline__ void read(const float* row, bool there, int start,
                                     Piece (&pieces)[HELD]) {
#pragma unroll
    for (int j = 0; j < HELD; ++j) {
        const int at = start + j * SPAN + threadIdx.x % LANES * VECTOR;
        pieces[j] = {};
        if (there && at < COLUMNS) pieces[j] = load<VECTOR>(row + at);
    }
}

// The same of ROWS rows at once: `first`, and others GROUPS apart, of which there are `rows`.
__device__ __forceinline__ void read_rows(const float* x, int64_t first, int64_t rows, int start,
                                          Piece (&pieces)[ROWS][HELD]) {
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const int64_t row = first + i * GROUPS;
        read(x + row * COLUMNS, row < rows, start, pieces[i]);
    }
}

// Two sums of a row's columns as they lie in `part`, where rows are too long to be held; 0 at
// first.
__device__ __forceinline__ void kept_sums(const float* part, int at, bool first, Piece& one,
                                          Piece& other) {
    one = other = {};
    if (first) return;
    one = load<VECTOR>(part + at);
    other = load<VECTOR>(part + COLUMNS + at);
}

// Add up two sums a column over the rows of a block, by shuffles, then over warps in order; the
// (2, COLUMNS) of `part` are theirs. For rows that are held as a whole.
__device__ __forceinline__ void add_rows(float* part, Piece (&first)[HELD], Piece (&second)[HELD]) {
    const int column = threadIdx.x % LANES * VECTOR;
    if constexpr (LANES > WARP) {
#pragma unroll
        for (int j = 0; j < HELD; ++j) {
            const int at = j * SPAN + column;
            if (at >= COLUMNS) break;
            store(part + at, first[j]);
            store(part + COLUMNS + at, second[j]);
        }
    } else {
        __shared__ __align__(16) float sums[WARPS][2][CAPACITY];
        const int warp = threadIdx.x / WARP;
#pragma unroll
        for (int j = 0; j < HELD; ++j) {
#pragma unroll
            for (int l = 0; l < VECTOR; ++l) {
#pragma unroll
                for (int step = WARP / 2; step >= LANES; step /= 2) {
                    first[j].at[l] += __shfl_xor_sync(FULL, first[j].at[l], step);
                    second[j].at[l] += __shfl_xor_sync(FULL, second[j].at[l], step);
                }
            }
            if (threadIdx.x % WARP < LANES) {
                store(&sums[warp][0][j * SPAN + column], first[j]);
                store(&sums[warp][1][j * SPAN + column], second[j]);
            }
        }
        __syncthreads();
        for (int at = threadIdx.x; at < 2 * COLUMNS; at += THREADS) {
            const int which = at / COLUMNS, of_row = at % COLUMNS;
            float sum = sums[0][which][of_row];
#pragma unroll
            for (int other = 1; other < WARPS; ++other) sum += sums[other][which][of_row];
            part[at] = sum;
        }
    }
}

}  // namespace
