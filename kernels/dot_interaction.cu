// What: out[b] = [dense[b] if CONCAT | X[b, r] . X[b, c], c < r (c <= r if SELF) | PADDING zeros],
//   X = [dense if DENSE, sparse], FEATURES rows of WIDTH a sample. Back: dX[b] = S[b] X[b], S the
//   symmetric matrix of the pairs' gradients; row 0 also gets the concatenated part. fp32 FMAs;
//   the sizes fix the order of every sum.
// Who does what: forward, a block copies the rows of SAMPLES samples to shared memory, CHUNK
//   columns at a time. The lower triangle of products is cut into tiles of TILE x TILE. SPLIT
//   neighbouring lanes take one tile of one sample, each every SPLIT-th piece of LANE columns; they
//   keep its sums in registers and add them up by shuffles. Products go to shared memory, over the
//   rows or, at PAIRS_STRIDE, behind them, and from there to `out` as whole lines.
//   Backward, a block spreads the pairs' gradients of SAMPLES samples to matrices S in shared
//   memory. A warp is GROUPS groups of lanes, each for its part of the rows of dX; a thread has
//   PER_THREAD columns. It walks down the rows of X, which the groups read in one request. TEAM
//   threads a group cover a sample's columns, in turns if they must. X comes from global memory, or
//   where STAGED through shared memory, where dX then takes its place.
//   With GATHERED the rows of `sparse` lie in tables: a block first looks up where, an address
//   each, in shared memory; then all goes on as if they lay side by side, with the same sums.
// Assumes: FEATURES at most 64; VECTOR divides WIDTH, and X and dX are aligned to 4 VECTOR bytes;
//   strides as ops/dot_interaction.py picks them, so that lanes meet different banks; of GATHERED
//   what row_memory.cuh does, and no padding among inverse[].
// Moves: forward 4 B (F D + columns) bytes, backward 4 B (2 F D + columns), none of them twice; of
//   GATHERED instead of 4 B (F - DENSE) D that it reads 8 B (F - DENSE) + U (8 + row of D).
// Tried: of one sample of F = 27, D = 128, warp instructions of PTX, shared wavefronts (conflicts
//   among them), registers and warps of a multiprocessor on sm_90:
//   forward
//     tiles of 7, 2 samples a block: 4739, 711 (1.5 %), 96, 20 warps; kept for two thirds more
//       warps and blocks half as large, whose loads and sums overlap
//     tiles of 9, 4 samples a block: 4316, 576 (1.0 %), 168, 12; for 18 warps it spills 320 bytes
//     tiles of 9, 2 samples a block: 4418, 586 (2.5 %), 168, 12
//     tiles of 6: 5461, 921 (1.2 %), 96, 20
//     tiles of 9, shared loads of 8 bytes: 5732, 582 (1.8 %); of 4 bytes: 8410, 583 (1.5 %)
//     samples a multiple of 32 banks apart: 4.0 % conflicts; 8 banks more: 2.5 %; 16 more, and
//       the tiles of a row counted from the diagonal: 1.5 %
//     D = 16, pairs over the rows: 20 % conflicts; behind them and 16 samples a block: 1.9 % with
//       PADDING = 1, where 368 columns begin and end at multiples of 16 banks, and 2.4 % without
//       it: where the output goes from row 0 to pairs. 30 other PAIRS_STRIDEs give
//       as much or up to 63 %, 8 other STRIDEs 2.4 % or 40 to 67 %, for tiles need STRIDE to be
//       8 or 24 modulo 32, pairs PAIRS_STRIDE 2 modulo 4;
//       F = 64, D = 16 has no room for that many: 6 %; F = 27, D = 3: 5 %
//     rows in chunks, bounds for 640 threads a multiprocessor: 16 to 56 bytes spilled by F = 27,
//       D = 512 on sm_100 and by F = 33, D = 260 or 512 on sm_80 and 90; for 512, kept: none
//     rows of D = 1025 ask for 21 % more sectors than they have bytes: each starts within one
//   backward
//     2 groups: 5587, 857 (0.1 %), 120, 16 warps; 1 group: 5068, 860, 221, 8; 4 groups: 5930,
//       965, 72, 28, with fewer bytes in flight
//     staged: 6394, 1397, 93, 20
//     9 rows loaded at once, as above; 5 rows: 6203, 857, 110, 16; 14 rows: 6261, 857, 134, 12
//     D = 16, 2 groups: 2206, 258, 93, 8, for want of shared memory; 4 groups: 2169, 296, 63, 16
//     not staged, rows of D = 130 ask for 22 % more sectors than they have bytes, those of D =
//       1025, too long to be staged, for 42 %, which the caches absorb
//     D = 16, PADDING = 1: 7 % more sectors than bytes, for rows of the gradient start within one
//     F = 64, D = 16: 5 % conflicts, most of them of dX written to its rows
//   GATHERED, B = 256, 3,131 rows: 8 and 2 % more instructions, 96 and 113 registers, 1.3 and 0.1 %
//     conflicts; sectors 12.1 MB in all, 18.7 MB where gather_rows comes first
#include "staged_rows.cuh"

