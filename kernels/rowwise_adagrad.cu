// What: x = scale * g; s += sum over the row of x^2 / DIM; w -= decay * w + lr / (sqrt(s) + eps) *
//   x, on U embedding rows [w (DIM), s]; nothing is written where `scale` is NaN. The host computes
//   decay = lr * weight_decay in float64.
// Who does what: blocks of 256 threads. LANES neighbours of a warp, a power of 2, share a row: each
//   has every LANES-th piece of VECTOR columns and adds up its squares in order, then shuffles add
//   lanes in a tree, the same on every lane; the first writes s. Up to 4 pieces a lane stay in
//   registers; of wider rows the second pass asks for w and, again, for g.
// Assumes: VECTOR divides DIM and 4; g is aligned to 4 * VECTOR bytes, rows to 16; no row twice.
// Moves: U (8 DIM + 12) bytes read, U (4 DIM + 4) written.
// Tried: see sgd.cu on `scale`. Sums of products that the compiler fuses as it likes, and a
//   quotient by a constant that it makes a product, have other bits on another architecture; hence
//   fmaf and __fdiv_rn. Sectors over ideal bytes: D = 128 1.11; 16 1.51, where the sector of s
//   weighs as much as half a vector; 1025 1.57: single floats, and g again.
#include "row_memory.cuh"

namespace {

constexpr int lanes(int pieces) {
    int n = 1;
    while (n < pieces && n < WARP) n *= 2;
    return n;
}

constexpr int PIECES = DIM / VECTOR, LANES = lanes(PIECES);
constexpr int OF_LANE = (PIECES + LANES - 1) / LANES;
constexpr bool KEPT = OF_LANE <= 4;

}  // namespace

extern "C" __global__ void __launch_bounds__(256)
    rowwise_adagrad_rows(const uint64_t* chunks, int k, int stride, const int64_t* rows,
                         const float* g, float lr, float eps, float decay, const float* scale,
                         const uint32_t* tables, const int64_t* ids, uint64_t seed, uint32_t step,
                         int64_t row_count) {
    const int64_t u = thread_number() / LANES;
    const int lane = threadIdx.x % LANES;
    const float factor = gradient_scale(scale);
    const bool live = u < row_count && !is_nan(factor);
    float* row = live ? row_at(chunks, k, stride, rows[u]) : nullptr;
    float* state = row + vector_words(DIM);
    const auto piece = [&](int n) { return RowPiece<DIM, VECTOR>{u * PIECES + n, u, n * VECTOR}; };
    const auto weights = [&](int n) { return piece(n).vector(row, {tables, ids, seed, step}); };
    Floats<VECTOR> gradient[KEPT ? OF_LANE : 1], weight[KEPT ? OF_LANE : 1];
    float before = 0, sum = 0;
    if (live) before = *state;
#pragma unroll(KEPT ? OF_LANE : 4)
    for (int p = 0; p < OF_LANE; ++p) {
        const int n = p * LANES + lane, at = KEPT ? p : 0;
        if (!live || n >= PIECES) break;
        gradient[at] = load<VECTOR>(g + piece(n).number * VECTOR);
        if (KEPT) weight[at] = load<VECTOR>(weights(n));
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
            const float x = gradient[at].at[i] * factor;
            sum = fmaf(x, x, sum);
        }
    }
#pragma unroll
    for (int other = LANES / 2; other; other /= 2) sum += __shfl_xor_sync(FULL, sum, other);
    if (!live) return;
    const float squares = before + __fdiv_rn(sum, DIM), rate = lr / (sqrtf(squares) + eps);
#pragma unroll(KEPT ? OF_LANE : 4)
    for (int p = 0; p < OF_LANE; ++p) {
        const int n = p * LANES + lane, at = KEPT ? p : 0;
        if (n >= PIECES) break;
        if (!KEPT) gradient[at] = load<VECTOR>(g + piece(n).number * VECTOR);
        if (!KEPT) weight[at] = load<VECTOR>(weights(n));
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
            const float x = gradient[at].at[i] * factor;
            const float decayed = fmaf(-decay, weight[at].at[i], weight[at].at[i]);
            weight[at].at[i] = fmaf(-rate, x, decayed);
        }
        store(weights(n), weight[at]);
    }
    if (lane == 0) *state = squares;
}
