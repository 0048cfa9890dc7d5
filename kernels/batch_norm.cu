// What: of each column of x (b, n): mean and rstd = 1 / sqrt(variance + eps) over the batch, and
//   running statistics; y = (x - mean) * rstd * weight + bias; sums of dy * xhat and of dy, with
//   xhat = (x - mean) * rstd; dx = weight * rstd * (dy - mean of dy - xhat * mean of dy * xhat), in
//   evaluation (sums is null) without the means. On several ranks sums and rows are those of all.
// Who does what: a block of 256 threads has a tile of LANES * VECTOR columns and `turns` times
//   GROUPS * ROWS rows, GROUPS apart for a thread, whose columns' factors it reads once.
//   batch_norm_moments: a thread's ROWS rows at once, then groups of a warp by shuffles, then warps
//   in order, each time by Chan, Golub and LeVeque's formula (1983): the mean of the block's rows,
//   less the batch's first, and the sum of squared differences from it. batch_norm_statistics: a
//   block of 32 warps has 32 columns; warp w puts parts w, w + 32, ... together, then the results
//   of column w by shuffles; batch_norm_add_moments the same, of a rank's part of the batch, for
//   others to be added. batch_norm_sums: likewise, plain sums. batch_norm_add_parts: see
//   column_sum.cuh.
// Assumes: b > 1 in training; VECTOR divides n, matrices and vectors of n are aligned to VECTOR
//   floats; LANES is a power of two up to 32. Quotients are spelt, as in layer_norm.cu.
// Moves: forward x read twice, for statistics stand before outputs, and y written; backward x and
//   dy read twice, dx written; 8 n bytes a block of 32 rows or more written and read again.
// Tried: 256 rows of 1,024 and 128: bytes 1.05 of these forward, 1.03 backward; sectors 2.5 and
//   2.0, of columns' factors that each warp reads. Blocks have 32 rows, or as many as leave 1,024
//   blocks. Moments at a mean of 10,000 without the first row taken off: the variance is wrong in
//   its fifth digit, whether parts have sums or means; so it is right to the last.
#include "column_sum.cuh"

namespace {

constexpr int THREADS = 256, GROUPS = THREADS / LANES, WARPS = THREADS / WARP;
constexpr int SPAN = LANES * VECTOR, ROWS = 4;

using Piece = Floats<VECTOR>;

// What a thread has of (b, n) matrices: rows row, row + GROUPS, ... below stop, from a column on.
struct Tile {
    int64_t row, stop, column, part, n;
    bool there;

    __device__ __forceinline__ Tile(int64_t b, int64_t columns, int64_t turns) : n(columns) {
        const int64_t tiles = (n + SPAN - 1) / SPAN, rows = turns * (GROUPS * ROWS);
        part = blockIdx.x / tiles;
        column = blockIdx.x % tiles * SPAN + threadIdx.x % LANES * VECTOR;
        row = part * rows + threadIdx.x / LANES;
        stop = part * rows + rows < b ? part * rows + rows : b;
        there = column < n;
    }
    __device__ __forceinline__ Piece vector(const float* x) const {
        return there ? load<VECTOR>(x + column) : Piece{};
    }
    // ROWS rows from `first` on; 0 beyond the end.
    __device__ __forceinline__ void read(const float* x, int64_t first,
                                         Piece (&pieces)[ROWS]) const {
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const int64_t at = first + i * GROUPS;
            pieces[i] = {};
            if (there && at < stop) pieces[i] = load<VECTOR>(x + at * n + column);
        }
    }
};

template <int N>
struct Moments {
    float count;
    Floats<N> mean, squares;  // of differences from the mean
};

template <int N>
__device__ __forceinline__ void add(Moments<N>& a, const Moments<N>& b) {
    if (b.count == 0.0f) return;
    const float before = a.count, share = __fdiv_rn(b.count, before + b.count);
    a.count += b.count;
#pragma unroll
    for (int l = 0; l < N; ++l) {
        const float off = b.mean.at[l] - a.mean.at[l];
        a.mean.at[l] = fmaf(off, share, a.mean.at[l]);
        a.squares.at[l] = fmaf(off * off, before * share, a.squares.at[l] + b.squares.at[l]);
    }
}

// The moments of the lane `step` further on.
template <int N>
__device__ __forceinline__ Moments<N> further(const Moments<N>& own, int step) {
    Moments<N> other;
    other.count = __shfl_down_sync(FULL, own.count, step);
#pragma unroll
    for (int l = 0; l < N; ++l) {
        other.mean.at[l] = __shfl_down_sync(FULL, own.mean.at[l], step);
        other.squares.at[l] = __shfl_down_sync(FULL, own.squares.at[l], step);
    }
    return other;
}

// The moments of all parts of a column, which one lane of a block of 32 columns has.
struct Column {
    Moments<1> all = {};
    int64_t column;
    bool mine;