namespace {

// Pairs before those of row r.
__device__ __forceinline__ int pairs_before(int r) { return r * (r - 1 + 2 * SELF) / 2; }

constexpr int PAIRS = FEATURES * (FEATURES - 1 + 2 * SELF) / 2;
constexpr int HEAD = CONCAT ? WIDTH : 0;
constexpr int COLUMNS = HEAD + PAIRS + PADDING;

}  // namespace

#ifdef TILE
constexpr bool WHOLE_ROWS = CHUNK == WIDTH;
constexpr bool IN_PLACE = PAIRS_STRIDE == 0;  // pairs come to lie behind row 0 of x
constexpr int TILES = (FEATURES + TILE - 1) / TILE * ((FEATURES + TILE - 1) / TILE + 1) / 2;
constexpr int PRODUCTS = (TILE * TILE + SPLIT - 1) / SPLIT;  // of a tile that a lane adds up

namespace {

// What a thread works at.
struct Share {
    uint32_t part;  // of a tile's columns
    int sample;
    int tile, i, j;  // the tile's number, row and column in the triangle of tiles
    int top, left;   // its first features; the last tile begins early enough to be full, and what
                     // it repeats is not stored
    __device__ __forceinline__ explicit Share(uint32_t thread)
        : part(thread % SPLIT), sample(thread / SPLIT % SAMPLES), tile(thread / SPLIT / SAMPLES) {
        const int number = min(tile, TILES - 1);
        i = 0;
        while ((i + 1) * (i + 2) / 2 <= number) ++i;
        j = i - (number - i * (i + 1) / 2);
        top = min(i * TILE, FEATURES - TILE), left = min(j * TILE, FEATURES - TILE);
    }
};

// Lanes swap halves of their sums until each has one in SPLIT, in whole: lane `part` those with the
// numbers part, part + SPLIT, ...
template <int STEP, int COUNT>
__device__ __forceinline__ void add_halves(float (&sums)[PRODUCTS * SPLIT], int part) {
    if constexpr (STEP > 0) {
        const bool upper = part & STEP;
#pragma unroll
        for (int n = 0; n < COUNT / 2; ++n) {
            const int low = n / STEP * 2 * STEP + n % STEP, high = low + STEP;
            const float other = __shfl_xor_sync(FULL, upper ? sums[low] : sums[high], STEP);
            sums[n] = (upper ? sums[high] : sums[low]) + other;
        }
        add_halves<STEP / 2, COUNT / 2>(sums, part);
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    dot_interaction_forward(const float* dense, const float* sparse, const uint64_t* chunks, int k,
                            int stride, const int64_t* rows, const int64_t* inverse,
                            const float* unseen, float* out, int64_t batch) {
    extern __shared__ __align__(16) float shared[];
    float* x = shared + SAMPLES * SOURCES;
    const int64_t first = static_cast<int64_t>(blockIdx.x) * SAMPLES;
    const int samples = static_cast<int>(min(static_cast<int64_t>(SAMPLES), batch - first));
    Share share(threadIdx.x);
    const float* mine = x + min(share.sample, samples - 1) * STRIDE;
    const float *upper = mine + share.top * CHUNK, *lower = mine + share.left * CHUNK;

#if GATHERED
    uint64_t* sources = reinterpret_cast<uint64_t*>(shared);
    find_rows(sources, dense + first * WIDTH, {chunks, k, stride, rows, inverse, unseen}, first,
              samples);
#endif
    float sums[PRODUCTS * SPLIT] = {};
    for (int start = 0; start < WIDTH; start += CHUNK) {
        if (start > 0) __syncthreads();
#if GATHERED
        stage_rows(x, sources, samples, start);
#else
        stage<DENSE, 0>(x, dense + first * WIDTH, samples, start);
        stage<FEATURES - DENSE, DENSE>(x, sparse + first * (FEATURES - DENSE) * WIDTH, samples,
                                       start);
#endif
        copies_done();
        const int width = min(CHUNK, WIDTH - start);
        if (CONCAT && CHUNK < WIDTH) {
            for (int d = threadIdx.x; d < width; d += THREADS)
                out[first * COLUMNS + start + d] = x[d];
        }
#pragma unroll 1
        for (int d = share.part * LANE; d < width; d += SPLIT * LANE) {
            Floats<LANE> above[TILE];
#pragma unroll
            for (int r = 0; r < TILE; ++r) above[r] = load<LANE>(upper + r * CHUNK + d);
#pragma unroll
            for (int c = 0; c < TILE; ++c) {
                const Floats<LANE> column = load<LANE>(lower + c * CHUNK + d);
#pragma unroll
                for (int r = 0; r < TILE; ++r) {
#pragma unroll
                    for (int n = 0; n < LANE; ++n)
                        sums[r * TILE + c] += above[r].at[n] * column.at[n];
                }
            }
        }
    }
    uint32_t thread;  // read again: what it says need not be kept in registers all the time
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    share = Share(thread);
    add_halves<SPLIT / 2, PRODUCTS * SPLIT>(sums, share.part);
    constexpr int KEPT = WHOLE_ROWS ? HEAD : 0;  // columns of the output that row 0 of x has
    constexpr int STEP = IN_PLACE ? STRIDE : PAIRS_STRIDE;
    float* pairs = x + (IN_PLACE ? KEPT : SAMPLES * STRIDE);
    if (IN_PLACE) __syncthreads();
    if (share.tile < TILES && share.sample < samples) {
        constexpr bool EVEN = FEATURES % TILE == 0;  // no tile was moved
#pragma unroll
        for (int n = 0; n < PRODUCTS; ++n) {
            const uint32_t product = n * SPLIT + share.part;
            const int r = share.top + int(product / TILE), c = share.left + int(product % TILE);
            if ((n + 1) * SPLIT > TILE * TILE && product >= TILE * TILE) continue;
            if (c < r + SELF && (EVEN || (r >= share.i * TILE && c >= share.j * TILE)))
                pairs[share.sample * STEP + pairs_before(r) + c] = sums[n];
        }
    }
    __syncthreads();
    constexpr int REST = KEPT + PAIRS + PADDING;
    float* to = out + first * COLUMNS + COLUMNS - REST;
    const uint32_t before = skew<1>(to), total = samples * REST;
#pragma unroll 4
    for (uint32_t q = threadIdx.x; q < total + before; q += THREADS) {
        const uint32_t p = q - before, at = p / NOT_0(REST), column = p % NOT_0(REST);
        if (p >= total) continue;
        const float* from = pairs + at * STEP + column - KEPT;
        if (!IN_PLACE && static_cast<int>(column) < KEPT) from = x + at * STRIDE + column;
        to[p] = PADDING == 0 || column < KEPT + PAIRS ? *from : 0.0f;
    }
}
#else
// Features of a group lie at multiples of GROUP_STRIDE in a row of s, the rows SPAN apart.
constexpr int ROWS = (FEATURES + GROUPS - 1) / GROUPS;
constexpr int GROUP_STRIDE = (ROWS + 3) / 4 * 4, SPAN = GROUPS * GROUP_STRIDE;
constexpr int UNITS = WARP / GROUPS;    // of a warp: threads with rows of their own
constexpr int PIECES = WIDTH / VECTOR;  // of a row
constexpr int ROUNDS = PER_THREAD / VECTOR;
constexpr bool WHOLE = PIECES % (TEAM * ROUNDS) == 0;
constexpr int BATCH = (FEATURES + (FEATURES + 8) / 9 - 1) / ((FEATURES + 8) / 9);  // loads at once

namespace {

// Gradients of the pairs, packed -> a symmetric matrix of each sample, zero where no feature is.
// Below the diagonal lanes read one row of the triangle, above it one column, whose triangular
// numbers fall into different banks; both at once would not.
__device__ __forceinline__ void spread(float* s, const float* grad, uint32_t samples) {
    constexpr int LANES = SPAN > 16 ? 32 : SPAN > 8 ? 16 : SPAN > 4 ? 8 : 4;
    for (int place = threadIdx.x % LANES; place < SPAN; place += LANES) {
        const bool real = place % GROUP_STRIDE < ROWS;
        const int column = real ? place / GROUP_STRIDE * ROWS + place % GROUP_STRIDE : FEATURES;
        const int above = pairs_before(min(column, FEATURES - 1));
#pragma unroll 4
        for (uint32_t p = threadIdx.x / LANES; p < samples * FEATURES; p += THREADS / LANES) {
            const int sample = p / FEATURES, row = p % FEATURES;
            const float* from = grad + sample * GRAD_STRIDE + HEAD;
            // Lanes without an element of their own repeat another's load: no branch, no conflict.
            const int low = max(pairs_before(row) + min(column, row - 1), 0);
            const int high = min(max(above, pairs_before(row + 1 - SELF)) + row, PAIRS - 1);
            float value = 0.0f;
            if (PAIRS > 0) {
                const float lower = from[low], upper = from[high];
                const bool is_upper = column >= row + 1 - SELF && column < FEATURES;
                value = column < row ? lower : is_upper ? upper : 0.0f;
            }
            if (SELF && column == row) value *= 2;
            s[sample * S_STRIDE + row * SPAN + place] = value;
        }
    }
}

// `store`, in one instruction: the compiler is seen to split some of those of 16 bytes.
template <int N>
__device__ __forceinline__ void store_global(float* to, const Floats<N>& x) {
    if constexpr (N == 4)
        __stcg(reinterpret_cast<float4*>(to), make_float4(x.at[0], x.at[1], x.at[2], x.at[3]));
    else
        store(to, x);
}

// N floats from an address that is a multiple of 16 bytes.
template <int N>
__device__ __forceinline__ void load_many(float (&to)[N], const float* from) {
#pragma unroll
    for (int n = 0; n < N / 4 * 4; n += 4) {
        const Floats<4> four = load<4>(from + n);
#pragma unroll
        for (int k = 0; k < 4; ++k) to[n + k] = four.at[k];
    }
    if (N % 4 >= 2) {
        const Floats<2> two = load<2>(from + N / 4 * 4);
        to[N / 4 * 4] = two.at[0], to[N / 4 * 4 + 1] = two.at[1];
    }
    if (N % 2) to[N - 1] = from[N - 1];
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    dot_interaction_backward(const float* grad, const float* dense, const float* sparse,
                             const uint64_t* chunks, int k, int stride, const int64_t* rows,
                             const int64_t* inverse, const float* unseen, float* ddense,
                             float* dsparse, int64_t batch) {
    extern __shared__ __align__(16) float shared[];
    float* s = shared + SAMPLES * SOURCES;
    float* g = s + SAMPLES * S_STRIDE;
    float* x = g + SAMPLES * GRAD_STRIDE;  // only where STAGED
    const int64_t first = static_cast<int64_t>(blockIdx.x) * SAMPLES;
    const int samples = static_cast<int>(min(static_cast<int64_t>(SAMPLES), batch - first));
    dense += first * DENSE * WIDTH, ddense += first * DENSE * WIDTH;
    sparse += first * (FEATURES - DENSE) * WIDTH, dsparse += first * (FEATURES - DENSE) * WIDTH;

    constexpr int USED = HEAD + PAIRS;
    const float* from = grad + first * COLUMNS;
    const uint32_t to = shared_address(g);
    const uint32_t before = skew<1>(from), total = samples * USED;
    for (uint32_t q = threadIdx.x; q < total + before; q += THREADS) {
        const uint32_t p = q - before, row = p / NOT_0(USED);
        if (p < total)
            copy_async<1>(to + 4 * (p + row * (GRAD_STRIDE - USED)), from + p + row * PADDING);
    }
#if GATHERED
    uint64_t* sources = reinterpret_cast<uint64_t*>(shared);
    find_rows(sources, dense, {chunks, k, stride, rows, inverse, unseen}, first, samples);
#endif
    if (STAGED) {
#if GATHERED
        stage_rows(x, sources, samples, 0);
#else
        stage<DENSE, 0>(x, dense, samples, 0);
        stage<FEATURES - DENSE, DENSE>(x, sparse, samples, 0);
#endif
    }
    copies_done();
    spread(s, g, samples);
    __syncthreads();

    const int unit = threadIdx.x / WARP * UNITS + threadIdx.x % UNITS;
    const int group = threadIdx.x % WARP / UNITS;
    const int sample = unit / TEAM;
    // Row f of this sample and of its gradient; row 0 lies elsewhere where it is `dense`.
    const int64_t shift = (static_cast<int64_t>(sample) * (FEATURES - DENSE) - DENSE) * WIDTH;
    const float* features = STAGED ? x + sample * STRIDE : sparse + shift;
    float* drows = STAGED ? x + sample * STRIDE : dsparse + shift;
    const bool apart = DENSE && !STAGED;
    const float* row_0 = apart ? dense + sample * WIDTH : features;
    float* drow_0 = apart ? ddense + sample * WIDTH : drows;
    for (int start = 0; start < PIECES; start += TEAM * ROUNDS) {
        const int piece = start + unit % TEAM;
        const bool active = sample < samples && (WHOLE || piece < PIECES);
        float sums[ROWS][PER_THREAD] = {};
        if (active) {
            if (CONCAT && group == 0) {
#pragma unroll
                for (int n = 0; n < ROUNDS; ++n) {
                    const int at = piece + n * TEAM;
                    if (!WHOLE && at >= PIECES) continue;
                    const Floats<VECTOR> direct =
                        load<VECTOR>(g + sample * GRAD_STRIDE + at * VECTOR);
#pragma unroll
                    for (int k = 0; k < VECTOR; ++k) sums[0][n * VECTOR + k] = direct.at[k];
                }
            }
            const float* weights = s + sample * S_STRIDE + group * GROUP_STRIDE;
#pragma unroll 1
            for (int c = 0; c < FEATURES; c += BATCH) {
                Floats<VECTOR> loaded[BATCH][ROUNDS];
#pragma unroll
                for (int b = 0; b < BATCH; ++b) {
                    const float* row = features + (c + b) * WIDTH;
                    if (apart && b == 0 && c == 0) row = row_0;
#pragma unroll
                    for (int n = 0; n < ROUNDS; ++n) {
                        const int at = piece + n * TEAM;
                        loaded[b][n] = {};
                        if ((FEATURES % BATCH != 0 && c + b >= FEATURES) ||
                            (!WHOLE && at >= PIECES))
                            continue;
#if GATHERED
                        if (!STAGED) {
                            const uint64_t source = sources[sample * FEATURES + c + b];
                            loaded[b][n] = columns_at<VECTOR>(source, at * VECTOR);
                            continue;
                        }
#endif
                        loaded[b][n] = load<VECTOR>(row + at * VECTOR);
                    }
                }
#pragma unroll
                for (int b = 0; b < BATCH; ++b) {
                    if (FEATURES % BATCH != 0 && c + b >= FEATURES) break;
                    float weight[ROWS];
                    load_many(weight, weights + (c + b) * SPAN);
#pragma unroll
                    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
                        for (int d = 0; d < PER_THREAD; ++d)
                            sums[r][d] += weight[r] * loaded[b][d / VECTOR].at[d % VECTOR];
                    }
                }
            }
        }
        if (STAGED) __syncthreads();  // x is about to become its gradient
        if (active) {
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const int f = group * ROWS + r;
                if ((GROUPS - 1) * ROWS + r >= FEATURES && f >= FEATURES) continue;
                float* row = drows + f * WIDTH;
                if (apart && r == 0 && group == 0) row = drow_0;
#pragma unroll
                for (int n = 0; n < ROUNDS; ++n) {
                    const int at = piece + n * TEAM;
                    if (!WHOLE && at >= PIECES) continue;
                    Floats<VECTOR> result;
#pragma unroll
                    for (int k = 0; k < VECTOR; ++k) result.at[k] = sums[r][n * VECTOR + k];
                    if (STAGED)
                        store(row + at * VECTOR, result);
                    else
                        store_global(row + at * VECTOR, result);
                }
            }
        }
        __syncwarp();  // groups share what they load
    }
    if (STAGED) {
        __syncthreads();
        unstage<DENSE, 0>(ddense, x, samples);
        unstage<FEATURES - DENSE, DENSE>(dsparse, x, samples);
    }
}
#endif
