// What: x = scale * g; s += x^2; w -= decay * w + lr * x / (sqrt(s) + eps), on N dense parameters
//   and on U embedding rows [w (DIM), s (DIM)]; nothing is written where `scale` is NaN. decay = lr
//   * weight_decay.
// Who does what: blocks of 256 threads. Dense: a thread updates 4 consecutive floats, VECTOR at a
//   time. Rows: a thread updates one of the DIM / VECTOR pieces of a row, consecutive threads
//   consecutive ones, so that a warp moves whole sectors of w, s and g.
// Assumes: VECTOR divides DIM and 4; w, s and g (of rows: g) are aligned to 4 * VECTOR bytes,
//   rows to 16; no row twice.
// Moves: dense 12 N bytes read, 8 N written; rows U (12 DIM + 8) read, 8 U DIM written.
// Tried: see sgd.cu on `scale`. Sectors over ideal bytes: dense 1.01; 256 rows of D = 128: 1.02
//   with VECTOR 4, 1.05 with 2, 1.10 with 1; D = 16: 1.05, 1.07, 1.11. Roots and quotients as
//   IEEE rounds them: 66 instructions a warp for its 2.5 KB are not what bounds this, and
//   approximate ones cost digits. 48 bytes a thread in flight: 96 KB an SM (30
//   registers, of rows 28).
#include "common.cuh"
#include "row_memory.cuh"

namespace {

struct Constants {
    float lr, eps, decay;
    const float* scale;
};

template <int N, typename Vector>
__device__ __forceinline__ void update(Vector w, float* s, const float* g, const Constants& c) {
    const Floats<N> gradient = load<N>(g);
    Floats<N> weight = load<N>(w), sum = load<N>(s);
    const float factor = gradient_scale(c.scale);
    if (is_nan(factor)) return;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const float x = gradient.at[i] * factor;
        sum.at[i] += x * x;
        weight.at[i] -= c.decay * weight.at[i] + c.lr * x / (sqrtf(sum.at[i]) + c.eps);
    }
    store(w, weight);
    store(s, sum);
}

}  // namespace

#ifdef DIM
extern "C" __global__ void __launch_bounds__(256)
    adagrad_rows(const uint64_t* chunks, int k, int stride, const int64_t* rows, const float* g,
                 float lr, float eps, float decay, const float* scale, const uint32_t* tables,
                 const int64_t* ids, uint64_t seed, uint32_t step, int64_t row_count) {
    const RowPiece<DIM, VECTOR> piece;
    if (piece.u >= row_count) return;
    float* row = row_at(chunks, k, stride, rows[piece.u]);
    update<VECTOR>(piece.vector(row, {tables, ids, seed, step}), piece.state(row),
                   g + piece.number * VECTOR, {lr, eps, decay, scale});
}
#else
extern "C" __global__ void __launch_bounds__(256)
    adagrad_dense(float* w, float* s, const float* g, float lr, float eps, float decay,
                  const float* scale, int64_t n) {
    const Constants c{lr, eps, decay, scale};
    const int64_t i = thread_number() * 4;
    if (i + 4 <= n) {
#pragma unroll
        for (int64_t j = i; j < i + 4; j += VECTOR) update<VECTOR>(w + j, s + j, g + j, c);
    } else {
        for (int64_t j = i; j < n; ++j) update<1>(w + j, s + j, g + j, c);
    }
}
#endif