    __device__ __forceinline__ Column(const float* parts, int64_t count, int64_t rows, int64_t b,
                                      int64_t n) {
        __shared__ float means[SUM_WARPS][WARP + 1], squares[SUM_WARPS][WARP + 1];
        __shared__ float counts[SUM_WARPS];
        const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
        const int64_t first = int64_t(blockIdx.x) * WARP;
        for (int64_t part = warp; part < count; part += SUM_WARPS) {
            const int64_t left = b - part * rows;
            Moments<1> some = {static_cast<float>(left < rows ? left : rows), {}, {}};
            if (first + lane < n) {
                some.mean.at[0] = parts[part * 2 * n + first + lane];
                some.squares.at[0] = parts[(part * 2 + 1) * n + first + lane];
            }
            add(all, some);
        }
        means[warp][lane] = all.mean.at[0];
        squares[warp][lane] = all.squares.at[0];
        if (lane == 0) counts[warp] = all.count;
        __syncthreads();
        all = {counts[lane], {means[lane][warp]}, {squares[lane][warp]}};
#pragma unroll
        for (int step = WARP / 2; step; step /= 2) add(all, further(all, step));
        column = first + warp;
        mine = lane == 0 && column < n;
    }
};

__device__ __forceinline__ Piece normalized(const Piece& x, const Piece& mean, const Piece& rstd) {
    Piece xhat;
#pragma unroll
    for (int l = 0; l < VECTOR; ++l) xhat.at[l] = (x.at[l] - mean.at[l]) * rstd.at[l];
    return xhat;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(256)
    batch_norm_moments(const float* x, float* parts, int64_t b, int64_t n, int64_t turns) {
    const Tile tile(b, n, turns);
    const Piece pivot = tile.vector(x);
    Moments<VECTOR> all = {};
    for (int64_t row = tile.row; row < tile.stop; row += GROUPS * ROWS) {
        Piece values[ROWS];
        tile.read(x, row, values);
        const int64_t left = (tile.stop - row + GROUPS - 1) / GROUPS;
        const int count = left < ROWS ? static_cast<int>(left) : ROWS;
        Moments<VECTOR> some = {static_cast<float>(count), {}, {}};
#pragma unroll
        for (int l = 0; l < VECTOR; ++l) {
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                values[i].at[l] = i < count ? values[i].at[l] - pivot.at[l] : 0.0f;
                sum += values[i].at[l];
            }
            some.mean.at[l] = __fdiv_rn(sum, some.count);
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                const float off = i < count ? values[i].at[l] - some.mean.at[l] : 0.0f;
                some.squares.at[l] = fmaf(off, off, some.squares.at[l]);
            }
        }
        add(all, some);
    }
#pragma unroll
    for (int step = WARP / 2; step >= LANES; step /= 2) add(all, further(all, step));
    __shared__ __align__(16) float moments[WARPS][2][SPAN];
    __shared__ float counts[WARPS];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (lane < LANES) {
        store(&moments[warp][0][lane * VECTOR], all.mean);
        store(&moments[warp][1][lane * VECTOR], all.squares);
    }
    if (lane == 0) counts[warp] = all.count;
    __syncthreads();
    const int at = threadIdx.x;
    const int64_t column = tile.column - threadIdx.x % LANES * VECTOR + at;
    if (at >= SPAN || column >= n) return;
    Moments<1> joint = {counts[0], {moments[0][0][at]}, {moments[0][1][at]}};
#pragma unroll
    for (int other = 1; other < WARPS; ++other) {
        add(joint, {counts[other], {moments[other][0][at]}, {moments[other][1][at]}});
    }
    parts[tile.part * 2 * n + column] = joint.mean.at[0];
    parts[(tile.part * 2 + 1) * n + column] = joint.squares.at[0];
}

extern "C" __global__ void __launch_bounds__(1024)
    batch_norm_statistics(const float* x, const float* parts, int64_t count, int64_t rows,
                          int64_t b, int64_t n, float eps, float momentum, float* running_mean,
                          float* running_var, float* mean, float* rstd) {
    const Column of(parts, count, rows, b, n);
    if (!of.mine) return;
    const float center = x[of.column] + of.all.mean.at[0];
    const float unbiased = __fdiv_rn(of.all.squares.at[0], of.all.count - 1.0f);
    mean[of.column] = center;
    rstd[of.column] = __frcp_rn(__fsqrt_rn(__fdiv_rn(of.all.squares.at[0], of.all.count) + eps));
    if (!isfinite(center) || !isfinite(unbiased)) return;
    float *kept_mean = running_mean + of.column, *kept_var = running_var + of.column;
    *kept_mean = fmaf(momentum, center, (1.0f - momentum) * *kept_mean);
    *kept_var = fmaf(momentum, unbiased, (1.0f - momentum) * *kept_var);
}

