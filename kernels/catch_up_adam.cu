// What: U embedding rows [w (DIM), m (DIM), v (DIM), last (1)] go from step `last` of Adam to step
//   t by the steps between, which have gradient 0; rows of `last` 0 or >= t stay. catch_up_rows
//   writes them, caught_up_vectors writes the w that they would have to `out`. When the replay of a
//   row may end: cupyrec/ops/catch_up_adam.py.
// Who does what: LANES lanes a row, a power of two of at least DIM / VECTOR, or a warp. A lane
//   replays VECTOR columns in registers until these have settled; lanes of a row read the same 16
//   bytes of a step. One lane writes `last`, which all have read before a warp-wide barrier.
// Assumes: VECTOR divides DIM; `out` is aligned to VECTOR floats, rows and steps to 16 bytes; for
//   catch_up_rows no row twice; beta1 and the root of beta2 are sums of two floats.
// Moves: U (12 DIM + 12) bytes read; written U (12 DIM + 4), or 4 U DIM to `out`; and 16 bytes a
//   step that a row was away, which L1 has for all rows but one.
// Tried: rows that were away for 32 steps: 55 instructions of PTX a step and warp; bytes 1.00 of
//   the ideal, sectors 1.4 (DIM 128) and 1.7 (DIM 16), for `last` and the history. Quotients as
//   IEEE rounds them: 520 instructions of sm_90 for 400, and a branch each, while a movement is but
//   a digit or two of a weight. Steps unrolled by 4: 64 registers for 48, 4 blocks an SM for 5, and
//   for some DIM ptxas spills. One sum of all movements instead of `lately`: 1.7e-6 of the weight
//   off after 900 steps of beta1 = .99, now less than 1e-6. A power of one float for beta1 = .999
//   would be 1e-5 off after 1,000 steps.
#include "row_memory.cuh"

namespace {

constexpr int PIECES = DIM / VECTOR, CHECKED = 8;

struct alignas(16) Step {
    float lr, correction, inverse_root, decay;
};

struct History {
    const Step* steps;
    const double* kept;
    int t;
    float beta1, beta1_rest, root2, root2_rest, eps, bound, rooted;
};

// x^n by squaring.
__device__ __forceinline__ double power(double x, int n) {
    double product = 1;
    for (; n; n >>= 1) {
        if (n & 1) product *= x;
        x *= x;
    }
    return product;
}

// The factor that decay leaves of a weight from step s to step t.
__device__ __forceinline__ float kept_between(const History& h, int s, int t) {
    return h.kept ? expf(static_cast<float>(h.kept[t] - h.kept[s])) : 1.0f;
}

// Weights of step `last` become those of step t.
__device__ __forceinline__ void replay(Floats<VECTOR>& w, const Floats<VECTOR>& m,
                                       const Floats<VECTOR>& v, int last, const History& h) {
    Floats<VECTOR> root, moved = {};
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) root.at[i] = sqrtf(v.at[i]);
    float power1 = 1, power2 = 1, kept = 1;
    const float bound = h.bound * h.steps[last + 1].correction;
    int s = last;
    while (s < h.t) {
        const int pause = h.t - s < CHECKED ? h.t : s + CHECKED;
        float gone = 0;
        Floats<VECTOR> lately = {};
#pragma unroll 1
        while (s < pause) {
            const Step step = h.steps[++s];
            power1 = power1 * h.beta1 + power1 * h.beta1_rest;
            power2 = power2 * h.root2 + power2 * h.root2_rest;
            const float rate = step.lr * step.correction * power1;
            const float inverse_root = step.inverse_root * power2;
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) {
                const float movement =
                    __fdividef(rate * m.at[i], inverse_root * root.at[i] + h.eps);
                lately.at[i] += movement - step.decay * lately.at[i];
            }
            gone += step.decay * (1 - gone);
        }
        kept -= gone * kept;
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) moved.at[i] += lately.at[i] - gone * moved.at[i];
        bool settled = true;
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
            const float rest = fabsf(m.at[i]) * (bound * power1);
            const float room = fabsf(kept * w.at[i] - moved.at[i]);
            if (rest > room * (h.rooted * power2 * root.at[i] + h.eps)) settled = false;
        }
        if (settled) break;
    }
    const float all = kept_between(h, last, h.t), rest = kept_between(h, s, h.t);
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) w.at[i] = all * w.at[i] - rest * moved.at[i];
}

