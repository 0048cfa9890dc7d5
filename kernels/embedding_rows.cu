// What: gather_rows: out[i] = vector of row rows[inverse[i]], or of `unseen` where that is -1 - j.
//   write_rows: values to N consecutive rows, zeros to their padding.
// Who does what: gather: a warp writes TILE consecutive vectors. Lane r looks up the address of
//   vector r (inverse -> rows -> chunk), once a vector; then lanes move the tile's pieces of
//   VECTOR floats, consecutive lanes consecutive pieces of `out`, BATCH loads of a lane in flight,
//   and get the address from lane r by a shuffle. So no lane idles, whatever DIM is. Write: a
//   thread fills 4 pieces of 4 floats, consecutive threads consecutive ones.
// Assumes: VECTOR divides DIM; unseen, out and values are aligned to VECTOR floats; chunks are
//   aligned to 16 bytes, a stride is a multiple of 4 floats; rows[] are rows that exist.
// Moves: gather 8 N + 8 U + 4 U DIM read (each row once, then from the caches), 4 N DIM written;
//   write 4 N DIM read, 4 N STRIDE written.
// Tried: 6,912 vectors of DIM 128 from 1,500 rows: bytes 1.003 of the ideal for every TILE. With
//   4, 8, 16, 32 a warp spends 37, 30, 26, 24 instructions a vector, and waits for the look-up's
//   three loads once in 2, 4, 8, 16 KB; but the blocks are 216, 108, 54, 27. TILE is 16 there, two
//   batches of a lane: 74 registers on sm_90, so 768 threads and 98 KB of loads in flight an SM.
//   DIM 16 with a TILE of 8 instead of 32 takes 2.4 times the instructions and 1.8 times the
//   requests. Write: quotient and remainder by the quads of a row for each of the 4 pieces, of 64
//   bits: 164 instructions of sm_90 and 32 registers with 32 quads, 214 and 39 with 33; dividing
//   once and going on in 32 bits from there, 137 and 28, 202 and 38.
#include "row_memory.cuh"

#ifdef STRIDE
extern "C" __global__ void __launch_bounds__(256)
    write_rows(const uint64_t* chunks, int k, int64_t first_row, const float* values, int64_t n) {
    constexpr int QUADS = STRIDE / 4, BATCH = 4;
    const int64_t first = int64_t(blockIdx.x) * (256 * BATCH) + threadIdx.x;
    const int64_t row = first / QUADS;
    const unsigned start = static_cast<unsigned>(first - row * QUADS);
    const int left = static_cast<int>(n - row < 256 * BATCH ? n - row : 256 * BATCH);
    const float* from = values + row * DIM;
    Floats<4> quads[BATCH];
#pragma unroll
    for (int j = 0; j < BATCH; ++j) {
        const int ahead = (start + j * 256) / QUADS, column = (start + j * 256) % QUADS * 4;
#pragma unroll
        for (int m = 0; m < 4; m += VECTOR) {
            Floats<VECTOR> piece = {};
            if (ahead < left && column + m < DIM) {
                piece = load<VECTOR>(from + ahead * DIM + column + m);
            }
#pragma unroll
            for (int l = 0; l < VECTOR; ++l) quads[j].at[m + l] = piece.at[l];
        }
    }
#pragma unroll
    for (int j = 0; j < BATCH; ++j) {
        const int ahead = (start + j * 256) / QUADS, column = (start + j * 256) % QUADS * 4;
        if (ahead >= left) continue;
        store(row_at(chunks, k, STRIDE, first_row + row + ahead) + column, quads[j]);
    }
}
#else
extern "C" __global__ void __launch_bounds__(256)
    gather_rows(const uint64_t* chunks, int k, int stride, const int64_t* rows,
                const int64_t* inverse, const float* unseen, float* out, int64_t n) {
    constexpr int PIECES = DIM / VECTOR;
    constexpr int STEPS = (TILE * PIECES + WARP - 1) / WARP, BATCH = STEPS < 8 ? STEPS : 8;
    const int lane = threadIdx.x % WARP;
    const int64_t first = thread_number() / WARP * TILE;
    if (first >= n) return;
    const int tile = n - first < TILE ? static_cast<int>(n - first) : TILE;
    const float* source = nullptr;
    if (lane < tile) {
        const int64_t row = rows[inverse[first + lane]];
        source = row >= 0 ? row_at(chunks, k, stride, row) : unseen + (-1 - row) * DIM;
    }
    float* to = out + first * DIM;
    for (int start = lane; start - lane < tile * PIECES; start += BATCH * WARP) {
        Floats<VECTOR> pieces[BATCH];
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
            const int piece = start + j * WARP;
            const uint64_t address =
                __shfl_sync(FULL, reinterpret_cast<uint64_t>(source), piece / PIECES);
            const float* from = reinterpret_cast<const float*>(address);
            if (piece < tile * PIECES) pieces[j] = load<VECTOR>(from + piece % PIECES * VECTOR);
        }
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
            const int piece = start + j * WARP;
            if (piece < tile * PIECES) store(to + int64_t(piece) * VECTOR, pieces[j]);
        }
    }
}
#endif
