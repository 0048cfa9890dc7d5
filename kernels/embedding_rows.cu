// What: gather_rows: out[i] = vector of row rows[inverse[i]], or of `unseen` where that is -1 - j;
//   zeros where inverse[i] is -1. write_rows: vectors and states to N consecutive rows, zeros to
//   their padding. Vectors of the 16-bit formats of VALUE are widened by the one, rounded at random
//   by the other; the one rounds them to the nearest if `out` is of 16 bits. Those of INT8 are
//   decoded by the one; the other gets them encoded, as if they were of float32.
// Who does what: gather: a warp writes TILE consecutive vectors. Lane r looks up the address of
//   vector r (inverse -> rows -> chunk), once a vector; then lanes move the tile's pieces of
//   VECTOR floats, consecutive lanes consecutive pieces of `out`, BATCH loads of a lane in flight,
//   and get the address from lane r by a shuffle. So no lane idles, whatever DIM is. Write: a
//   thread fills 4 pieces of 4 words, consecutive threads consecutive ones; of 16 bits these are
//   the 8 columns whose chances are drawn together.
// Assumes: VECTOR divides DIM; unseen, out and vectors are aligned to VECTOR floats; STATE_VECTOR
//   divides STATE and the words of a vector, states are aligned to it; chunks are aligned to 16
//   bytes, a stride is a multiple of 4 words; rows[] are rows that exist.
// Moves: gather 8 N + 8 U + 4 U DIM read (each row once, then from the caches; of INT8 U (DIM + 4)
//   of rows), 4 N DIM written, of 16 bits half of it;
//   write 4 N (DIM + STATE) read, or 4 N DIM and one state, 4 N STRIDE written.
// Tried: 6,912 vectors of DIM 128 from 1,500 rows: bytes 1.003 of the ideal for every TILE. With
//   4, 8, 16, 32 a warp spends 37, 30, 26, 24 instructions a vector, and waits for the look-up's
//   three loads once in 2, 4, 8, 16 KB; but the blocks are 216, 108, 54, 27. TILE is 16 there, two
//   batches of a lane: 74 registers on sm_90, so 768 threads and 98 KB of loads in flight an SM.
//   DIM 16 with a TILE of 8 instead of 32 takes 2.4 times the instructions and 1.8 times the
//   requests. Of 16 bits a BATCH of 8, too, spills on sm_80 where a lane moves 2 columns at a time.
//   INT8: to ask of each number whether it is below 2^-126, not of the row's step alone, 71
//   instructions a vector of DIM 128 in place of 49, and pool_rows no longer waits for memory but
//   for these. A BATCH of 8 takes 54 registers, not 38, for 128 KB of loads in flight, not 96.
//   Write: quotient and remainder by the quads of a row for each of the 4 pieces, of 64
//   bits: 164 instructions of sm_90 and 32 registers with 32 quads, 214 and 39 with 33; dividing
//   once and going on in 32 bits from there, 137 and 28, 202 and 38.
#include "halves.cuh"
#include "row_memory.cuh"

#ifdef STRIDE
namespace {

constexpr int WORDS = vector_words(DIM);

// Words `column` to column + 3 of a row, as far as they are of its vector number i; else zeros.
__device__ __forceinline__ Floats<4> vector_quad(const float* vector, int column,
                                                 const Rounding& by, int64_t i) {
    constexpr int COLUMNS = 16 / sizeof(Value);  // in four words; of 16 bits those of one Philox
    const int first = column / 4 * COLUMNS;
    Floats<COLUMNS> values = {};
    if (first >= DIM) return {};
#pragma unroll
    for (int m = 0; m < COLUMNS; m += VECTOR) {
        if (first + m >= DIM) break;
        const Floats<VECTOR> piece = load<VECTOR>(vector + first + m);
#pragma unroll
        for (int l = 0; l < VECTOR; ++l) values.at[m + l] = piece.at[l];
    }
#if VALUE == FLOAT32
    return values;
#else
    const Chances<8> r = chances<8>(by.ids[i], by.tables[i], by.seed, by.step, first);
    Floats<4> quad;
#pragma unroll
    for (int m = 0; m < 4; ++m) {
        const uint32_t low = rounded(values.at[2 * m], r.at[2 * m]).bits;
        const uint32_t high = rounded(values.at[2 * m + 1], r.at[2 * m + 1]).bits;
        quad.at[m] = __uint_as_float(low | high << 16);
    }
    return quad;
#endif
}

}  // namespace

