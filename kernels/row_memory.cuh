// Where embedding rows lie, see cupyrec/ops/embedding_rows.py.
#pragma once
#include "common.cuh"

// Row number `row`: row % 2^k of chunk row / 2^k, `stride` floats each.
__device__ __forceinline__ float* row_at(const uint64_t* chunks, int k, int stride, int64_t row) {
    const int64_t within = row & ((int64_t(1) << k) - 1);
    return reinterpret_cast<float*>(chunks[row >> k]) + within * stride;
}

// The N columns of a row of WIDTH that a thread updates: consecutive threads have consecutive ones.
template <int WIDTH, int N>
struct RowPiece {
    int64_t number = thread_number();  // times N: where its gradient lies
    int64_t u = number / (WIDTH / N);
    int column = static_cast<int>(number - u * (WIDTH / N)) * N;
};
