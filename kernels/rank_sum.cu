// What: out[i] = parts[0, i] + parts[1, i] + ..., from left to right, each addition rounded.
// Who does what: a thread adds VECTOR consecutive numbers, of BATCH ranks at a time, whose loads
// are
//   under way together.
// Assumes: VECTOR divides n; parts and out are aligned to VECTOR floats; ranks >= 1. out may be
//   parts[0].
// Moves: 4 n bytes a rank read, 4 n written.
// Tried: 8 ranks, 262,144 numbers: bytes and sectors 1.00 of the ideal, 40 registers. By the array
//   module's sum over the first axis the order of additions is the module's affair.
#include "common.cuh"
#include "ieee.cuh"

extern "C" __global__ void __launch_bounds__(256)
    rank_sum(const float* parts, int ranks, float* out, int64_t n) {
    constexpr int BATCH = 4;
    const int64_t i = thread_number() * VECTOR;
    if (i >= n) return;
    Floats<VECTOR> sum = load<VECTOR>(parts + i);
    for (int first = 1; first < ranks; first += BATCH) {
        Floats<VECTOR> held[BATCH];
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
            if (first + j < ranks) held[j] = load<VECTOR>(parts + (first + j) * n + i);
        }
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
            if (first + j >= ranks) break;
#pragma unroll
            for (int v = 0; v < VECTOR; ++v) sum.at[v] = ieee_add(sum.at[v], held[j].at[v]);
        }
    }
    store(out + i, sum);
}
