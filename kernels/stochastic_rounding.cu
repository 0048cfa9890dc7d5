// What: codes[i, d] = x[i, d] rounded to 16 bits at random, by the key of i, d, `seed` and `step`.
// Who does what: a thread rounds 8 columns of a vector, those of one Philox block, of the last ones
//   as many as there are; consecutive threads have consecutive columns.
// Assumes: VECTOR divides DIM and 4; x is aligned to 4 * VECTOR bytes, codes to 2 * VECTOR.
// Moves: N (12 + 4 DIM) bytes read, 2 N DIM written.
// Tried: rows are rounded where they are written, see row_memory.cuh; this kernel rounds vectors
//   that get no row.
#include "common.cuh"
#include "stochastic_rounding.cuh"

extern "C" __global__ void __launch_bounds__(256)
    round_rows(const float* x, const uint32_t* tables, const int64_t* ids, uint64_t seed,
               uint32_t step, uint16_t* codes, int64_t n) {
    constexpr int BLOCKS = (DIM + 7) / 8;
    const int64_t i = thread_number() / BLOCKS;
    if (i >= n) return;
    const int column = static_cast<int>(thread_number() - i * BLOCKS) * 8;
    const Chances<8> r = chances<8>(ids[i], tables[i], seed, step, column);
#pragma unroll
    for (int m = 0; m < 8; m += VECTOR) {
        if (column + m >= DIM) break;
        const Floats<VECTOR> from = load<VECTOR>(x + i * DIM + column + m);
        Codes<VECTOR> to;
#pragma unroll
        for (int l = 0; l < VECTOR; ++l) to.at[l] = rounded(from.at[l], r.at[m + l]);
        *reinterpret_cast<Codes<VECTOR>*>(codes + i * DIM + column + m) = to;
    }
}
