// What: x[i, d] = low + span * (philox4x32(id[i], table[i], d / 4)[d % 4] >> 8) / 2^24.
// Who does what: a thread draws and writes 4 columns of a vector, of the last ones as many as
//   there are; consecutive threads have consecutive columns.
// Assumes: VECTOR divides DIM; x is aligned to VECTOR floats.
// Moves: 12 N bytes read, 4 N DIM written.
// Tried: a thread for VECTOR columns: where 4 doesn't divide DIM, a warp then touches each sector
//   of x once (1,000 vectors of DIM 10: 1,875 sectors instead of 3,061), but Philox runs more
//   often (28,157 instructions instead of 17,896), and it is what bounds the kernel.
#include "ieee.cuh"
#include "philox.cuh"

extern "C" __global__ void __launch_bounds__(256)
    uniform_vectors(const uint32_t* tables, const int64_t* ids, uint64_t seed, float low,
                    float span, float* x, int64_t n) {
    constexpr int QUADS = (DIM + 3) / 4;
    const int64_t i = thread_number() / QUADS;
    if (i >= n) return;
    const int quad = static_cast<int>(thread_number() % QUADS);
    const uint64_t id = static_cast<uint64_t>(ids[i]);
    const Words words = philox4x32(static_cast<uint32_t>(id), static_cast<uint32_t>(id >> 32),
                                   tables[i], quad, seed);
#pragma unroll
    for (int m = 0; m < 4; m += VECTOR) {
        Floats<VECTOR> piece;
#pragma unroll
        for (int l = 0; l < VECTOR; ++l) {
            const float u = __fmul_rn(__uint2float_rn(words.at[m + l] >> 8), 0x1p-24f);  // exact
            piece.at[l] = ieee_add(low, ieee_mul(u, span));
        }
        if (quad * 4 + m < DIM) store(x + i * DIM + quad * 4 + m, piece);
    }
}
