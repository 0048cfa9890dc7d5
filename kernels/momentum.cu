// What: x = scale * g; m = momentum * m + x; w -= decay * w + lr * m (with `nesterov`, lr * (x +
//   momentum * m)), on N dense parameters and on U embedding rows [w (DIM), m (DIM)]; nothing is
//   written where `scale` is NaN. decay = lr * weight_decay.
// Who does what: blocks of 256 threads. Dense: a thread updates 4 consecutive floats, VECTOR at a
//   time. Rows: a thread updates one of the DIM / VECTOR pieces of a row, consecutive threads
//   consecutive ones, so that a warp moves whole sectors of w, m and g.
// Assumes: VECTOR divides DIM and 4; w, m and g (of rows: g) are aligned to 4 * VECTOR bytes,
//   rows to 16; no row twice.
// Moves: dense 12 N bytes read, 8 N written; rows U (12 DIM + 8) read, 8 U DIM written.
// Tried: see sgd.cu on `scale`. It moves what adagrad.cu does. `nesterov` is the same for all
//   threads: a select, not a branch, where a macro would build each kernel twice. Roundings are
//   spelt: which of two products NVRTC fuses with their sum depends on the architecture.
#include "common.cuh"
#include "row_memory.cuh"

namespace {

struct Constants {
    float lr, momentum;
    bool nesterov;
    float decay;
    const float* scale;
};

template <int N, typename Vector>
__device__ __forceinline__ void update(Vector w, float* m, const float* g, const Constants& c) {
    const Floats<N> gradient = load<N>(g);
    Floats<N> weight = load<N>(w), mean = load<N>(m);
    const float factor = gradient_scale(c.scale);
    if (is_nan(factor)) return;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const float x = __fmul_rn(gradient.at[i], factor);
        mean.at[i] = __fmaf_rn(c.momentum, mean.at[i], x);
        const float step = c.nesterov ? __fmaf_rn(c.momentum, mean.at[i], x) : mean.at[i];
        const float kept = __fmaf_rn(-c.decay, weight.at[i], weight.at[i]);
        weight.at[i] = __fmaf_rn(-c.lr, step, kept);
    }
    store(w, weight);
    store(m, mean);
}

}  // namespace

#ifdef DIM
extern "C" __global__ void __launch_bounds__(256)
    momentum_rows(const uint64_t* chunks, int k, int stride, const int64_t* rows, const float* g,
                  float lr, float momentum, bool nesterov, float decay, const float* scale,
                  const uint32_t* tables, const int64_t* ids, uint64_t seed, uint32_t step,
                  int64_t row_count) {
    const RowPiece<DIM, VECTOR> piece;
    if (piece.u >= row_count) return;
    float* row = row_at(chunks, k, stride, rows[piece.u]);
    update<VECTOR>(piece.vector(row, {tables, ids, seed, step}), piece.state(row),
                   g + piece.number * VECTOR, {lr, momentum, nesterov, decay, scale});
}
#else
extern "C" __global__ void __launch_bounds__(256)
    momentum_dense(float* w, float* m, const float* g, float lr, float momentum, bool nesterov,
                   float decay, const float* scale, int64_t n) {
    const Constants c{lr, momentum, nesterov, decay, scale};
    const int64_t i = thread_number() * 4;
    if (i + 4 <= n) {
#pragma unroll
        for (int64_t j = i; j < i + 4; j += VECTOR) update<VECTOR>(w + j, m + j, g + j, c);
    } else {
        for (int64_t j = i; j < n; ++j) update<1>(w + j, m + j, g + j, c);
    }
}
#endif
