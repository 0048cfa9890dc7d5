// What: x = scale * g; r = sqrt(n); n += x^2; c = beta + sqrt(n) + ridge; z += lr * x + (decay * c
//   - (sqrt(n) - r)) * w; w = (sign(z) * lasso - z) / c, 0 where |z| <= lasso; on N dense
//   parameters and on U embedding rows [w (DIM), n (DIM), z (DIM)]; a z of 0 beside a w that is not
//   starts from -(beta + r) * w; nothing is written where `scale` is NaN. The host computes lasso =
//   lr * lambda1, ridge = lr * lambda2 and decay = lr * weight_decay in float64.
// Who does what: blocks of 256 threads. Dense: a thread updates 4 consecutive floats, VECTOR at a
//   time. Rows: a thread updates one of the DIM / VECTOR pieces of a row, consecutive threads
//   consecutive ones, so that a warp moves whole sectors of w, n, z and g.
// Assumes: VECTOR divides DIM and 4; w, n, z and g (of rows: g) are aligned to 4 * VECTOR bytes,
//   rows to 16; no row twice.
// Moves: dense 16 N bytes read, 12 N written; rows U (16 DIM + 8) read, 12 U DIM written.
// Tried: see sgd.cu on `scale`, adagrad.cu on roots and quotients. Sums of products that the
//   compiler fuses as it likes may have other bits on another architecture, hence fmaf. Sectors
//   over ideal bytes: dense 1.00; 1,728 rows of D = 128 1.02, of 16 1.01. 64 bytes a thread in
//   flight: 136 KB an SM (32 registers, 8 blocks).
#include "common.cuh"
#include "row_memory.cuh"

namespace {

struct Constants {
    float lr, lasso, ridge, beta, decay;
    const float* scale;
};

template <int N, typename Vector>
__device__ __forceinline__ void update(Vector w, float* n, float* z, const float* g,
                                       const Constants& c) {
    const Floats<N> gradient = load<N>(g);
    Floats<N> weight = load<N>(w), square = load<N>(n), sum = load<N>(z);
    const float factor = gradient_scale(c.scale);
    if (is_nan(factor)) return;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const float x = gradient.at[i] * factor;
        const float before = sqrtf(square.at[i]);
        square.at[i] = fmaf(x, x, square.at[i]);
        const float root = sqrtf(square.at[i]);
        const float curvature = c.beta + root + c.ridge;
        const float own = -(c.beta + before) * weight.at[i];
        const bool fresh = sum.at[i] == 0.0f && weight.at[i] != 0.0f;  // nothing has moved it yet
        sum.at[i] = fresh ? own : sum.at[i];
        const float moved = fmaf(c.decay, curvature, before - root);
        sum.at[i] = fmaf(moved, weight.at[i], fmaf(c.lr, x, sum.at[i]));
        const float step = (copysignf(c.lasso, sum.at[i]) - sum.at[i]) / curvature;
        weight.at[i] = fabsf(sum.at[i]) <= c.lasso ? 0.0f : step;
    }
    store(w, weight);
    store(n, square);
    store(z, sum);
}

}  // namespace

#ifdef DIM
extern "C" __global__ void __launch_bounds__(256)
    ftrl_rows(const uint64_t* chunks, int k, int stride, const int64_t* rows, const float* g,
              float lr, float lasso, float ridge, float beta, float decay, const float* scale,
              const uint32_t* tables, const int64_t* ids, uint64_t seed, uint32_t step,
              int64_t row_count) {
    const RowPiece<DIM, VECTOR> piece;
    if (piece.u >= row_count) return;
    float* row = row_at(chunks, k, stride, rows[piece.u]);
    update<VECTOR>(piece.vector(row, {tables, ids, seed, step}), piece.state(row),
                   piece.state(row, 1), g + piece.number * VECTOR,
                   {lr, lasso, ridge, beta, decay, scale});
}
#else
extern "C" __global__ void __launch_bounds__(256)
    ftrl_dense(float* w, float* n, float* z, const float* g, float lr, float lasso, float ridge,
               float beta, float decay, const float* scale, int64_t size) {
    const Constants c{lr, lasso, ridge, beta, decay, scale};
    const int64_t i = thread_number() * 4;
    if (i + 4 <= size) {
#pragma unroll
        for (int64_t j = i; j < i + 4; j += VECTOR) update<VECTOR>(w + j, n + j, z + j, g + j, c);
    } else {
        for (int64_t j = i; j < size; ++j) update<1>(w + j, n + j, z + j, g + j, c);
    }
}
#endif
