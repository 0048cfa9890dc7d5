// What: dot_interaction.cu in float16, or bfloat16 with the macro BRAIN, on tensor cores:
//   out[b] = [dense[b] if CONCAT | X[b, r] . X[b, c], c < r (c <= r if SELF) | PADDING zeros],
//   X = [dense if DENSE, sparse], FEATURES rows of WIDTH a sample. Back: dX[b] = S[b] X[b], S the
//   symmetric matrix of the pairs' gradients, twice those of self pairs; row 0 also gets the
//   concatenated part. Sums are float32, rounded once.
// Who does what: a warp has a sample of its own and waits for no other. It copies CHUNK columns of
//   all rows to shared memory, in pieces of 16 bytes, and multiplies tiles of 16 x 16 x 8.
//   Forward, a tile of rows as the left factor is at once two tiles of columns as the right one, so
//   that each number is read once; tiles above the diagonal are left out. The products go to S in
//   shared memory and from there to `out` as whole sectors.
//   Backward, S in shared memory has its lower triangle alone: a tile above the diagonal is one
//   below it, transposed on the way, and one on it is both at once. All of S is in registers while
//   the warp walks along the columns; dX takes the place of those it has read.
//   With GATHERED the rows of `sparse` lie in tables, in the format VALUE or as floats: a warp
//   first looks up where, an address each, in shared memory; then it rounds them on their way
//   there.
// Assumes: FEATURES at most 64; VECTOR divides WIDTH, and X and dX are aligned to 2 VECTOR bytes;
//   16 divides CHUNK; S_STRIDE is an odd multiple of 8, so that 8 rows of a tile lie in other banks
//   each. A self pair's gradient beyond 32752 is infinite in float16 once doubled.
// Moves: forward 2 B (F D + columns) bytes, backward 2 B (2 F D + columns), none of them twice; of
//   GATHERED instead of 2 B (F - DENSE) D that it reads 8 B (F - DENSE) + U (8 + row of D).
// Tried: of one sample of F = 27, D = 128, float16, PADDING = 1: warp instructions of PTX, shared
//   wavefronts (conflicts among them), registers and warps of a multiprocessor on sm_90:
//   forward: 1140, 148 (1.4 %), 46, 32; 48 mma. Conflicts are lanes that read pairs of three rows
//   backward: 2664, 324 (0.6 %), 62, 20; 64 mma
//   forward for one block a multiprocessor: 65, 28 warps; backward for any number: 48, 20, but
//     F = 33, D = 1025 spills 16 bytes on sm_80
//   8 warps a block: 16 warps backward; 2: 30 forward
//   S_STRIDE of 88 and not 40: 16 warps backward, 0.3 % conflicts there, as many forward
//   F = 64, D = 256: 7.5 % conflicts forward, 2.8 % backward, 12 and 8 warps; by an S_STRIDE of
//     72 8.9 %, 4.1 %, 16 and 8, and a third more instructions: three chunks of 96 columns are 288
//   PADDING = 0, 479 columns: rows of `out` and its gradient start within a sector: 6 % more
//     sectors than bytes forward, 3 % backward; 2.7 and 1.0 % conflicts
//   D = 16: 9.8 % conflicts forward, 4.7 % backward: two thirds of the wavefronts are gone, and
//     those of the pairs are left
//   GATHERED, B = 256, 3,131 rows of floats: 64 registers forward, 1.0 and 0.5 % conflicts; sectors
//     9.7 MB in all, 11.1 MB where gather_rows comes first. By 8 columns a lane, stored as twice 8
//     bytes: 24 and 14 % conflicts, sectors 16.5 MB
//   D = 130, copies of 4 bytes: 3811 and 8554 instructions, 6 and 11 % conflicts
#include "halves.cuh"
#if GATHERED
#include "row_memory.cuh"
#endif

namespace {

using Half = uint16_t;  // the bits of a number

constexpr int PIECE = 8;                     // Halves of 16 bytes, a row of what ldmatrix reads
constexpr int TILES = (FEATURES + 15) / 16;  // tiles of 16 rows
constexpr int ROWS = 16 * TILES;
constexpr int PAIRS = FEATURES * (FEATURES - 1 + 2 * SELF) / 2;
constexpr int HEAD = CONCAT ? WIDTH : 0;
constexpr int COLUMNS = HEAD + PAIRS + PADDING;
constexpr int SOURCES = GATHERED ? (FEATURES + 1) / 2 * 8 : 0;  // numbers a warp, of addresses

// Where a number of x lies. Pieces of a row change places so that those of one column in 8 rows
// in a row lie in other banks each.
__device__ __forceinline__ int place(int row, int column) {
    constexpr int PIECES = CHUNK / PIECE, EVEN = PIECES & -PIECES;
    constexpr int SWAPPED = EVEN < 8 ? EVEN : 8;  // pieces that change places
    const int turn = row / (8 / SWAPPED) % SWAPPED;
    return row * CHUNK + ((column / PIECE) ^ turn) * PIECE + column % PIECE;
}

__device__ __forceinline__ uint32_t shared_address(const Half* x) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(x));
}

