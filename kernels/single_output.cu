// What: gradients of y = x . weight + bias, one number a row of x (b, n): dweight = sum over b of
//   dy * x; dbias = sum over b of dy; dx = dy * weight * scale, with RELU only where x > 0;
//   dx_sum = sum over b of dx before it is rounded.
// Who does what: a block of 256 threads has a tile of LANES * VECTOR columns and `turns` times
//   GROUPS * ROWS rows, GROUPS apart for a thread. Sums: a thread's rows, then groups of a warp by
//   shuffles, then warps in order; of several blocks of a tile the last to come adds up the parts,
//   four columns a thread, in an order that is always the same. Tile 0 also has dbias.
// Assumes: VECTOR divides n, x, weight and dx are aligned to VECTOR numbers; LANES is a power of
//   two up to 32, 2 <= LANES * VECTOR <= 64. The grid is a multiple of `tiles`, whose counters are
//   0. dx or dx_sum may be null. dweight and dx_sum have the first `kept` of n columns alone.
// Moves: x read, dx written; 8 n bytes a block of 64 rows or more written and read again, and dy
//   read once a tile.
// Tried: 256 rows of 1,024: bytes 1.03 of these, sectors 1.13 in float32 and 1.10 in float16, of
//   dy, which each warp reads. Stores of a struct, whose members NVRTC stores one by one in a loop:
//   sectors 2.6.
#include "block_sum.cuh"
#include "halves.cuh"
#include "last_block.cuh"

namespace {

constexpr int THREADS = 256, GROUPS = THREADS / LANES, WARPS = THREADS / WARP, ROWS = 4;
constexpr int SPAN = LANES * VECTOR, COLUMNS = 2 * SPAN;  // COLUMNS: of sums, dweight and dx_sum
constexpr int QUADS = COLUMNS / 4;

using Piece = Floats<VECTOR>;
using Raw = Numbers<value_t, VECTOR>;

__device__ __forceinline__ Raw read(const value_t* from, bool there) {
    Raw values = {};
    if (there) values = *reinterpret_cast<const Raw*>(from);
    return values;
}

// 16 bytes at once, spelt: in a loop NVRTC 12.9 stores a struct member by member.
__device__ __forceinline__ void write(value_t* to, const Piece& x) {
    if constexpr (sizeof(Raw) < 16) {
        store(to, x);
    } else {
        uint32_t word[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if constexpr (VECTOR == 4) {
                word[i] = __float_as_uint(x.at[i]);
            } else {
                word[i] = rounded_pair(x.at[2 * i], x.at[2 * i + 1]);
            }
        }
        asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)),
                     "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3])
                     : "memory");
    }
}

// The sum over `count` rows of `sums`, of the column that this thread has.
__device__ __forceinline__ float column_sum(const float* sums, int count) {
    float sum = 0.0f;
    if (threadIdx.x >= COLUMNS) return sum;
#pragma unroll 8
    for (int row = 0; row < count; ++row) sum += sums[row * COLUMNS + threadIdx.x];
    return sum;
}

// What the warps' lanes have, in a row of `sums` a warp: element l of lane k in column l LANES + k.
__device__ __forceinline__ void share(Piece x, float* sums) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int l = 0; l < VECTOR; ++l) {
#pragma unroll
        for (int step = WARP / 2; step >= LANES; step /= 2)
            x.at[l] += __shfl_down_sync(FULL, x.at[l], step);
        if (lane < LANES) sums[threadIdx.x / WARP * COLUMNS + l * LANES + lane] = x.at[l];
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(256)
    single_output_backward(const float* dy, const value_t* x, const value_t* weight, float* parts,
                           double* bias_parts, uint32_t* counters, float* dweight, float* dbias,
                           value_t* dx, float* dx_sum, float scale, int64_t b, int64_t n,
                           int64_t kept, int64_t turns, int64_t tiles) {
    const int64_t tile = blockIdx.x % tiles, part = blockIdx.x / tiles, count = gridDim.x / tiles;
    const int64_t column = tile * SPAN + threadIdx.x % LANES * VECTOR;
    const int64_t rows = turns * (GROUPS * ROWS);
    const int64_t stop = (part + 1) * rows < b ? (part + 1) * rows : b;
    const bool there = column < n;
    const Raw weights = read(weight + column, there);
    Piece factors, products = {}, sums = {};
#pragma unroll
    for (int l = 0; l < VECTOR; ++l) factors.at[l] = widened(weights.at[l]) * scale;
    float total = 0.0f;
    for (int64_t row = part * rows + threadIdx.x / LANES; row < stop; row += GROUPS * ROWS) {
        Raw values[ROWS];
        float grad[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const int64_t at = row + i * GROUPS;
            grad[i] = at < stop ? dy[at] : 0.0f;
            total += grad[i];
            values[i] = read(x + at * n + column, there && at < stop);
        }
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const int64_t at = row + i * GROUPS;
            Piece out;
#pragma unroll
            for (int l = 0; l < VECTOR; ++l) {
                const float value = widened(values[i].at[l]);
                products.at[l] = fmaf(grad[i], value, products.at[l]);
                out.at[l] = !RELU || value > 0.0f ? grad[i] * factors.at[l] : 0.0f;
                sums.at[l] += at < stop ? out.at[l] : 0.0f;
            }
            if (dx && there && at < stop) write(dx + at * n + column, out);
        }
    }

    __shared__ __align__(16) float shared[4 * THREADS];
    share(products, shared);
    share(sums, shared + SPAN);
    double bias = threadIdx.x % LANES == 0 ? total : 0.0f;
    if (tile == 0) bias = block_sum<THREADS>(bias);
    __syncthreads();
    float sum = column_sum(shared, WARPS);
    if (count > 1) {
        parts += tile * count * COLUMNS;
        if (threadIdx.x < COLUMNS) parts[part * COLUMNS + threadIdx.x] = sum;
        if (tile == 0 && threadIdx.x == 0) bias_parts[part] = bias;
        if (!last_block(counters + tile, static_cast<uint32_t>(count))) return;
        Floats<4> joint = {};
#pragma unroll 4
        for (int64_t i = threadIdx.x / QUADS; i < count; i += THREADS / QUADS) {
            const Floats<4> some = load<4>(parts + i * COLUMNS + threadIdx.x % QUADS * 4);
#pragma unroll
            for (int l = 0; l < 4; ++l) joint.at[l] += some.at[l];
        }
        store(shared + 4 * threadIdx.x, joint);
        bias = 0.0;
        for (int64_t i = threadIdx.x; tile == 0 && i < count; i += THREADS) bias += bias_parts[i];
        if (tile == 0) bias = block_sum<THREADS>(bias);
        __syncthreads();
        sum = column_sum(shared, THREADS / QUADS);
    }
    const int own = threadIdx.x % SPAN;
    const int64_t to = tile * SPAN + own % LANES * VECTOR + own / LANES;
    float* out = threadIdx.x < SPAN ? dweight : dx_sum;
    if (threadIdx.x < COLUMNS && to < kept && out) out[to] = sum;
    if (tile == 0 && threadIdx.x == 0) *dbias = static_cast<float>(bias);
}
