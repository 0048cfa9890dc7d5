// What: w -= decay * w + rate * scale * g, on N dense parameters and on the vectors of U embedding
//   rows. Nothing is written where `scale` is NaN. decay = lr * weight_decay.
// Who does what: blocks of 256 threads. Dense: a thread updates 4 consecutive floats, VECTOR at a
//   time. Rows: a thread updates one of the DIM / VECTOR pieces of a row, consecutive threads
//   consecutive ones, so that a warp moves whole sectors of w and g.
// Assumes: VECTOR divides DIM and 4; w and g (of rows: g) are aligned to 4 * VECTOR bytes, rows
//   to 16; no row twice.
// Moves: dense 8 N bytes read, 4 N written; rows U (8 DIM + 8) read, 4 U DIM written.
// Tried: sectors over ideal bytes, and instructions of warps, of 256 rows. D = 128: 1.04 and
//   15,616 with VECTOR 4, 1.08 and 29,184 with 2, 1.16 and 53,248 with 1. D = 16: 1.08, 1.12 and
//   1.18. Dense: 1.02 with VECTOR 4, 4.08 with 1, which only views off the 16 bytes meet. To read
//   `scale` first and leave on NaN puts its latency before that of w and g; here it is on its way
//   with them, and only the store waits. Of rows, w waits for rows[u] and then chunks[], g and
//   `scale` for nothing. In flight an SM: dense 64 KB of w and g (22 registers), rows as much (18).
#include "common.cuh"
#include "row_memory.cuh"

namespace {

template <int N, typename Vector>
__device__ __forceinline__ void update(Vector w, const float* g, float rate, float decay,
                                       const float* scale) {
    const Floats<N> gradient = load<N>(g);
    Floats<N> weight = load<N>(w);
    const float factor = gradient_scale(scale);
    if (is_nan(factor)) return;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const float kept = __fmaf_rn(-decay, weight.at[i], weight.at[i]);
        weight.at[i] = __fmaf_rn(-rate * factor, gradient.at[i], kept);
    }
    store(w, weight);
}

}  // namespace

#ifdef DIM
extern "C" __global__ void __launch_bounds__(256)
    sgd_rows(const uint64_t* chunks, int k, int stride, const int64_t* rows, const float* g,
             float rate, float decay, const float* scale, const uint32_t* tables,
             const int64_t* ids, uint64_t seed, uint32_t step, int64_t row_count) {
    const RowPiece<DIM, VECTOR> piece;
    if (piece.u >= row_count) return;
    float* row = row_at(chunks, k, stride, rows[piece.u]);
    update<VECTOR>(piece.vector(row, {tables, ids, seed, step}), g + piece.number * VECTOR, rate,
                   decay, scale);
}
#else
extern "C" __global__ void __launch_bounds__(256)
    sgd_dense(float* w, const float* g, float rate, float decay, const float* scale, int64_t n) {
    const int64_t i = thread_number() * 4;
    if (i + 4 <= n) {
#pragma unroll
        for (int j = 0; j < 4; j += VECTOR)
            update<VECTOR>(w + i + j, g + i + j, rate, decay, scale);
    } else {
        for (int64_t j = i; j < n; ++j) update<1>(w + j, g + j, rate, decay, scale);
    }
}
#endif