struct Pieces {
    uint32_t at[4];
};

// Four matrices of 8 x 8; eight lanes each say where the rows of one lie.
__device__ __forceinline__ Pieces load_matrices(const Half* row) {
    Pieces m;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m.at[0]), "=r"(m.at[1]), "=r"(m.at[2]), "=r"(m.at[3])
                 : "r"(shared_address(row))
                 : "memory");
    return m;
}

__device__ __forceinline__ Pieces load_transposed(const Half* row) {
    Pieces m;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m.at[0]), "=r"(m.at[1]), "=r"(m.at[2]), "=r"(m.at[3])
                 : "r"(shared_address(row))
                 : "memory");
    return m;
}

// sums += a b, of 16 x 16 and 16 x 8. A lane has sums of columns 2 (lane % 4) and the next, in row
// lane / 4 the first two, in row lane / 4 + 8 the others.
__device__ __forceinline__ void multiply(float (&sums)[4], const Pieces& a, uint32_t b0,
                                         uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32." HALF_TYPE "." HALF_TYPE
        ".f32 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a.at[0]), "r"(a.at[1]), "r"(a.at[2]), "r"(a.at[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ Half doubled(Half x) {
    const Half one = BRAIN ? 0x3F80 : 0x3C00;
    asm("fma.rn." HALF_TYPE " %0, %0, %1, %0;" : "+h"(x) : "h"(one));
    return x;
}

// A feature's row of this sample.
template <typename T>
__device__ __forceinline__ T* row_of(T* dense, T* sparse, int64_t sample, int row) {
    if (DENSE && row == 0) return dense + sample * WIDTH;
    return sparse + (sample * (FEATURES - DENSE) + row - DENSE) * WIDTH;
}

#if GATHERED
// Where the sparse rows of X lie, an address each, as ValueVectors says -> shared memory.
__device__ __forceinline__ void find_rows(uint64_t* at, const ValueVectors& vectors,
                                          int64_t sample) {
    for (int row = DENSE + threadIdx.x % WARP; row < FEATURES; row += WARP)
        at[row] = vectors.address<WIDTH>(sample * (FEATURES - DENSE) + row - DENSE);
    __syncwarp();
}

// Columns [start, start + CHUNK) of these rows -> x, rounded to the nearest; BATCH loads of a lane
// are in flight.
__device__ __forceinline__ void stage_rows(Half* x, const uint64_t* sources, int start) {
    constexpr int N = VECTOR < 4 ? VECTOR : 4, UNITS = CHUNK / N, BATCH = 8;
    constexpr int TOTAL = (FEATURES - DENSE) * UNITS;
    const int lane = threadIdx.x % WARP;
    for (int first = lane; first - lane < TOTAL; first += BATCH * WARP) {
        Floats<N> loaded[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int unit = first + i * WARP, column = start + unit % UNITS * N;
            loaded[i] = {};
            if (unit < TOTAL && (WIDTH % CHUNK == 0 || column < WIDTH))
                loaded[i] = columns_at<N>(sources[DENSE + unit / UNITS], column);
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int unit = first + i * WARP;
            if (unit < TOTAL) store(x + place(DENSE + unit / UNITS, unit % UNITS * N), loaded[i]);
        }
    }
}
#endif

// Columns [start, start + CHUNK) of all rows, but those of `stage_rows` -> x; zeros beyond the last
// column, and up to FILLED rows.
template <int FILLED>
__device__ __forceinline__ void stage(Half* x, const Half* dense, const Half* sparse,
                                      int64_t sample, int start) {
    constexpr int UNITS = CHUNK / VECTOR;  // of a row
    constexpr int ELSEWHERE = GATHERED ? FEATURES - DENSE : 0;
#pragma unroll 4
    for (int unit = threadIdx.x % WARP; unit < (FILLED - ELSEWHERE) * UNITS; unit += WARP) {
        const int number = unit / UNITS, column = unit % UNITS * VECTOR;
        const int row = number < DENSE ? number : number + ELSEWHERE;
        const bool real = (FILLED == FEATURES || row < FEATURES) &&
                          (WIDTH % CHUNK == 0 || start + column < WIDTH);
        const Half* from =
            row_of(dense, sparse, sample, real ? row : 0) + (real ? start + column : 0);
        Half* to = x + place(row, column);
        if constexpr (VECTOR == 1) {
            *to = real ? *from : 0;
        } else {
            asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(to)),
                         "l"(from), "n"(2 * VECTOR), "r"(real ? 2 * VECTOR : 0)
                         : "memory");
        }
    }
}