// A row's group of lanes, and what all of them know of it.
struct Row {
    int64_t u = thread_number() / LANES;
    int lane = threadIdx.x % LANES;
    float* words = nullptr;
    int last = 0;

    __device__ __forceinline__ Row(const uint64_t* chunks, int k, int stride, const int64_t* rows,
                                   int64_t count) {
        if (u >= count) return;
        words = row_at(chunks, k, stride, rows[u]);
        last = *reached();
    }

    __device__ __forceinline__ int* reached() const {
        return reinterpret_cast<int*>(words + vector_words(DIM) + 2 * DIM);
    }

    __device__ __forceinline__ RowPiece<DIM, VECTOR> piece(int number) const {
        return {0, u, number * VECTOR};
    }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(256)
    catch_up_rows(const uint64_t* chunks, int k, int stride, const int64_t* rows,
                  const float* steps, const double* kept, int t, float beta1, float beta1_rest,
                  float root2, float root2_rest, float eps, float bound, float rooted,
                  const uint32_t* tables, const int64_t* ids, uint64_t seed, uint32_t step,
                  int64_t row_count) {
    const auto* each = reinterpret_cast<const Step*>(steps);
    const History history{each, kept, t, beta1, beta1_rest, root2, root2_rest, eps, bound, rooted};
    const Row row(chunks, k, stride, rows, row_count);
    __syncwarp();  // all lanes have read `last`, which one will write
    if (row.last <= 0 || row.last >= t) return;
    for (int number = row.lane; number < PIECES; number += LANES) {
        const RowPiece<DIM, VECTOR> piece = row.piece(number);
        const auto vector = piece.vector(row.words, {tables, ids, seed, step});
        Floats<VECTOR> w = load<VECTOR>(vector), m = load<VECTOR>(piece.state(row.words, 0));
        Floats<VECTOR> v = load<VECTOR>(piece.state(row.words, 1));
        replay(w, m, v, row.last, history);
        const double root = static_cast<double>(root2) + root2_rest;
        const double power1 = power(static_cast<double>(beta1) + beta1_rest, t - row.last);
        const double power2 = power(root * root, t - row.last);
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
            m.at[i] *= static_cast<float>(power1);
            v.at[i] *= static_cast<float>(power2);
        }
        store(vector, w);
        store(piece.state(row.words, 0), m);
        store(piece.state(row.words, 1), v);
    }
    if (row.lane == 0) *row.reached() = t;
}

extern "C" __global__ void __launch_bounds__(256)
    caught_up_vectors(const uint64_t* chunks, int k, int stride, const int64_t* rows,
                      const float* steps, const double* kept, int t, float beta1, float beta1_rest,
                      float root2, float root2_rest, float eps, float bound, float rooted,
                      float* out, int64_t row_count) {
    const auto* each = reinterpret_cast<const Step*>(steps);
    const History history{each, kept, t, beta1, beta1_rest, root2, root2_rest, eps, bound, rooted};
    const Row row(chunks, k, stride, rows, row_count);
    if (!row.words) return;
    for (int number = row.lane; number < PIECES; number += LANES) {
        const RowPiece<DIM, VECTOR> piece = row.piece(number);
        Floats<VECTOR> w = load<VECTOR>(piece.vector(row.words, {}));
        if (row.last > 0 && row.last < t) {
            replay(w, load<VECTOR>(piece.state(row.words, 0)),
                   load<VECTOR>(piece.state(row.words, 1)), row.last, history);
        }
        store(out + row.u * DIM + piece.column, w);
    }
}
