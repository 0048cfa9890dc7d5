// What: x = scale * g; m = beta1 m + rest1 x; v = beta2 v + rest2 x^2; w -= decay * w + rate * m /
//   (sqrt(v) * inverse_root + eps), on N dense parameters and on U embedding rows [w (DIM), m
//   (DIM), v (DIM)], behind which `last` is written unless it is 0; nothing is written where
//   `scale` is NaN. The host computes rest = 1 - beta, rate = lr / (1 - beta1^t), inverse_root = (1
//   - beta2^t)^-1/2 and decay = lr * weight_decay in float64. With `corrections`, which hold those
//   two of the t that the device counted, rate is lr.
// Who does what: blocks of 256 threads. Dense: a thread updates 4 consecutive floats, VECTOR at a
//   time. Rows: a thread updates one of the DIM / VECTOR pieces of a row, consecutive threads
//   consecutive ones, so that a warp moves whole sectors of w, m, v and g.
// Assumes: VECTOR divides DIM and 4; w, m, v and g (of rows: g) are aligned to 4 * VECTOR bytes,
//   rows to 16; no row twice.
// Moves: dense 16 N bytes read, 12 N written; rows U (16 DIM + 8) read, 12 U DIM written.
// Tried: see sgd.cu on `scale`, adagrad.cu on roots and quotients. Sectors over ideal bytes:
//   dense 1.01; 256 rows of D = 128: 1.02 with VECTOR 4, 1.03 with 2, 1.07 with 1; D = 16: 1.04,
//   1.05 and 1.08. 64 bytes a thread in flight: 96 KB an SM (38 registers, 6 blocks; rows
//   36, 6, and 32, 8 without `corrections`).
#include "common.cuh"
#include "row_memory.cuh"

namespace {

struct Constants {
    float rate, beta1, rest1, beta2, rest2, inverse_root, eps, decay;
    const float* corrections;
    const float* scale;
};

template <int N, typename Vector>
__device__ __forceinline__ bool update(Vector w, float* m, float* v, const float* g,
                                       const Constants& c) {
    const Floats<N> gradient = load<N>(g);
    Floats<N> weight = load<N>(w), mean = load<N>(m), square = load<N>(v);
    const float factor = gradient_scale(c.scale);
    if (is_nan(factor)) return false;
    const float rate = c.corrections ? c.rate * c.corrections[0] : c.rate;
    const float inverse_root = c.corrections ? c.corrections[1] : c.inverse_root;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const float x = gradient.at[i] * factor;
        mean.at[i] = c.beta1 * mean.at[i] + c.rest1 * x;
        square.at[i] = c.beta2 * square.at[i] + c.rest2 * (x * x);
        const float root = sqrtf(square.at[i]) * inverse_root;
        weight.at[i] -= c.decay * weight.at[i] + rate * mean.at[i] / (root + c.eps);
    }
    store(w, weight);
    store(m, mean);
    store(v, square);
    return true;
}

}  // namespace

#ifdef DIM
extern "C" __global__ void __launch_bounds__(256)
    adam_rows(const uint64_t* chunks, int k, int stride, const int64_t* rows, const float* g,
              int last, float rate, float beta1, float rest1, float beta2, float rest2,
              float inverse_root, float eps, float decay, const float* corrections,
              const float* scale, const uint32_t* tables, const int64_t* ids, uint64_t seed,
              uint32_t step, int64_t row_count) {
    const RowPiece<DIM, VECTOR> piece;
    if (piece.u >= row_count) return;
    float* row = row_at(chunks, k, stride, rows[piece.u]);
    const bool updated = update<VECTOR>(
        piece.vector(row, {tables, ids, seed, step}), piece.state(row), piece.state(row, 1),
        g + piece.number * VECTOR,
        {rate, beta1, rest1, beta2, rest2, inverse_root, eps, decay, corrections, scale});
    if (updated && last && piece.column == 0) *reinterpret_cast<int*>(piece.state(row, 2)) = last;
}
#else
extern "C" __global__ void __launch_bounds__(256)
    adam_dense(float* w, float* m, float* v, const float* g, float rate, float beta1, float rest1,
               float beta2, float rest2, float inverse_root, float eps, float decay,
               const float* corrections, const float* scale, int64_t n) {
    const Constants c{rate,         beta1, rest1, beta2,       rest2,
                      inverse_root, eps,   decay, corrections, scale};
    const int64_t i = thread_number() * 4;
    if (i + 4 <= n) {
#pragma unroll
        for (int64_t j = i; j < i + 4; j += VECTOR) update<VECTOR>(w + j, m + j, v + j, g + j, c);
    } else {
        for (int64_t j = i; j < n; ++j) update<1>(w + j, m + j, v + j, g + j, c);
    }
}
#endif
