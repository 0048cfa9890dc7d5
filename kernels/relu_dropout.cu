// What: y = max(x + bias, 0) * keep * scale and the bit mask of y > 0; dx = dy * live * scale.
//   keep of (sample, column): word column % 4 of Philox(column / 4, sample, step, layer) >=
//   threshold. Bit n % 32 of word n / 32 of a mask row is column n; rows are padded to 128 bits.
// Who does what: a warp takes ROWS rows of one group of 128 columns, all loads before the first
//   use. With VECTOR 4 lane l holds columns 4 l ... 4 l + 3, whose live bits eight lanes put
//   together; with VECTOR 1 column 32 j + l in element j, and a ballot is a mask word.
// Assumes: value_t is float, or uint16_t for the bits of float16, of bfloat16 with BRAIN: these
//   are widened, and rounded once. VECTOR is 4 only where it divides N and x, y, bias (dy, dx) are
//   aligned to 4 numbers. y may be x, dx may be dy. Where `step_at` is given it has the step: a
//   launch that a graph repeats has the other arguments of its first time.
// Moves: of numbers of S bytes: forward S B N + S N read, S B N + B N / 8 written; backward S B N +
//   B N / 8 read, S B N written.
// Tried: ROWS, at B = N = 256, rate 0.5, VECTOR 4: sectors requested over ideal bytes, and warp
//   instructions a row of 128 columns, forward and backward.
//     1: 1.51, 284 and 1.02, 111      4: 1.15, 259 and 1.02, 72: taken
//     2: 1.26, 244 and 1.02, 84       8: 1.10, 258 and 1.04, 66, with 60 registers for 47
//   The bias, read once in ROWS rows, makes the difference; distinct bytes are ideal in all. With 4
//   a thread has 64 bytes in flight, an SM at least 64 KB. For sm_90 that is 196 and 76 machine
//   instructions a row, most of the 196 Philox: 49 cycles of an SM, whose share of 3.35 TB/s needs
//   72 for the row's bytes. VECTOR 1 costs 325 and 97, and 1.46 and 1.23 at N = 479 (rows off).
#include "halves.cuh"
#include "philox.cuh"

namespace {

constexpr int GROUP = 128;  // columns of a warp: 16 bytes of mask
constexpr int ELEMENTS = GROUP / WARP;
using Elements = Numbers<value_t, ELEMENTS>;

// The work of one warp: rows [row, row + ROWS) of 128 columns.
struct Tile {
    int64_t row, columns;
    int first, lane;  // column

    __device__ __forceinline__ explicit Tile(int64_t n) : columns(n), lane(threadIdx.x % WARP) {
        const uint32_t groups = static_cast<uint32_t>((n + GROUP - 1) / GROUP);
        const int64_t warps = int64_t(blockIdx.x / groups) * (blockDim.x / WARP);
        row = (warps + threadIdx.x / WARP) * ROWS;
        first = static_cast<int>(blockIdx.x % groups) * GROUP;
    }
    // Column of this lane's element j.
    __device__ __forceinline__ int column(int j) const {
        return first + (VECTOR == 4 ? 4 * lane + j : WARP * j + lane);
    }
    // This lane's elements of the row that begins at `from`; 0 beyond its end.
    __device__ __forceinline__ Elements load(const value_t* from) const {
        Elements values = {};
        if constexpr (VECTOR == 4) {
            if (column(0) < columns) values = *reinterpret_cast<const Elements*>(from + column(0));
        } else {
#pragma unroll
            for (int j = 0; j < ELEMENTS; ++j)
                if (column(j) < columns) values.at[j] = from[column(j)];
        }
        return values;
    }
    __device__ __forceinline__ void store(value_t* to, const Floats<ELEMENTS>& values) const {
        if constexpr (VECTOR == 4) {
            if (column(0) < columns) ::store<ELEMENTS>(to + column(0), values);
        } else {
#pragma unroll
            for (int j = 0; j < ELEMENTS; ++j)
                if (column(j) < columns) ::store<1>(to + column(j), {values.at[j]});
        }
    }
    // All ROWS rows.
    __device__ __forceinline__ void load(const value_t* x, int64_t b,
                                         Elements (&values)[ROWS]) const {
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            values[i] = {};
            if (row + i < b) values[i] = load(x + (row + i) * columns);
        }
    }
    // Word of the mask that this lane reads or writes: word l / 8 of row l % 8; -1 for none.
    __device__ __forceinline__ int64_t mask_word(int64_t b) const {
        const int64_t of_row = row + lane % 8, words = (columns + GROUP - 1) / GROUP * ELEMENTS;
        return lane % 8 < ROWS && of_row < b ? of_row * words + first / 32 + lane / 8 : -1;
    }
};

