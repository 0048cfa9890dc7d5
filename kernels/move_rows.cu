// What: row to[i] = row from[i], STRIDE words each.
// Who does what: a thread moves 4 pieces of 4 words, consecutive threads consecutive ones of a row.
// Assumes: no row of `to` is in `from`, or twice in `to`; chunks are aligned to 16 bytes, STRIDE is
//   a multiple of 4.
// Moves: N (4 STRIDE + 16) bytes read, 4 N STRIDE written.
// Tried: see write_rows in embedding_rows.cu, whose division of the work this is.
#include "row_memory.cuh"

extern "C" __global__ void __launch_bounds__(256)
    move_rows(const uint64_t* chunks, int k, const int64_t* from, const int64_t* to, int64_t n) {
    constexpr int QUADS = STRIDE / 4, BATCH = 4;
    const int64_t first = int64_t(blockIdx.x) * (256 * BATCH) + threadIdx.x;
    const int64_t row = first / QUADS;
    const unsigned start = static_cast<unsigned>(first - row * QUADS);
    const int left = static_cast<int>(n - row < 256 * BATCH ? n - row : 256 * BATCH);
    Floats<4> quads[BATCH];
#pragma unroll
    for (int j = 0; j < BATCH; ++j) {
        const int ahead = (start + j * 256) / QUADS, column = (start + j * 256) % QUADS * 4;
        if (ahead < left) quads[j] = load<4>(row_at(chunks, k, STRIDE, from[row + ahead]) + column);
    }
#pragma unroll
    for (int j = 0; j < BATCH; ++j) {
        const int ahead = (start + j * 256) / QUADS, column = (start + j * 256) % QUADS * 4;
        if (ahead < left) store(row_at(chunks, k, STRIDE, to[row + ahead]) + column, quads[j]);
    }
}