extern "C" __global__ void __launch_bounds__(1024)
    batch_norm_add_moments(const float* x, const float* parts, int64_t count, int64_t rows,
                           int64_t b, int64_t n, float* out) {
    const Column of(parts, count, rows, b, n);
    if (!of.mine) return;
    out[of.column] = x[of.column];
    out[n + of.column] = of.all.mean.at[0];
    out[2 * n + of.column] = of.all.squares.at[0];
}

extern "C" __global__ void __launch_bounds__(256)
    batch_norm(const float* x, const float* mean, const float* rstd, const float* weight,
               const float* bias, float* y, int64_t b, int64_t n, int64_t turns) {
    const Tile tile(b, n, turns);
    const Piece centers = tile.vector(mean), scales = tile.vector(rstd);
    const Piece factors = tile.vector(weight), added = tile.vector(bias);
    for (int64_t row = tile.row; row < tile.stop; row += GROUPS * ROWS) {
        Piece values[ROWS];
        tile.read(x, row, values);
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const int64_t at = row + i * GROUPS;
            Piece out = normalized(values[i], centers, scales);
#pragma unroll
            for (int l = 0; l < VECTOR; ++l) {
                out.at[l] = fmaf(out.at[l], factors.at[l], added.at[l]);
            }
            if (tile.there && at < tile.stop) store(y + at * n + tile.column, out);
        }
    }
}

extern "C" __global__ void __launch_bounds__(256)
    batch_norm_sums(const float* x, const float* dy, const float* mean, const float* rstd,
                    float* parts, int64_t b, int64_t n, int64_t turns) {
    const Tile tile(b, n, turns);
    const Piece centers = tile.vector(mean), scales = tile.vector(rstd);
    Piece products = {}, total = {};
    for (int64_t row = tile.row; row < tile.stop; row += GROUPS * ROWS) {
        Piece values[ROWS], grad[ROWS];
        tile.read(x, row, values);
        tile.read(dy, row, grad);
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            if (row + i * GROUPS >= tile.stop) break;
            const Piece xhat = normalized(values[i], centers, scales);
#pragma unroll
            for (int l = 0; l < VECTOR; ++l) {
                products.at[l] = fmaf(grad[i].at[l], xhat.at[l], products.at[l]);
                total.at[l] += grad[i].at[l];
            }
        }
    }
#pragma unroll
    for (int step = WARP / 2; step >= LANES; step /= 2) {
#pragma unroll
        for (int l = 0; l < VECTOR; ++l) {
            products.at[l] += __shfl_down_sync(FULL, products.at[l], step);
            total.at[l] += __shfl_down_sync(FULL, total.at[l], step);
        }
    }
    __shared__ __align__(16) float sums[WARPS][2 * SPAN];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (lane < LANES) {
        store(&sums[warp][lane * VECTOR], products);
        store(&sums[warp][SPAN + lane * VECTOR], total);
    }
    __syncthreads();
    const int at = threadIdx.x;
    const int64_t column = tile.column - threadIdx.x % LANES * VECTOR + at % SPAN;
    if (at >= 2 * SPAN || column >= n) return;
    float sum = sums[0][at];
#pragma unroll
    for (int other = 1; other < WARPS; ++other) sum += sums[other][at];
    parts[(tile.part * 2 + at / SPAN) * n + column] = sum;
}

extern "C" __global__ void __launch_bounds__(1024)
    batch_norm_add_parts(const float* parts, int64_t count, int64_t columns, float* out) {
    column_sum(parts, count, columns, out);
}

extern "C" __global__ void __launch_bounds__(256)
    batch_norm_gradient(const float* x, const float* dy, const float* mean, const float* rstd,
                        const float* weight, const float* sums, float rows, float* dx, int64_t b,
                        int64_t n, int64_t turns) {
    const Tile tile(b, n, turns);
    const Piece centers = tile.vector(mean), scales = tile.vector(rstd);
    Piece factors = tile.vector(weight), slopes = {}, means = {};
    if (sums) slopes = tile.vector(sums), means = tile.vector(sums + n);
#pragma unroll
    for (int l = 0; l < VECTOR; ++l) {
        factors.at[l] *= scales.at[l];
        slopes.at[l] = __fdiv_rn(slopes.at[l], rows);
        means.at[l] = __fdiv_rn(means.at[l], rows);
    }
    for (int64_t row = tile.row; row < tile.stop; row += GROUPS * ROWS) {
        Piece values[ROWS], grad[ROWS];
        tile.read(x, row, values);
        tile.read(dy, row, grad);
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const int64_t at = row + i * GROUPS;
            Piece out = normalized(values[i], centers, scales);
#pragma unroll
            for (int l = 0; l < VECTOR; ++l) {
                const float rest = grad[i].at[l] - means.at[l];
                out.at[l] = factors.at[l] * fmaf(-out.at[l], slopes.at[l], rest);
            }
            if (tile.there && at < tile.stop) store(dx + at * n + tile.column, out);
        }
    }
}