__device__ __forceinline__ void copies_done() {
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncwarp();
}

// Walks along the pairs, a warp's width a step, from a multiple of 64 bytes on, before the first.
struct Walk {
    int pair, row, column;
    __device__ __forceinline__ explicit Walk(const Half* pairs)
        : pair(static_cast<int>(threadIdx.x % WARP) -
               static_cast<int>(reinterpret_cast<uint64_t>(pairs) / 2 % WARP)),
          row(1 - SELF),
          column(pair) {
        wrap();
    }
    __device__ __forceinline__ void step() {
        pair += WARP, column += WARP;
        wrap();
    }
    __device__ __forceinline__ void wrap() {
        while (column >= row + SELF) column -= row++ + SELF;
    }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS)
    dot_interaction_16_forward(const uint16_t* dense, const uint16_t* sparse,
                               const uint64_t* chunks, int k, int stride, const int64_t* rows,
                               const int64_t* inverse, const float* unseen, uint16_t* out,
                               int64_t batch) {
    extern __shared__ __align__(16) Half shared[];
    constexpr int X = FEATURES * CHUNK, S = ROWS * S_STRIDE;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int64_t sample = static_cast<int64_t>(blockIdx.x) * (THREADS / WARP) + warp;
    if (sample >= batch) return;
    Half* own = shared + warp * (SOURCES + (X > S ? X : S));
    Half* x = own + SOURCES;  // and S, once X is read
    out += sample * COLUMNS;
#if GATHERED
    uint64_t* sources = reinterpret_cast<uint64_t*>(own);
    find_rows(sources, {chunks, k, stride, rows, inverse, unseen}, sample);
#endif

    float sums[TILES][2 * TILES][4] = {};
    for (int start = 0; start < WIDTH; start += CHUNK) {
        if (start > 0) __syncwarp();
        stage<FEATURES>(x, dense, sparse, sample, start);
#if GATHERED
        stage_rows(x, sources, start);
#endif
        copies_done();
        if (CONCAT) {
            const int width = min(CHUNK, WIDTH - start);
#pragma unroll 4
            for (int d = lane; d < width; d += WARP) out[start + d] = x[place(0, d)];
        }
        for (int k = 0; k < (PAIRS > 0 ? CHUNK : 0); k += 16) {
            Pieces tiles[TILES];
#pragma unroll
            for (int i = 0; i < TILES; ++i) {
                // Rows beyond the last repeat it: nobody asks for their products.
                const int row = min(16 * i + lane % 16, FEATURES - 1);
                tiles[i] = load_matrices(x + place(row, k + lane / 16 * PIECE));
            }
#pragma unroll
            for (int i = 0; i < TILES; ++i) {
#pragma unroll
                for (int j = 0; j < 2 * i + 2; ++j) {
                    const Pieces& right = tiles[j / 2];
                    if (8 * j < FEATURES - 1 + SELF)
                        multiply(sums[i][j], tiles[i], right.at[j % 2], right.at[j % 2 + 2]);
                }
            }
        }
    }

    Half* s = x;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
#pragma unroll
        for (int j = 0; j < 2 * i + 2; ++j) {
            Half* to = s + (16 * i + lane / 4) * S_STRIDE + 8 * j + lane % 4 * 2;
            store<2>(to, {sums[i][j][0], sums[i][j][1]});
            store<2>(to + 8 * S_STRIDE, {sums[i][j][2], sums[i][j][3]});
        }
    }
    __syncwarp();
    for (Walk at(out + HEAD); at.pair < PAIRS + PADDING; at.step()) {
        if (at.pair >= 0)
            out[HEAD + at.pair] = at.pair < PAIRS ? s[at.row * S_STRIDE + at.column] : 0;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    dot_interaction_16_backward(const uint16_t* grad, const uint16_t* dense, const uint16_t* sparse,
                                const uint64_t* chunks, int k, int stride, const int64_t* rows,
                                const int64_t* inverse, const float* unseen, uint16_t* ddense,
                                uint16_t* dsparse, int64_t batch) {
    extern __shared__ __align__(16) Half shared[];
    constexpr int X = (ROWS + 1) * CHUNK, S = ROWS * S_STRIDE;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int64_t sample = static_cast<int64_t>(blockIdx.x) * (THREADS / WARP) + warp;
    if (sample >= batch) return;
    Half* own = shared + warp * (SOURCES + X + S);
    Half *s = own + SOURCES, *x = s + S;
    grad += sample * COLUMNS;

    stage<ROWS>(x, dense, sparse, sample, 0);
#if GATHERED
    uint64_t* sources = reinterpret_cast<uint64_t*>(own);
    find_rows(sources, {chunks, k, stride, rows, inverse, unseen}, sample);
    stage_rows(x, sources, 0);
#endif
    for (int n = lane; n < S / PIECE; n += WARP)
        reinterpret_cast<uint4*>(s)[n] = make_uint4(0, 0, 0, 0);
    __syncwarp();
    for (Walk at(grad + HEAD); at.pair < PAIRS; at.step()) {
        if (at.pair < 0) continue;
        const Half g = grad[HEAD + at.pair];
        s[at.row * S_STRIDE + at.column] = SELF && at.row == at.column ? doubled(g) : g;
    }
    __syncwarp();
    Pieces weights[TILES][TILES];
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
#pragma unroll
        for (int j = 0; j < TILES; ++j) {
            const Half* below = s + (16 * i + lane % 16) * S_STRIDE + 16 * j + lane / 16 * PIECE;
            const Half* above =
                s + (16 * j + lane / 16 * 8 + lane % 8) * S_STRIDE + 16 * i + lane / 8 % 2 * PIECE;
            if (i > j) weights[i][j] = load_matrices(below);
            if (i < j) weights[i][j] = load_transposed(above);
            if (i == j) {  // the diagonal is in both, all else in one of them and 0 in the other
                weights[i][j] = load_matrices(below);
                const Pieces other = load_transposed(above);
#pragma unroll
                for (int n = 0; n < 4; ++n) weights[i][j].at[n] |= other.at[n];
            }
        }
    }

    for (int start = 0; start < WIDTH; start += CHUNK) {
        if (start > 0) {
            __syncwarp();
            stage<ROWS>(x, dense, sparse, sample, start);
#if GATHERED
            stage_rows(x, sources, start);
#endif
        }
        if (CONCAT) {
#pragma unroll 4
            for (int d = lane; d < CHUNK; d += WARP)
                x[place(ROWS, d)] = WIDTH % CHUNK == 0 || start + d < WIDTH ? grad[start + d] : 0;
        }
        copies_done();
#pragma unroll 1
        for (int n = 0; n < CHUNK; n += 16) {
            float sums[TILES][2][4] = {};
            if (CONCAT && lane < 4) {  // who has row 0
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const Half* direct = x + place(ROWS, n + half * PIECE + lane * 2);
                    const auto both = *reinterpret_cast<const Numbers<Half, 2>*>(direct);
                    sums[0][half][0] = widened(both.at[0]), sums[0][half][1] = widened(both.at[1]);
                }
            }
#pragma unroll
            for (int j = 0; j < TILES; ++j) {
                const Pieces right =
                    load_transposed(x + place(16 * j + lane % 16, n + lane / 16 * PIECE));
#pragma unroll
                for (int i = 0; i < TILES; ++i) {
                    multiply(sums[i][0], weights[i][j], right.at[0], right.at[1]);
                    multiply(sums[i][1], weights[i][j], right.at[2], right.at[3]);
                }
            }
            __syncwarp();
#pragma unroll
            for (int i = 0; i < TILES; ++i) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int row = 16 * i + lane / 4, column = n + half * PIECE + lane % 4 * 2;
                    store<2>(x + place(row, column), {sums[i][half][0], sums[i][half][1]});
                    store<2>(x + place(row + 8, column), {sums[i][half][2], sums[i][half][3]});
                }
            }
        }
        __syncwarp();
        constexpr int UNITS = CHUNK / VECTOR;
#pragma unroll 4
        for (int unit = lane; unit < FEATURES * UNITS; unit += WARP) {
            const int row = unit / UNITS, column = unit % UNITS * VECTOR;
            if (WIDTH % CHUNK != 0 && start + column >= WIDTH) continue;
            using Vector = Numbers<Half, VECTOR>;
            Half* to = row_of(ddense, dsparse, sample, row) + start + column;
            *reinterpret_cast<Vector*>(to) =
                *reinterpret_cast<const Vector*>(x + place(row, column));
        }
    }
}