// The word of eight lanes' four bits each, in all of them.
__device__ __forceinline__ uint32_t joined(uint32_t bits, int lane) {
    uint32_t word = bits << (4 * (lane % 8));
#pragma unroll
    for (int apart = 1; apart < 8; apart *= 2) word |= __shfl_xor_sync(FULL, word, apart);
    return word;
}

// Whether this lane's element j is kept: its word is above the last that drops a unit.
__device__ __forceinline__ void draw(const Tile& tile, uint32_t last_dropped, uint64_t seed,
                                     uint32_t step, uint32_t layer, uint32_t sample,
                                     bool (&keep)[ELEMENTS]) {
    const Words random = philox4x32(tile.first / 4 + tile.lane, sample, step, layer, seed);
    if constexpr (VECTOR == 4) {
#pragma unroll
        for (int j = 0; j < ELEMENTS; ++j) keep[j] = random.at[j] > last_dropped;
    } else {
        // The lane drew for columns 4 l ... 4 l + 3, but holds columns 32 j + l.
        uint32_t bits = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) bits |= static_cast<uint32_t>(random.at[j] > last_dropped) << j;
        const uint32_t word = joined(bits, tile.lane);
#pragma unroll
        for (int j = 0; j < ELEMENTS; ++j)
            keep[j] = __shfl_sync(FULL, word, 8 * j) >> tile.lane & 1;
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(256)
    relu_dropout(const value_t* x, const value_t* bias, value_t* y, uint32_t* mask, float scale,
                 uint64_t threshold, uint64_t seed, uint32_t step, uint32_t layer,
                 int64_t first_sample, int64_t b, int64_t n, const uint32_t* step_at) {
    const Tile tile(n);
    if (tile.row >= b) return;
    if (step_at != nullptr) step = *step_at;
    Elements values[ROWS];
    tile.load(x, b, values);
    const Elements added = tile.load(bias);
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const int64_t row = tile.row + i;
        uint32_t live = 0;
        bool keep[ELEMENTS] = {true, true, true, true};
        Floats<ELEMENTS> out;
        if (threshold > 0)
            draw(tile, static_cast<uint32_t>(threshold - 1), seed, step, layer,
                 static_cast<uint32_t>(first_sample + row), keep);
#pragma unroll
        for (int j = 0; j < ELEMENTS; ++j) {
            float v = __fadd_rn(widened(values[i].at[j]), widened(added.at[j]));
            v = v <= 0.0f ? 0.0f : v;  // NaN stays NaN
            v = keep[j] ? __fmul_rn(v, scale) : 0.0f;
            out.at[j] = v;
            live |= static_cast<uint32_t>(v > 0.0f) << j;  // beyond the end v is 0
        }
        if (row < b) tile.store(y + row * n, out);
        if constexpr (VECTOR == 4) {
            const uint32_t joint = joined(live, tile.lane);
            if (tile.lane % 8 == i) word = joint;
        } else {
#pragma unroll
            for (int j = 0; j < ELEMENTS; ++j) {
                const uint32_t ballot = __ballot_sync(FULL, live >> j & 1);
                if (tile.lane == 8 * j + i) word = ballot;
            }
        }
    }
    const int64_t at = tile.mask_word(b);
    if (at >= 0) mask[at] = word;
}

extern "C" __global__ void __launch_bounds__(256)
    relu_dropout_backward(const value_t* dy, const uint32_t* mask, value_t* dx, float scale,
                          int64_t b, int64_t n) {
    const Tile tile(n);
    if (tile.row >= b) return;
    Elements values[ROWS];
    tile.load(dy, b, values);
    const int64_t at = tile.mask_word(b);
    // cublasLt says nothing of words beyond the last column.
    const uint32_t own = at >= 0 && tile.first + tile.lane / 8 * 32 < n ? mask[at] : 0;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        uint32_t word = __shfl_sync(FULL, own, tile.lane / 8 * 8 + i);
        Floats<ELEMENTS> out;
#pragma unroll
        for (int j = 0; j < ELEMENTS; ++j) {
            if constexpr (VECTOR == 1) word = __shfl_sync(FULL, own, 8 * j + i);
            const int bit = VECTOR == 4 ? 4 * (tile.lane % 8) + j : tile.lane;
            out.at[j] = word >> bit & 1 ? __fmul_rn(widened(values[i].at[j]), scale) : 0.0f;
        }
        if (tile.row + i < b) tile.store(dx + (tile.row + i) * n, out);
    }
}