extern "C" __global__ void __launch_bounds__(256)
    write_rows(const uint64_t* chunks, int k, int64_t first_row, const float* vectors,
               const float* states, int64_t states_stride, const uint32_t* tables,
               const int64_t* ids, uint64_t seed, uint32_t step, int64_t n) {
    constexpr int QUADS = STRIDE / 4, BATCH = 4;
    const int64_t first = int64_t(blockIdx.x) * (256 * BATCH) + threadIdx.x;
    const int64_t row = first / QUADS;
    const unsigned start = static_cast<unsigned>(first - row * QUADS);
    const int left = static_cast<int>(n - row < 256 * BATCH ? n - row : 256 * BATCH);
    const float* vector = vectors + row * DIM;
    const float* state = states + row * states_stride;
    Floats<4> quads[BATCH];
#pragma unroll
    for (int j = 0; j < BATCH; ++j) {
        const int ahead = (start + j * 256) / QUADS, column = (start + j * 256) % QUADS * 4;
        quads[j] = {};
        if (ahead >= left) continue;
        quads[j] =
            vector_quad(vector + ahead * DIM, column, {tables, ids, seed, step}, row + ahead);
#pragma unroll
        for (int m = 0; m < 4; m += STATE_VECTOR) {
            const int at = column + m - WORDS;
            if (at < 0 || at >= STATE) continue;
            const Floats<STATE_VECTOR> piece =
                load<STATE_VECTOR>(state + ahead * states_stride + at);
#pragma unroll
            for (int l = 0; l < STATE_VECTOR; ++l) quads[j].at[m + l] = piece.at[l];
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
namespace {

__device__ alignas(16) float ZEROS[DIM];  // padding's vector, so that no piece asks what it is of

}  // namespace

extern "C" __global__ void __launch_bounds__(256)
    gather_rows(const uint64_t* chunks, int k, int stride, const int64_t* rows,
                const int64_t* inverse, const float* unseen, value_t* out, int64_t n) {
    constexpr int PIECES = DIM / VECTOR;
    constexpr int STEPS = (TILE * PIECES + WARP - 1) / WARP, MOST = VALUE == FLOAT32 ? 8 : 4;
    constexpr int BATCH = STEPS < MOST ? STEPS : MOST;
    const int lane = threadIdx.x % WARP;
    const int64_t first = thread_number() / WARP * TILE;
    if (first >= n) return;
    const int tile = n - first < TILE ? static_cast<int>(n - first) : TILE;
    const ValueVectors vectors{chunks, k, stride, rows, inverse, unseen};
    uint64_t source = lane < tile ? vectors.address<DIM>(first + lane) : 0;
    if (!source) source = reinterpret_cast<uint64_t>(ZEROS) + (VALUE != FLOAT32);
    value_t* to = out + first * DIM;
    for (int start = lane; start - lane < tile * PIECES; start += BATCH * WARP) {
        Floats<VECTOR> pieces[BATCH];
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
            const int piece = start + j * WARP;
            const uint64_t address = __shfl_sync(FULL, source, piece / PIECES);
            if (piece >= tile * PIECES) continue;
            pieces[j] = columns_at<VECTOR>(address, piece % PIECES * VECTOR);
        }
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
            const int piece = start + j * WARP;
            if (piece < tile * PIECES) store(to + int64_t(piece) * VECTOR, pieces[j]);
        }
    }
}
#endif
