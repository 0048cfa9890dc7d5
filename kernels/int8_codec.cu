// What: encode, of each row: s = max |x|, NaN unless all x are finite; q = round((x / s) * 127),
//   halves away from zero. decode: x = q * (s / 127). See cupyrec/ops/int8_codec.py.
// Who does what: encode: LANES lanes have ROWS rows, of each up to BATCH pieces of VECTOR columns
//   a lane at a time; pieces stay in registers from the maximum to the codes, but of rows with
//   more than BATCH a lane, which are read again. decode: a warp has TILE consecutive rows; lane r
//   divides the scales of rows r and r + 32, once a row; then lanes take the tile's pieces,
//   consecutive lanes consecutive ones, BATCH loads of a lane in flight, and get the step from the
//   row's lane by a shuffle.
// Assumes: VECTOR divides DIM; x is aligned to VECTOR floats, codes to VECTOR bytes; LANES is a
//   power of two, TILE at most 64.
// Moves: encode 4 N DIM bytes read, N (DIM + 4) written; decode the reverse.
// Tried: 6,912 rows of DIM 128: bytes 1.00 of the ideal both ways, sectors 1.04 and 1.00.
//   __fdiv_rn for each element makes encode 144 instructions of sm_90 longer, with a branch for
//   each. To round by comparing what truncation left to a half: 10 % more instructions. ROWS 1, 2,
//   4, 8: 26, 29, 39, 62 registers, and 32, 64, 96, 128 KB of loads in flight an SM. decode, DIM
//   128: a TILE of 4, 8, 16, 32: 63, 57, 55, 53 instructions a row. Its loads are VECTOR codes, 4
//   bytes, so that what is in flight is short of registers: BATCH 8, 12, 16 took 59, 64, 83 on
//   sm_90, 36, 52, 34 KB an SM; bounds for 5 blocks spill. To divide the scales before the loads of
//   codes: 32 KB with BATCH 8. DIM 16 has 4 pieces a row: with a TILE of 32, 4 loads a lane and 30
//   KB, with 64, 8 and 40 KB, at 64 registers.
#include "int8_codec.cuh"

namespace {

constexpr int PIECES = DIM / VECTOR;

struct alignas(VECTOR) Codes {
    int8_t at[VECTOR];
};

}  // namespace

#ifdef LANES
namespace {

constexpr int HELD = (PIECES + LANES - 1) / LANES;  // pieces of a row a lane
constexpr int BATCH = HELD < 8 ? HELD : 8, GROUPS = WARP / LANES;

}  // namespace

extern "C" __global__ void __launch_bounds__(256)
    int8_encode(const float* x, int8_t* codes, float* scales, int64_t n) {
    const int lane = threadIdx.x % WARP, column = lane % LANES * VECTOR;
    const int64_t first = thread_number() / WARP * (GROUPS * ROWS) + lane / LANES;
    Floats<VECTOR> pieces[ROWS][BATCH];
    const auto read = [&](int start) {
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
#pragma unroll
            for (int j = 0; j < BATCH; ++j) {
                const int64_t row = first + i * GROUPS;
                const int at = column + (start + j) * (LANES * VECTOR);
                pieces[i][j] = {};
                if (row < n && at < DIM) pieces[i][j] = load<VECTOR>(x + row * DIM + at);
            }
        }
    };
    uint32_t most[ROWS] = {};
    for (int start = 0; start < HELD; start += BATCH) {
        read(start);
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
#pragma unroll
            for (int j = 0; j < BATCH; ++j) {
#pragma unroll
                for (int l = 0; l < VECTOR; ++l) {
                    most[i] = max(most[i], magnitude(pieces[i][j].at[l]));
                }
            }
        }
    }
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        most[i] = scale_bits<LANES>(most[i]);
        const int64_t row = first + i * GROUPS;
        if (column == 0 && row < n) scales[row] = __uint_as_float(most[i]);
    }
    for (int start = 0; start < HELD; start += BATCH) {
        if (HELD > BATCH) read(start);
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const bool some = most[i] > 0 && most[i] < INFINITE;
            const Divisor divisor(most[i]);
#pragma unroll
            for (int j = 0; j < BATCH; ++j) {
                const int64_t row = first + i * GROUPS;
                const int at = column + (start + j) * (LANES * VECTOR);
                Codes made;
#pragma unroll
                for (int l = 0; l < VECTOR; ++l) {
                    made.at[l] =
                        static_cast<int8_t>(some ? code_of(pieces[i][j].at[l], divisor) : 0);
                }
                if (row < n && at < DIM) *reinterpret_cast<Codes*>(codes + row * DIM + at) = made;
            }
        }
    }
}
#else
extern "C" __global__ void __launch_bounds__(256)
    int8_decode(const int8_t* codes, const float* scales, float* x, int64_t n) {
    constexpr int STEPS = (TILE * PIECES + WARP - 1) / WARP, BATCH = STEPS < 8 ? STEPS : 8;
    constexpr int SCALES = (TILE + WARP - 1) / WARP;
    static_assert(SCALES <= 2, "a lane has two scales at most");
    const int lane = threadIdx.x % WARP;
    const int64_t first = thread_number() / WARP * TILE;
    if (first >= n) return;
    const int tile = n - first < TILE ? static_cast<int>(n - first) : TILE;
    float steps[SCALES];
#pragma unroll
    for (int r = 0; r < SCALES; ++r) {
        const int row = lane + r * WARP;
        steps[r] = row < tile ? scales[first + row] : 0.0f;
    }
    const int8_t* from = codes + first * DIM;
    float* to = x + first * DIM;
    for (int start = lane; start - lane < tile * PIECES; start += BATCH * WARP) {
        Codes pieces[BATCH];
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
            const int piece = start + j * WARP;
            pieces[j] = {};
            if (piece < tile * PIECES) {
                pieces[j] = *reinterpret_cast<const Codes*>(from + int64_t(piece) * VECTOR);
            }
        }
        if (start == lane) {  // here, so that scales and codes are on their way together
#pragma unroll
            for (int r = 0; r < SCALES; ++r) steps[r] = step_of(steps[r]);
        }
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
            const int piece = start + j * WARP, row = piece / PIECES;
            float step = __shfl_sync(FULL, steps[0], row % WARP);
            if (SCALES == 2) {
                const float other = __shfl_sync(FULL, steps[SCALES - 1], row % WARP);
                if (row >= WARP) step = other;
            }
            Floats<VECTOR> values;
#pragma unroll
            for (int l = 0; l < VECTOR; ++l) {
                values.at[l] = decoded(pieces[j].at[l], step);
            }
            if (piece < tile * PIECES) store(to + int64_t(piece) * VECTOR, values);
        }
    }
}
#endif
